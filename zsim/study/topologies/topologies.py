"""Clusters described and compared: what their fabrics are built of, how one experiment runs on each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.api import simulate
from zsim.errors import InputError, ZsimError
from zsim.report.report import Report
from zsim.resources import EXAMPLE
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.tables import Experiment
from zsim.specs.topology.graph import bisection_bandwidth
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.routings import NUM_DRAWS, Routing, compare_routings, routing_words
from zsim.units import format_rate, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, can_tell
from zsim.validated.validation import validation_words

_WIDTH = 80
_MOST_LINKS = 200_000  # of a fabric whose bisection is worth computing
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier of links over a step: bytes that one GPU puts on it, and how busy its fullest link is."""

    tier: str
    bytes_per_gpu: float
    utilisation_fraction: float


@dataclass(frozen=True)
class TopologyComparison:
    """One cluster's column of a comparison. `file`: the preset or path that was asked for. `scaling`:
    seconds of a step by number of GPUs, the batch per GPU unchanged; a count that the experiment does not
    allow is left out."""

    cluster: str
    file: str
    nodes: int
    gpus: int
    facts: dict[str, Any]
    report: Report
    tiers: tuple[TierUse, ...]
    routing: Routing
    scaling: dict[int, float]

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
            "breakdown_seconds": dict(report.breakdown.seconds),
            "tiers": [
                {
                    "tier": tier.tier,
                    "bytes_per_gpu": tier.bytes_per_gpu,
                    "utilisation_fraction": tier.utilisation_fraction,
                }
                for tier in self.tiers
            ],
            "routing": self.routing.to_dict(),
            "fabric": self.facts,
            "scaling_seconds": {str(gpus): seconds for gpus, seconds in self.scaling.items()},
        }


def describe_topology(name: str, num_nodes: int) -> dict[str, Any]:
    """What `zsim topology show` says, as plain data; rates in bytes per second."""
    cluster = load_cluster(name)
    topology = Topology(cluster, num_nodes, cluster.gpus_per_node)
    inventory = topology.inventory()
    fabric_links = topology.num_links - topology.classes["nic_out"].first
    bisection = bisection_bandwidth(topology) if fabric_links <= _MOST_LINKS else None
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


def compare_topologies(
    names: Sequence[str],
    experiment: Path | None = None,
    *,
    model: str | None = None,
    gpus: int | None = None,
    scales: Sequence[float] = _SCALES,
) -> list[TopologyComparison]:
    """The experiment on every cluster with the same number of GPUs."""
    if len(names) < 1:
        raise InputError("topology compare: expected at least one cluster")
    base = load_experiment(experiment or EXAMPLE, {"model": model} if model else {})
    total = gpus or base.gpus or (base.nodes or 1) * load_cluster(base.cluster).gpus_per_node
    return [_compare_one(base, name, total, scales) for name in names]


def _compare_one(base: Experiment, name: str, gpus: int, scales: Sequence[float]) -> TopologyComparison:
    cluster = load_cluster(name)
    result = simulate(_at(base, name, gpus))
    topology_nodes = result.job.num_nodes
    scaling: dict[int, float] = {}
    for scale in scales:
        count = round(gpus * scale)
        if count % cluster.gpus_per_node or count < cluster.gpus_per_node:
            continue
        try:
            scaling[count] = (
                result.report.step_seconds
                if count == gpus
                else simulate(_at(base, name, count)).report.step_seconds
            )
        except ZsimError:
            continue  # such a count is no experiment (batch or group sizes do not divide it)
    facts = describe_topology(name, topology_nodes)
    tiers = _tiers(name, topology_nodes, result.report)
    routing = compare_routings(result.job, result.report.step_seconds)
    return TopologyComparison(
        cluster.name, name, topology_nodes, gpus, facts, result.report, tiers, routing, scaling
    )


def _at(base: Experiment, cluster: str, gpus: int) -> Experiment:
    return base.model_copy(update={"cluster": cluster, "gpus": gpus, "nodes": None})


def _tiers(name: str, num_nodes: int, report: Report) -> tuple[TierUse, ...]:
    """Link classes of one tier together: bytes added up, the fullest direction's utilisation."""
    cluster = load_cluster(name)
    classes = Topology(cluster, num_nodes, cluster.gpus_per_node).classes
    found: dict[str, TierUse] = {}
    for row in report.traffic:
        if row.link_class not in classes:
            continue
        tier = classes[row.link_class].tier
        before = found.get(tier, TierUse(tier, 0.0, 0.0))
        found[tier] = TierUse(
            tier,
            before.bytes_per_gpu + row.bytes_per_gpu,
            max(before.utilisation_fraction, row.utilisation_fraction or 0.0),
        )
    return tuple(found.values())


def _beside(what: str, text: str) -> str:
    return textwrap.fill(f"{what:<10}{text}", _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)


