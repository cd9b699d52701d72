"""Describe and compare clusters: the parts of their fabrics, and one experiment on each, also as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from zsim.api import simulate
from zsim.engine.link_loads import link_loads
from zsim.errors import ZsimError
from zsim.report.report import Report
from zsim.report.views.result import Column, ItemColumn, ResultTable, table_of
from zsim.report.views.text.plain import named_columns, paragraph, table, text_table
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.parallelism import CONTEXT, DATA, PIPELINE, TENSOR, Mesh
from zsim.specs.topology.graph import bisection_bandwidth
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.bench import BenchRow, CurvePoint, median_error
from zsim.study.topologies.drawing import Drawing, draw_fabric, line_loads
from zsim.study.topologies.routings import NUM_DRAWS, Routing, compare_routings, explain_routing
from zsim.units import format_percent, format_rate, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, is_ratio_significant
from zsim.validated.validation import format_validation
from zsim.validated.verdict import verdict_content, verdict_suffix

_AXES: Mapping[str, str] = {"tp": TENSOR, "cp": CONTEXT, "dp": DATA, "pp": PIPELINE}
_MOST_FREE = 3  # axes of several ranks; with more of them tensor ranks stay neighbours


@dataclass(frozen=True, slots=True)
class MeshOrder:
    """An order of the mesh, the fastest axis first, and its step."""

    order: str
    nodes: Mapping[str, int]
    """The most nodes that one group of an axis spans, by axis of several ranks."""
    step_seconds: float
    is_given: bool
    """Whether it is the order of the experiment."""


def compare_orders(experiment: Experiment, job: Job, step_seconds: float) -> tuple[MeshOrder, ...]:
    """The order of the job's mesh, then others of its axes that have several ranks. The remaining axes stay
    the slowest.

    Of orders that put all groups on as many nodes, the first represents all. Where there is nothing to order
    the result is one order, and without model parallelism it is empty.
    """
    names = [name for name, axis in _AXES.items() if job.mesh.size(axis) > 1]
    if job.parallelism.is_trivial or not names:
        return ()
    configured_order = tuple(
        name for axis in reversed(job.mesh.axes) for name in names if _AXES[name] == axis[0]
    )
    orders = [
        MeshOrder("-".join(configured_order), _nodes(job, job.mesh, names), step_seconds, is_given=True)
    ]
    for order in permutations(names):
        if order == configured_order or (len(names) > _MOST_FREE and order[0] != "tp"):
            continue
        full_order = (*order, *(name for name in _AXES if name not in order))
        axes = tuple(_AXES[name] for name in reversed(full_order))
        nodes = _nodes(job, replace(job.parallelism, order=axes).mesh(job.world_size), names)
        if any(nodes == existing.nodes for existing in orders):
            continue
        try:
            seconds = simulate(_set_order(experiment, full_order)).report.step_seconds
        except ZsimError:
            continue  # experts' ranks, which such an order would tear apart
        orders.append(MeshOrder("-".join(order), nodes, seconds, is_given=False))
    return tuple(orders)


def _set_order(experiment: Experiment, order: tuple[str, ...]) -> Experiment:
    table = experiment.parallelism.model_copy(update={"order": "-".join(order)})
    return experiment.model_copy(update={"parallelism": table})


def _nodes(job: Job, mesh: Mesh, names: list[str]) -> dict[str, int]:
    """The most nodes of a group, by axis. Nodes are filled in the order of ranks."""
    most_nodes = {}
    for name in names:
        groups = mesh.groups(_AXES[name]) // job.gpus_per_node
        most_nodes[_AXES[name]] = int(max(len(np.unique(row)) for row in groups))
    return most_nodes


_MAX_LINKS = 200_000  # the bisection of a fabric with more is not computed
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier of links over a step: the bytes that one GPU sends over it, and the utilisation of its most
    utilised link."""

    tier: str
    bytes_per_gpu: float
    utilisation_fraction: float


