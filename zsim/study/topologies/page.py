"""Topologies on one self-contained HTML page: drawings, utilisation, comparisons, measured curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zsim.report.views.html.figure import script_json
from zsim.report.views.html.page import Section, page, plot, render
from zsim.specs.cluster.files import load_cluster
from zsim.study.topologies import figures
from zsim.study.topologies.film import (
    CLUSTER_CAPTION,
    LOADS_CAPTION,
    SHADES,
    Film,
    cluster_figure,
    loads_figure,
)
from zsim.study.topologies.picture import MAX_NODES
from zsim.units import format_rate, format_seconds
from zsim.validated.verdict import unless_fits

if TYPE_CHECKING:
    from zsim.study.topologies.bench import CurvePoint
    from zsim.study.topologies.topologies import TopologyComparison

_KICKER = "topologies"
_ALIKE = 0.05  # percent between lines


def topology_page(clusters: Sequence[tuple[str, int]], title: str) -> str:
    """A page with a drawing of each (cluster, number of nodes)."""
    from zsim.study.topologies.topologies import describe_topology

    sections = []
    for number, (name, nodes) in enumerate(clusters):
        facts = describe_topology(name, nodes)
        rows = [
            *([f"{tier} links", f"{row['links']:,}", format_rate(row["bytes_per_second"])]
              for tier, row in facts["tiers"].items()),
            *([f"{role} switches", f"{count:,}", f"{facts['ports_per_switch'][role]} ports"]
              for role, count in facts["switches"].items()),
            *([f"{kind} cables", f"{count:,}", ""] for kind, count in facts["cables"].items()),
        ]  # fmt: skip
        drawn = [(f"d{number}", _drawn(facts), figures.drawing(name, nodes))]
        sections.append(Section(facts["description"], drawn, ["", "count", "each"], rows))
    return page(title, _KICKER, sections)


def film_page(film: Film, title: str) -> str:
    """The page as text: the drawing, a slider and Play along the step, and the links' use."""
    return render(
        "film.html.j2",
        title=title,
        cluster=plot("cluster", CLUSTER_CAPTION, cluster_figure(film)),
        loads=plot("loads", LOADS_CAPTION, loads_figure(film)),
        shades=SHADES,
        frames=script_json(film.to_dict()),
        num_frames=len(film.words),
        words=film.words[0],
    )


def comparison_page(rows: Sequence[TopologyComparison]) -> str:
    """A page that compares one experiment on several clusters."""
    from zsim.study.topologies.routings import routing_words
    from zsim.study.topologies.text import ROUTING_HEAD, routing_cells, undecided

    labels = rows[0].report.labels
    best = min(rows, key=lambda row: row.report.step_seconds)
    fastest = f"Fastest: {best.cluster}, {format_seconds(best.report.step_seconds)} per step."
    summary = " ".join([fastest, *undecided(rows)])
    table = Section(
        "Side by side",
        [
            ("steps", "Every instant of the step, by what the compute stream does or waits for.",
             figures.breakdowns(rows)),
        ],
        ["cluster", "step", "exposed communication", "tokens/s/GPU", "MFU", "switches", "cables",
         "bisection"],
        [_cells(row) for row in rows],
    )  # fmt: skip
    drawn = [
        (f"d{number}", f"{row.cluster}, {_drawn(row.facts)} {_load_words(row)}",
         figures.draw(row.picture, load_cluster(row.file), row.line_loads))
        for number, row in enumerate(rows)
    ]  # fmt: skip
    routed = [[*routing_cells(row), routing_words(row.routing)] for row in rows]
    sections = [
        table,
        Section("Routing: flows on all paths (ideal), or on one that a hash chooses (ECMP)", [],
                [*ROUTING_HEAD, "why"], routed),
        Section("Links", [
            ("heat", "How busy the fullest link of each tier is over the step.", figures.heat_map(rows)),
            ("traffic", "Bytes that one GPU puts on each tier per step.", figures.traffic(rows)),
        ]),
        Section("Scaling", [
            ("scaling", "More GPUs, the same batch on each: a flat line is perfect.", figures.scaling(rows))
        ]),
        Section("What the fabrics are built of", [("price", "Switches, ports in use, cables.",
                                                    figures.price(rows))]),
        Section("The fabrics", drawn),
    ]  # fmt: skip
    gpus = f"{rows[0].gpus:,} GPUs"
    title = " | ".join(part for part in (labels.get("model"), labels.get("strategy"), gpus) if part)
    return page(title, _KICKER, sections, summary)


def curves_page(points: Sequence[CurvePoint]) -> str:
    """A page of measured (dots) and simulated (lines) curves, one figure per cluster, with the errors."""
    from zsim.study.topologies.bench import median_error

    sections = []
    for number, cluster in enumerate(dict.fromkeys(point.cluster for point in points)):
        own = [point for point in points if point.cluster == cluster]
        caption = "Dots are measured, lines simulated; errors are of time, simulated over measured."
        table = []
        for name in dict.fromkeys(point.curve for point in own):
            scored = [point for point in own if point.curve == name and point.is_scored]
            worst = max(scored, key=lambda point: abs(point.error), default=None)
            table.append([
                name, str(len(scored)), f"{(median_error(scored) or 0) * 100:.1f} %",
                f"{worst.error * 100:+.0f} % at {worst.size_bytes / 2**20:g} MiB" if worst else "",
            ])  # fmt: skip
        head = ["curve", "points from 64 KiB to 4 GiB", "median absolute error", "worst"]
        sections.append(Section(cluster, [(f"c{number}", caption, figures.curves(own))], head, table))
    total = median_error(points)
    summary = f"Median absolute error {total * 100:.1f} %." if total is not None else ""
    return page("Measured and simulated collectives", _KICKER, sections, summary)


def _cells(row: TopologyComparison) -> list[str]:
    found, cut = row.report, row.facts["bisection_bytes_per_second"]
    tokens, mfu = found.tokens_per_second_per_gpu, found.mfu_fraction
    return [
        row.cluster + unless_fits(found.verdict),
        format_seconds(found.step_seconds),
        format_seconds(row.exposed_seconds),
        f"{tokens:,.0f}" if tokens is not None else "",
        f"{mfu * 100:.1f} %" if mfu is not None else "",
        f"{row.facts['num_switches']:,}",
        f"{row.facts['num_cables']:,}",
        format_rate(cut) if cut is not None else "not computed",
    ]


def _drawn(facts: dict[str, Any]) -> str:
    more = ""
    if facts["nodes"] > MAX_NODES:
        more = " Nodes on the same switches share a box, and so do switches that join the same boxes."
        if facts["network"] in ("torus", "dragonfly"):
            more = f" A {'router' if facts['network'] == 'torus' else 'group'} is drawn with its nodes."
    switches = f"{facts['num_switches']:,} switch{'es' if facts['num_switches'] != 1 else ''}"
    return f"{facts['network']}, {facts['nodes']} nodes, {switches}.{more}"


def _load_words(row: TopologyComparison) -> str:
    """A sentence on a drawing's colours: the range of its lines, by tier."""
    loads: dict[str, list[float]] = {}
    for line, load in zip(row.picture.lines, row.line_loads, strict=True):
        loads.setdefault(line.tier, []).append(load * 100)
    ranges = [
        f"{tier} {max(own):.1f} %"
        if max(own) - min(own) < _ALIKE
        else f"{tier} {min(own):.1f} to {max(own):.1f} %"
        for tier, own in loads.items()
    ]
    return f"Colour: a line's busiest link in use, mean over the step ({', '.join(ranges)})."
