"""Topologies on one self-contained HTML page: drawings, utilisation, comparisons, measured curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from zsim.errors import InputError
from zsim.report.views.displayable import DisplayableList, Figures
from zsim.report.views.html.figure import Figure, script_json
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page, plot, render
from zsim.report.views.meanings import COMMUNICATION
from zsim.report.views.result import ResultTable, Section, columns_of, table_of
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.study.topologies import bench, figures
from zsim.study.topologies.bench import BenchRow, CurvePoint, median_error
from zsim.study.topologies.drawing import MAX_NODES
from zsim.study.topologies.figures import (
    CLUSTER_CAPTION,
    LOADS_CAPTION,
    SHADES,
    Animation,
    cluster_figure,
    loads_figure,
)
from zsim.study.topologies.topologies import (
    CLUSTER,
    FABRIC,
    ROUTING,
    SCALES,
    STEP,
    TopologyComparison,
    bench_lines,
    compare_cluster,
    comparison_lines,
    describe_topology,
    tie_sentences,
)
from zsim.units import format_rate, format_seconds

_KICKER = "topologies"
_SAME_PERCENT = 0.05  # percent between lines


def topology_page(clusters: Sequence[tuple[str, int]], title: str) -> str:
    """A page with a drawing of each (cluster, number of nodes)."""
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


# -- `zsim.compare_topologies` and `zsim.bench_collectives`: clusters side by side, collectives by size ----


_COLUMNS = ("cluster", "nodes", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction", "fits")


@dataclass(frozen=True, repr=False, eq=False)
class TopologiesResult(DisplayableList[TopologyComparison]):
    """One experiment on several clusters, in the order in which they were given."""

    file: ClassVar[str] = "compare"
    items: tuple[TopologyComparison, ...]

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per cluster: the step, its breakdown, and what the fabric is built of."""
        rows = []
        for comparison in self.items:
            content = comparison.to_dict()
            row = {name: content[name] for name in _COLUMNS}
            row |= {f"{name}_seconds": value for name, value in content["breakdown_seconds"].items()}
            row |= {name: comparison.facts[f"num_{name}"] for name in ("switches", "ports", "cables")}
            rows.append(row | {"bisection_bytes_per_second": comparison.facts["bisection_bytes_per_second"]})
        return rows

    def headline(self) -> str:
        labels = self.items[0].report.labels
        return f"{labels.get('model')} | {labels.get('strategy')} | {self.items[0].gpus} GPUs"

    def columns(self) -> Sequence[str]:
        return [
            *_COLUMNS,
            "exposed_communication_seconds",
            "switches",
            "cables",
            "bisection_bytes_per_second",
        ]

    def lines(self) -> Iterator[str]:
        return comparison_lines(self.items)

    def to_dict(self) -> list[dict[str, Any]]:
        """The content of compare.json."""
        return [comparison.to_dict() for comparison in self.items]

    def plots(self) -> Figures:
        return {
            "steps": lambda: figures.breakdowns(self.items),
            "links": lambda: figures.heat_map(self.items),
            "traffic": lambda: figures.traffic(self.items),
            "scaling": lambda: figures.scaling(self.items),
            "price": lambda: figures.price(self.items),
        }

    def page(self) -> str:
        return comparison_page(self.items)


def compare_topologies(
    clusters: Sequence[str | Path],
    experiment: ExperimentSource = None,
    *,
    model: str | None = None,
    gpus: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    scales: Sequence[float] = SCALES,
) -> TopologiesResult:
    """Simulate one experiment on several clusters with the same number of GPUs, as `zsim topology compare`.

    `clusters` are presets, or paths of topology TOMLs. `experiment` is a file, a `zsim.Experiment`, a dict,
    or None for the README's example. Its cluster is not used. Each is also simulated on `scales` times as
    many GPUs.

        found = zsim.compare_topologies(["dgx-h100", "dgx-a100-80gb"], gpus=64)
        found.to_frame(), found.figure("steps")

    Raises InputError for an unknown cluster, and where the experiment does not run on one.
    """
    if not clusters:
        raise InputError("topology compare: expected at least one cluster")
    base = experiment_of(experiment, {**(overrides or {}), **({"model": model} if model else {})})
    total = gpus or base.gpus or (base.nodes or 1) * load_cluster(base.cluster).gpus_per_node
    return TopologiesResult(tuple(compare_cluster(base, str(name), total, scales) for name in clusters))


@dataclass(frozen=True, repr=False, eq=False)
class BenchResult(DisplayableList[BenchRow]):
    """The times of one collective by size, in nccl-tests' words: algorithm and bus bandwidth."""

    items: tuple[BenchRow, ...]
    cluster: str
    gpus: int
    collective: str
    group: int | None = None

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per size."""
        return self.to_dict()

    def headline(self) -> str:
        groups = self.group or self.gpus
        return f"{self.cluster}: {self.collective}, {self.gpus} GPUs, groups of {groups}"

    def lines(self) -> Iterator[str]:
        return bench_lines(self.items, self.cluster, self.gpus, self.collective, self.group)

    def to_dict(self) -> list[dict[str, Any]]:
        """The array that `zsim topology bench --json` writes."""
        return [asdict(row) for row in self.items]

    def plots(self) -> Figures:
        return {"bandwidth": self._bandwidth}

    def _bandwidth(self) -> Figure:
        figure = Figure(layout(420, hovermode="closest"))
        figure.add_scatter(
            name="bus bandwidth", mode="lines+markers", line={"color": COMMUNICATION.color, "width": 2},
            x=[row.size_bytes for row in self.items],
            y=[row.bus_bytes_per_second / 1e9 for row in self.items],
            hovertext=[f"{row.algorithm}, {row.protocol}" for row in self.items],
        )  # fmt: skip
        figure.update_xaxes(title_text="bytes", type="log")
        figure.update_yaxes(title_text="bus bandwidth, GB/s", rangemode="tozero", automargin=True)
        return figure


def bench_collectives(
    cluster: str | Path,
    nodes: int = 1,
    collective: str = "all_reduce",
    *,
    group: int | None = None,
    algorithm: str | None = None,
    protocol: str | None = None,
    nccl_choice: bool = False,
    sizes: Sequence[int] | None = None,
) -> BenchResult:
    """Times of one collective by size on idle links, as `zsim topology bench` prints them.

    `group` is the number of ranks per group, all groups at once, by default all GPUs. `algorithm` and
    `protocol` are forced, as NCCL_ALGO and NCCL_PROTO do. With `nccl_choice` NCCL's tuning model chooses.
    `sizes` are bytes of the full tensor, by default powers of two from 8 B to 16 GiB.

        zsim.bench_collectives("dgx-h100", nodes=4, collective="all_gather").figure()

    Raises InputError for an unknown cluster, collective, algorithm or protocol.
    """
    chosen_cluster = bench.force_choice(load_cluster(str(cluster)), algorithm, protocol, nccl_choice)
    rows = bench.bench(chosen_cluster, nodes, collective, group, sizes=sizes)
    return BenchResult(
        tuple(rows), chosen_cluster.name, nodes * chosen_cluster.gpus_per_node, collective, group
    )