@dataclass(frozen=True)
class TopologyComparison:
    """One cluster's column of a comparison."""

    cluster: str
    file: str
    """The preset or path as the caller wrote it."""
    nodes: int
    gpus: int
    facts: dict[str, Any]
    report: Report
    tiers: tuple[TierUse, ...]
    routing: Routing
    scaling: dict[int, float]
    """Seconds of a step by number of GPUs at constant batch per GPU, without the counts that the experiment
    does not allow.
    """
    drawing: Drawing
    """The fabric as it is drawn."""
    line_loads: tuple[float, ...]
    """The part in use of the busiest link of each line of the drawing, as mean over the step."""
    orders: tuple[MeshOrder, ...] = ()
    """Orders of the mesh of model parallelism, that of the experiment first."""

    @property
    def exposed_seconds(self) -> float:
        return self.report.breakdown.seconds["exposed_communication"]

    def to_dict(self) -> dict[str, Any]:
        report = self.report
        return {
            "cluster": self.cluster,
            "nodes": self.nodes,
            "gpus": self.gpus,
            "step_seconds": report.step_seconds,
            "step_seconds_range": None if report.step_seconds_range is None else [*report.step_seconds_range],
            "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
            "mfu_fraction": report.mfu_fraction,
            "fits": report.fits,
            **verdict_content(report.verdict),
            "breakdown_seconds": dict(report.breakdown.seconds),
            "tiers": [asdict(tier) for tier in self.tiers],
            "lines": [
                {"between": [*line.ends], "tier": line.tier, "busiest_link_fraction": load}
                for line, load in zip(self.drawing.lines, self.line_loads, strict=True)
            ],
            "routing": self.routing.to_dict(),
            "orders": [asdict(order) for order in self.orders],
            "fabric": self.facts,
            "scaling_seconds": {str(gpus): seconds for gpus, seconds in self.scaling.items()},
        }


def describe_preset(name: str) -> dict[str, Any]:
    """The content of `zsim presets CLUSTER` as plain data. `count` is 0 where all nodes are identical."""
    cluster = load_cluster(name)
    types = [(node.gpu, node.count) for node in cluster.nodes] or [(cluster.gpu, 0)]
    return {
        "cluster": cluster.name,
        "description": cluster.description,
        "nodes": [
            {"gpu": gpu.name, "gpu_source": gpu.peak.source, "gpus": cluster.gpus_per_node, "count": count}
            for gpu, count in types
        ],
        "network": cluster.network.kind,
        "network_source": cluster.network.source,
        "network_evidence": cluster.network.evidence,
    }


def describe_topology(name: str, num_nodes: int) -> dict[str, Any]:
    """The content of `zsim topology show` as plain data, with rates in bytes per second."""
    cluster = load_cluster(name)
    topology = Topology(cluster, num_nodes, cluster.gpus_per_node)
    inventory = topology.inventory()
    fabric_links = topology.num_links - topology.classes["nic_out"].first
    bisection = bisection_bandwidth(topology) if fabric_links <= _MAX_LINKS else None
    tiers: dict[str, dict[str, Any]] = {}
    for link_class in topology.classes.values():
        if link_class.count:
            tier = tiers.setdefault(
                link_class.tier,
                {"links": 0, "bytes_per_second": link_class.bandwidth, "usable": link_class.capacity},
            )
            tier["links"] += link_class.count
    return {
        "cluster": cluster.name,
        "description": cluster.description,
        "network": cluster.network.kind,
        "network_source": cluster.network.source,
        "network_evidence": cluster.network.evidence,
        "nodes": num_nodes,
        "gpus": topology.world_size,
        "gpus_per_nvlink_domain": topology.ranks_per_domain,
        "tiers": tiers,
        "switches": inventory.switches,
        "ports_per_switch": inventory.ports,
        "cables": inventory.cables,
        "num_switches": inventory.num_switches,
        "num_ports": inventory.num_ports,
        "num_cables": inventory.num_cables,
        "bisection_bytes_per_second": bisection,
    }