def print_topology(facts: dict[str, Any]) -> None:
    """`describe_topology` for a terminal."""
    print(_beside("cluster", f"{facts['cluster']}: {facts['description']}"))
    domain = facts["gpus_per_nvlink_domain"]
    print(f"size      {facts['nodes']} nodes, {facts['gpus']} GPUs, {domain} to an NVLink domain")
    source = f"{facts['network']} ({facts['network_evidence']}): {facts['network_source']}"
    print(_beside("network", source))
    for tier, row in facts["tiers"].items():
        usable = f"{format_rate(row['bytes_per_second'])} each, {format_rate(row['usable'])} usable"
        print(f"links     {tier:<12} {row['links']:>8,} one way, {usable}")
    for role, count in facts["switches"].items():
        print(f"switches  {role:<12} {count:>8,} with {facts['ports_per_switch'][role]} ports in use")
    for kind, count in facts["cables"].items():
        print(f"cables    {kind:<12} {count:>8,}")
    cut = facts["bisection_bytes_per_second"]
    if cut is None:
        print("bisection not computed for a fabric this large")
    elif facts["nodes"] > 1:
        print(
            f"bisection {format_rate(cut)} one way through the network, "
            f"{format_rate(2 * cut / facts['gpus'])} per GPU of a half"
        )


def undecided(rows: Sequence[TopologyComparison]) -> list[str]:
    """A sentence for each group of clusters of which zsim can tell no two apart; none for a group that is
    part of another. In order of their steps; a cluster may be in several groups."""
    order = sorted(rows, key=lambda row: row.report.step_seconds)
    groups: list[list[TopologyComparison]] = []
    for one in order:
        groups.append([one])
        for other in order[order.index(one) + 1 :]:
            if not any(_is_told_apart(member, other) for member in groups[-1]):
                groups[-1].append(other)
    names = [[row.cluster for row in group] for group in groups if len(group) > 1]
    whole = [own for own in names if not any(set(own) < set(other) for other in names)]
    return [f"{', '.join(own)}: {NO_DIFFERENCE}." for own in whole]


def _is_told_apart(one: TopologyComparison, other: TopologyComparison) -> bool:
    gpus = [row.report.experiment["cluster"]["gpu"]["name"] for row in (one, other)]
    kinds = ["network"] if gpus[0] == gpus[1] else ["network", "GPU"]
    return can_tell(one.report.step_seconds, other.report.step_seconds, kinds)


def print_comparison(rows: Sequence[TopologyComparison]) -> None:
    """`compare_topologies` for a terminal."""
    labels = rows[0].report.labels
    print(f"{labels.get('model')} | {labels.get('strategy')} | {rows[0].gpus} GPUs")
    for columns in (_STEP, _FABRIC):
        cells = [[column.cell(row) for column in columns] for row in rows]
        print_table([column.title for column in columns], cells)
    _print_filled(f"routing: ideal (even-split), and hashed (ECMP; median and p95 of {NUM_DRAWS} draws)")
    print_table(ROUTING_HEAD, [routing_cells(row) for row in rows])
    by_words: dict[str, list[str]] = {}
    for row in rows:
        by_words.setdefault(routing_words(row.routing), []).append(row.cluster)
    for words, clusters in by_words.items():
        _print_filled(f"{', '.join(clusters)}: {words}")
    for row in rows:
        if row.report.validation is not None:
            words = validation_words(row.report.validation, row.report.step_seconds)
            _print_filled(f"{row.cluster}: {words}")
    for sentence in undecided(rows):
        _print_filled(sentence)


def _print_filled(text: str) -> None:
    print(textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the table, and what stands in it for a cluster."""

    title: str
    cell: Callable[[TopologyComparison], str]


_CLUSTER = _Column("cluster", lambda row: row.cluster)
_STEP = (
    _CLUSTER,
    _Column("step", lambda row: format_seconds(row.report.step_seconds)),
    _Column("exposed", lambda row: format_seconds(row.exposed_seconds)),
    _Column("MFU", lambda row: _percent(row.report.mfu_fraction)),
    _Column("fullest", lambda row: _fullest(row)),
)
_FABRIC = (
    _CLUSTER,
    _Column("switches", lambda row: f"{row.facts['num_switches']:,}"),
    _Column("cables", lambda row: f"{row.facts['num_cables']:,}"),
    _Column("bisection", lambda row: _rate(row.facts["bisection_bytes_per_second"])),
)
ROUTING_HEAD = ["cluster", "as given", "ideal", "hashed", "hashed p95", "collectives"]


def routing_cells(row: TopologyComparison) -> list[str]:
    """A cluster's line under `ROUTING_HEAD`."""
    found = row.routing
    steps = (found.ideal_seconds, found.hashed_seconds, found.hashed_p95_seconds)
    median, high = found.slowdowns
    slower = f"x{median:.2f}, x{high:.2f}" if high != 1 else "as ideal"
    return [row.cluster, found.given, *(format_seconds(step) for step in steps), slower]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need; the first to the left, the others to the right. Those that are past the
    terminal's width follow below, beside the first column again."""
    widths = [max(len(line[number]) for line in (head, *rows)) for number in range(len(head))]
    parts: list[list[int]] = [[]]
    room = _WIDTH - widths[0]
    for number, width in enumerate(widths[1:], 1):
        room -= width + 2
        if room < 0 and parts[-1]:
            parts.append([])
            room = _WIDTH - widths[0] - width - 2
        parts[-1].append(number)
    for part in parts:
        for line in (head, *rows):
            print("  ".join([f"{line[0]:<{widths[0]}}", *(f"{line[n]:>{widths[n]}}" for n in part)]))


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.1f}%"


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else format_rate(bytes_per_second)


def _fullest(row: TopologyComparison) -> str:
    tier = max(row.tiers, key=lambda own: own.utilisation_fraction, default=None)
    shown = f"{tier.tier} {tier.utilisation_fraction * 100:.0f}%" if tier else "none"
    return shown + ("" if row.report.fits else " (does not fit)")
