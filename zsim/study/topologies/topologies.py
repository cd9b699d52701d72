"""Describe and compare clusters: the parts of their fabrics, and one experiment on each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from zsim.api import simulate
from zsim.engine.link_loads import link_loads
from zsim.engine.micro_batches import simulate_step
from zsim.errors import ZsimError
from zsim.explain.report_of import report_of_step
from zsim.explain.sampled_micro_batches import full_variants
from zsim.report.report import Report
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.mesh import CONTEXT, DATA, PIPELINE, TENSOR, Mesh
from zsim.specs.topology.graph import bisection_bandwidth
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import Drawing, draw_fabric, line_loads
from zsim.study.topologies.routings import Routing, compare_routings
from zsim.validated.verdict import verdict_content

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "nodes": dict(self.nodes),
            "step_seconds": self.step_seconds,
            "is_given": self.is_given,
        }


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
            "tiers": [
                {
                    "tier": tier.tier,
                    "bytes_per_gpu": tier.bytes_per_gpu,
                    "utilisation_fraction": tier.utilisation_fraction,
                }
                for tier in self.tiers
            ],
            "lines": [
                {"between": [*line.ends], "tier": line.tier, "busiest_link_fraction": load}
                for line, load in zip(self.drawing.lines, self.line_loads, strict=True)
            ],
            "routing": self.routing.to_dict(),
            "orders": [order.to_dict() for order in self.orders],
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
    start_seconds = time.perf_counter()
    job = resolve(_set_cluster(base, name, gpus))
    step = simulate_step(job)
    wall_seconds = time.perf_counter() - start_seconds
    report = report_of_step(step, wall_seconds, full_variants(step))
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