def compare_cluster(
    base: Experiment, name: str, gpus: int, scales: Sequence[float] = SCALES
) -> TopologyComparison:
    """The experiment on so many GPUs of a cluster, and on `scales` times as many."""
    cluster = load_cluster(name)
    result = simulate(_set_cluster(base, name, gpus))
    job, step, report = result.job, result.step, result.report
    topology_nodes = job.num_nodes
    scaling: dict[int, float] = {}
    for scale in scales:
        count = round(gpus * scale)
        if count % cluster.gpus_per_node or count < cluster.gpus_per_node:
            continue
        try:
            scaling[count] = (
                report.step_seconds
                if count == gpus
                else simulate(_set_cluster(base, name, count)).report.step_seconds
            )
        except ZsimError:
            continue  # the experiment does not allow this count: batch or group sizes do not divide it
    facts = describe_topology(name, topology_nodes)
    drawing = draw_fabric(step.outcome.topology)
    return TopologyComparison(
        cluster=cluster.name,
        file=name,
        nodes=topology_nodes,
        gpus=gpus,
        facts=facts,
        report=report,
        tiers=_tiers(name, topology_nodes, report),
        routing=compare_routings(job, report.step_seconds),
        scaling=scaling,
        drawing=drawing,
        line_loads=tuple(line_loads(drawing, link_loads(step.whole_outcome, 1))[:, 0].tolist()),
        orders=compare_orders(_set_cluster(base, name, gpus), job, report.step_seconds),
    )


def _set_cluster(base: Experiment, cluster: str, gpus: int) -> Experiment:
    return base.model_copy(update={"cluster": cluster, "gpus": gpus, "nodes": None})


def _tiers(name: str, num_nodes: int, report: Report) -> tuple[TierUse, ...]:
    """Link classes combined by tier: the sum of their bytes, and the maximum of their utilisation over both
    directions.
    """
    cluster = load_cluster(name)
    classes = Topology(cluster, num_nodes, cluster.gpus_per_node).classes
    uses: dict[str, TierUse] = {}
    for row in report.traffic:
        if row.link_class not in classes:
            continue
        tier = classes[row.link_class].tier
        previous = uses.get(tier, TierUse(tier, 0.0, 0.0))
        uses[tier] = TierUse(
            tier,
            previous.bytes_per_gpu + row.bytes_per_gpu,
            max(previous.utilisation_fraction, row.utilisation_fraction or 0.0),
        )
    return tuple(uses.values())


def preset_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts of `describe_preset` as lines."""
    yield from paragraph(f"{facts['cluster']}: {facts['description']}", first="cluster   ")
    for row in facts["nodes"]:
        count = f", {row['count']} nodes" if row["count"] else ""
        yield f"node      {row['gpus']} GPUs {row['gpu']}{count}"
        yield from paragraph(row["gpu_source"], first="GPU       ")
    source = f"{facts['network']} ({facts['network_evidence']}): {facts['network_source']}"
    yield from paragraph(source, first="network   ")
    yield f"`zsim topology show {facts['cluster']}` adds links, switches and cables."


def topology_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts of `describe_topology` as lines."""
    yield from paragraph(f"{facts['cluster']}: {facts['description']}", first="cluster   ")
    domain = facts["gpus_per_nvlink_domain"]
    yield f"size      {facts['nodes']} nodes, {facts['gpus']} GPUs, {domain} to an NVLink domain"
    source = f"{facts['network']} ({facts['network_evidence']}): {facts['network_source']}"
    yield from paragraph(source, first="network   ")
    for tier, row in facts["tiers"].items():
        usable = f"{format_rate(row['bytes_per_second'])} each, {format_rate(row['usable'])} usable"
        yield f"links     {tier:<12} {row['links']:>8,} one way, {usable}"
    for role, count in facts["switches"].items():
        yield f"switches  {role:<12} {count:>8,} with {facts['ports_per_switch'][role]} ports in use"
    for kind, count in facts["cables"].items():
        yield f"cables    {kind:<12} {count:>8,}"
    cut = facts["bisection_bytes_per_second"]
    if cut is None:
        yield "bisection not computed for a fabric this large"
    elif facts["nodes"] > 1:
        yield (
            f"bisection {format_rate(cut)} one way through the network, "
            f"{format_rate(2 * cut / facts['gpus'])} per GPU of a half"
        )


