"""Topologies on one self-contained HTML page: drawings, utilisation, comparisons, measured curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zsim.report.views.html.figure import script_json
from zsim.report.views.html.page import page, plot, render
from zsim.report.views.result import ResultTable, Section, columns_of, table_of
from zsim.specs.cluster.files import load_cluster
from zsim.study.topologies import figures
from zsim.study.topologies.drawing import MAX_NODES
from zsim.study.topologies.figures import (
    CLUSTER_CAPTION,
    LOADS_CAPTION,
    SHADES,
    Animation,
    cluster_figure,
    loads_figure,
)
from zsim.units import format_rate, format_seconds

if TYPE_CHECKING:
    from zsim.study.topologies.bench import CurvePoint
    from zsim.study.topologies.topologies import TopologyComparison

_KICKER = "topologies"
_SAME_PERCENT = 0.05  # percent between lines


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
        drawings = [(f"d{number}", _drawing_caption(facts), figures.fabric_figure(name, nodes))]
        sections.append(
            Section(facts["description"], drawings, ResultTable("", columns_of("", "count", "each"), rows))
        )
    return page(title, _KICKER, sections)


def animation_page(animation: Animation, title: str) -> str:
    """The page as text: the drawing, a slider and Play along the step, and the links' use."""
    return render(
        "film.html.j2",
        title=title,
        cluster=plot("cluster", CLUSTER_CAPTION, cluster_figure(animation)),
        loads=plot("loads", LOADS_CAPTION, loads_figure(animation)),
        shades=SHADES,
        frames=script_json(animation.to_dict()),
        num_frames=len(animation.captions),
        words=animation.captions[0],
    )


def comparison_page(rows: Sequence[TopologyComparison]) -> str:
    """A page that compares one experiment on several clusters."""
    from zsim.study.topologies.text import CLUSTER, FABRIC, ROUTING, STEP, tie_sentences

    labels = rows[0].report.labels
    best = min(rows, key=lambda row: row.report.step_seconds)
    fastest = f"Fastest: {best.cluster}, {format_seconds(best.report.step_seconds)} per step."
    summary = " ".join([fastest, *tie_sentences(rows)])
    table = Section(
        "Side by side",
        [
            ("steps", "Every instant of the step, by what the compute stream does or waits for.",
             figures.breakdowns(rows)),
        ],
        table_of("", (CLUSTER, *STEP, *FABRIC), rows, "page"),
    )  # fmt: skip
    drawings = [
        (f"d{number}", f"{row.cluster}, {_drawing_caption(row.facts)} {_load_sentence(row)}",
         figures.drawing_figure(row.drawing, load_cluster(row.file), row.line_loads))
        for number, row in enumerate(rows)
    ]  # fmt: skip
    sections = [
        table,
        Section("Routing: flows on all paths (ideal), or on one that a hash chooses (ECMP)",
                table=table_of("", (CLUSTER, *ROUTING), rows, "page")),
        Section("Links", [
            ("heat", "How busy the fullest link of each tier is over the step.", figures.heat_map(rows)),
            ("traffic", "Bytes that one GPU puts on each tier per step.", figures.traffic(rows)),
        ]),
        Section("Scaling", [
            ("scaling", "More GPUs, the same batch on each: a flat line is perfect.", figures.scaling(rows))
        ]),
        Section("What the fabrics are built of", [("price", "Switches, ports in use, cables.",
                                                    figures.price(rows))]),
        Section("The fabrics", drawings),
    ]  # fmt: skip
    gpus = f"{rows[0].gpus:,} GPUs"
    title = " | ".join(heading for heading in (labels.get("model"), labels.get("strategy"), gpus) if heading)
    return page(title, _KICKER, sections, summary)


def curves_page(points: Sequence[CurvePoint]) -> str:
    """A page of measured (dots) and simulated (lines) curves, one figure per cluster, with the errors."""
    from zsim.study.topologies.bench import median_error

    sections = []
    for number, cluster in enumerate(dict.fromkeys(point.cluster for point in points)):
        cluster_points = [point for point in points if point.cluster == cluster]
        caption = "Dots are measured, lines simulated; errors are of time, simulated over measured."
        table = []
        for name in dict.fromkeys(point.curve for point in cluster_points):
            scored = [point for point in cluster_points if point.curve == name and point.is_scored]
            worst = max(scored, key=lambda point: abs(point.error), default=None)
            table.append([
                name, str(len(scored)), f"{(median_error(scored) or 0) * 100:.1f} %",
                f"{worst.error * 100:+.0f} % at {worst.size_bytes / 2**20:g} MiB" if worst else "",
            ])  # fmt: skip
        columns = columns_of("curve", "points from 64 KiB to 4 GiB", "median absolute error", "worst")
        sections.append(
            Section(
                cluster,
                [(f"c{number}", caption, figures.curves(cluster_points))],
                ResultTable("", columns, table),
            )
        )
    total = median_error(points)
    summary = f"Median absolute error {total * 100:.1f} %." if total is not None else ""
    return page("Measured and simulated collectives", _KICKER, sections, summary)


def _drawing_caption(facts: dict[str, Any]) -> str:
    note = ""
    if facts["nodes"] > MAX_NODES:
        note = " Nodes on the same switches share a box, and so do switches that join the same boxes."
        if facts["network"] in ("torus", "dragonfly"):
            note = f" A {'router' if facts['network'] == 'torus' else 'group'} is drawn with its nodes."
    switches = f"{facts['num_switches']:,} switch{'es' if facts['num_switches'] != 1 else ''}"
    return f"{facts['network']}, {facts['nodes']} nodes, {switches}.{note}"


def _load_sentence(row: TopologyComparison) -> str:
    """A sentence on a drawing's colours: the range of its lines, by tier."""
    loads: dict[str, list[float]] = {}
    for line, load in zip(row.drawing.lines, row.line_loads, strict=True):
        loads.setdefault(line.tier, []).append(load * 100)
    ranges = [
        f"{tier} {max(percentages):.1f} %"
        if max(percentages) - min(percentages) < _SAME_PERCENT
        else f"{tier} {min(percentages):.1f} to {max(percentages):.1f} %"
        for tier, percentages in loads.items()
    ]
    return f"Colour: a line's busiest link in use, mean over the step ({', '.join(ranges)})."
