"""Clusters, their comparisons and their collectives as text of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zsim.report.views.result import Column, ItemColumn, ResultTable, table_of
from zsim.report.views.text.plain import named_columns, paragraph, table, text_table
from zsim.study.topologies.bench import BenchRow, CurvePoint, median_error
from zsim.study.topologies.routings import NUM_DRAWS, Routing, explain_routing
from zsim.study.topologies.topologies import TopologyComparison
from zsim.units import format_percent, format_rate, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, is_ratio_significant
from zsim.validated.validation import format_validation
from zsim.validated.verdict import verdict_suffix


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