def comparison_lines(rows: Sequence[TopologyComparison]) -> Iterator[str]:
    """The rows of `compare_topologies` as lines."""
    labels = rows[0].report.labels
    yield f"{labels.get('model')} | {labels.get('strategy')} | {rows[0].gpus} GPUs"
    for fields in (STEP, FABRIC):
        yield from text_table(table_of("", (CLUSTER, *fields), rows, "text"), is_split=True)
    yield from paragraph(
        f"routing: ideal (even-split), and hashed (ECMP; median and p95 of {NUM_DRAWS} draws)", indent=2
    )
    yield from text_table(table_of("", (CLUSTER, *ROUTING), rows, "text"), is_split=True)
    clusters_by_text: dict[str, list[str]] = {}
    for row in rows:
        clusters_by_text.setdefault(explain_routing(row.routing), []).append(row.cluster)
    for explanation, clusters in clusters_by_text.items():
        yield from paragraph(f"{', '.join(clusters)}: {explanation}", indent=2)
    yield from order_lines(rows)
    for row in rows:
        if row.report.validation is not None:
            explanation = format_validation(row.report.validation, row.report.step_seconds)
            yield from paragraph(f"{row.cluster}: {explanation}", indent=2)
    for sentence in tie_sentences(rows):
        yield from paragraph(sentence, indent=2)


def order_lines(rows: Sequence[TopologyComparison]) -> Iterator[str]:
    """Which groups of ranks stay within a node under each order of the mesh, and what it costs."""
    axes = list(dict.fromkeys(axis for row in rows for order in row.orders for axis in order.nodes))
    if not axes:
        return
    yield from paragraph("order of ranks, neighbours first, and the nodes that a group is on", indent=2)
    cells = [
        [
            row.cluster,
            f"{order.order}{' (given)' if order.is_given else ''}",
            *(_format_nodes(order.nodes.get(axis)) for axis in axes),
            format_seconds(order.step_seconds),
            _format_change(order.step_seconds, row.orders[0].step_seconds),
        ]
        for row in rows
        for order in sorted(row.orders, key=lambda mesh_order: mesh_order.step_seconds)
    ]
    columns = named_columns("cluster", "order", *axes, "step", "")
    yield from text_table(ResultTable("", columns, cells), is_split=True)


def _format_nodes(nodes: int | None) -> str:
    return "-" if nodes is None else "in a node" if nodes == 1 else f"{nodes:,} nodes"


def _format_change(seconds: float, baseline: float) -> str:
    return "" if seconds == baseline else f"{(seconds / baseline - 1) * 100:+.1f} %"


def tie_sentences(rows: Sequence[TopologyComparison]) -> list[str]:
    """One sentence per maximal group of clusters that zsim cannot distinguish pairwise, in order of step
    time. A cluster may be in several groups.
    """
    order = sorted(rows, key=lambda row: row.report.step_seconds)
    groups: list[list[TopologyComparison]] = []
    for candidate in order:
        groups.append([candidate])
        for later in order[order.index(candidate) + 1 :]:
            if not any(_is_distinguishable(member, later) for member in groups[-1]):
                groups[-1].append(later)
    names = [[row.cluster for row in group] for group in groups if len(group) > 1]
    maximal = [
        group_names
        for group_names in names
        if not any(set(group_names) < set(superset) for superset in names)
    ]
    return [f"{', '.join(group_names)}: {NO_DIFFERENCE}." for group_names in maximal]


def _is_distinguishable(first: TopologyComparison, second: TopologyComparison) -> bool:
    gpus = [row.report.experiment["cluster"]["gpu"]["name"] for row in (first, second)]
    kinds = ["network"] if gpus[0] == gpus[1] else ["network", "GPU"]
    steps = first.report.step_seconds, second.report.step_seconds
    return is_ratio_significant(*steps, kinds, is_shared=first.report.is_shared)


CLUSTER: ItemColumn[TopologyComparison] = ItemColumn("cluster", lambda row: row.cluster, is_left=True)
STEP: Sequence[ItemColumn[TopologyComparison]] = (
    ItemColumn("step", lambda row: format_seconds(row.report.step_seconds)),
    ItemColumn("exposed", lambda row: format_seconds(row.exposed_seconds)),
    ItemColumn("tokens/s/GPU", lambda row: _count(row.report.tokens_per_second_per_gpu), where="page"),
    ItemColumn("MFU", lambda row: format_percent(row.report.mfu_fraction, "")),
    ItemColumn("fullest", lambda row: _fullest(row)),
)
FABRIC: Sequence[ItemColumn[TopologyComparison]] = (
    ItemColumn("switches", lambda row: _count(row.facts["num_switches"])),
    ItemColumn("cables", lambda row: _count(row.facts["num_cables"])),
    ItemColumn("bisection", lambda row: _rate(row.facts["bisection_bytes_per_second"])),
)
ROUTING: Sequence[ItemColumn[TopologyComparison]] = (
    ItemColumn("as given", lambda row: row.routing.configured),
    ItemColumn("ideal", lambda row: format_seconds(row.routing.ideal_seconds)),
    ItemColumn("hashed", lambda row: format_seconds(row.routing.hashed_seconds)),
    ItemColumn("hashed p95", lambda row: format_seconds(row.routing.hashed_p95_seconds)),
    ItemColumn("collectives", lambda row: _slowdowns(row.routing)),
    ItemColumn("why", lambda row: explain_routing(row.routing), is_left=True, where="page"),
)


def _slowdowns(routing: Routing) -> str:
    median, high = routing.slowdowns
    return f"x{median:.2f}, x{high:.2f}" if high != 1 else "as ideal"


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else format_rate(bytes_per_second)


def _fullest(row: TopologyComparison) -> str:
    tier = max(row.tiers, key=lambda use: use.utilisation_fraction, default=None)
    shown = f"{tier.tier} {tier.utilisation_fraction * 100:.0f}%" if tier else "none"
    return shown + verdict_suffix(row.report.verdict)


_BENCH = [
    *(Column(title, min_width=12) for title in ("size (B)", "time (us)", "algbw (GB/s)", "busbw (GB/s)")),
    *(Column(title, is_left=True) for title in ("algorithm", "protocol")),
]
_CURVES = [
    *(Column(title, is_left=True) for title in ("curve", "cluster")),
    *(Column(title) for title in ("points", "median error")),
]


def bench_lines(
    rows: Sequence[BenchRow], name: str, gpus: int, kind: str, group: int | None
) -> Iterator[str]:
    """A table of the rows in nccl-tests' form."""
    yield f"# {name}: {kind}, {gpus} GPUs, groups of {group or gpus}; simulated on idle links"
    heading, *lines = table(
        _BENCH,
        [
            (
                str(row.size_bytes),
                f"{row.seconds * 1e6:.2f}",
                f"{row.algorithm_bytes_per_second / 1e9:.2f}",
                f"{row.bus_bytes_per_second / 1e9:.2f}",
                row.algorithm,
                row.protocol,
            )
            for row in rows
        ],
    )
    yield f"#{heading[1:]}"
    yield from lines


def curve_lines(points: Sequence[CurvePoint]) -> Iterator[str]:
    """A table of each measured curve with the errors of the simulation."""
    curves: dict[str, list[CurvePoint]] = {}
    for point in points:
        curves.setdefault(point.curve, []).append(point)
    scored = {name: [point for point in curve if point.is_scored] for name, curve in curves.items()}
    rows = [
        (name, curve[0].cluster, str(len(scored[name])), f"{(median_error(curve) or 0) * 100:.1f} %")
        for name, curve in curves.items()
    ]
    heading, *lines = table(_CURVES, rows)
    yield heading
    for name, line in zip(curves, lines, strict=True):
        yield line
        errors = " ".join(f"{point.error * 100:+.0f}" for point in scored[name])
        yield from paragraph(f"errors of time in %, 64 KiB to 4 GiB: {errors}", first=2)
    total = median_error(points)
    if total is not None:
        yield f"all: median absolute error {total * 100:.1f} %"
