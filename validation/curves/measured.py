"""Measured curves of collectives by message size, and their times under given constants."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from zsim.cost.collectives.rounds import bus_bytes, fill_seconds, tree_pieces
from zsim.fabric.algorithms.methods import Method
from zsim.fabric.communicators import Communicator, ramp_seconds, ring_latency
from zsim.fabric.fabric import idle_fabric
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.collectives import ProtocolCosts
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.bench import CurvePoint, compare_curves

ALL_REDUCE = Path(__file__).with_name("all_reduce.csv")
NETWORKS = Path(__file__).with_name("networks.csv")
LARGEST = 2**34
INSIDE = "all_to_all_inside"  # all measured all-to-alls are of one node
GATHER = "gather"  # the ring of all-gathers and reduce-scatters: [collectives.protocols] of a preset

Constants = Mapping[tuple[str, str], ProtocolCosts]


@dataclass(frozen=True)
class Option:
    """One algorithm and protocol on one curve: the bus bytes per second that links inside NVLink domains and
    links between them allow."""

    method: Method
    protocol: str
    intra: float
    inter: float


@dataclass(frozen=True)
class Curve:
    """A measured curve, with the parts of its topology that determine the time; the constants are arguments.

    `role`: "fit", or "held" if no constant may be fitted to it.
    """

    name: str
    cluster: Cluster
    kind: CollectiveKind
    gpus: int
    network: str
    role: str
    source: str
    communicator: Communicator
    options: tuple[Option, ...]
    points: tuple[CurvePoint, ...]
    harness_seconds: float

    def seconds(self, size: int, constants: Constants) -> float:
        """Seconds of the fastest option, as `zsim.fabric.fabric.Fabric.options` chooses it, plus the
        harness's."""
        return min(self._seconds(option, size, constants) for option in self.options) + self.harness_seconds

    def _seconds(self, option: Option, size: int, constants: Constants) -> float:
        method, rounds = option.method, option.method.rounds
        algorithm = {"all_reduce": method.algorithm, "all_to_all": INSIDE}.get(self.kind, GATHER)
        # An algorithm without constants uses those of `protocols`.
        costs = constants.get((algorithm, option.protocol)) or constants[GATHER, option.protocol]
        size_bytes = bus_bytes(self.kind, size, self.gpus)
        inside = size_bytes / (option.intra * costs.intra_fraction)
        across = size_bytes / (option.inter * costs.inter_fraction)
        latency = ring_latency(rounds, costs, self.communicator.extra) + ramp_seconds(rounds, costs, size)
        if method.shape == "tree":
            channels, domains = self.cluster.collectives.channels, self.communicator.num_domains
            pieces = tree_pieces(option.protocol, size, channels, self.gpus, domains)
            latency += fill_seconds(rounds, inside, across, pieces)
        return latency + max(inside, across)

    def errors(self, constants: Constants, *, scored: bool = False) -> list[float]:
        """Logarithm of simulated over measured seconds of every point, or of the scored points only."""
        return [
            log(self.seconds(point.size_bytes, constants) / self.measured_seconds(point))
            for point in self.points
            if point.is_scored or not scored
        ]

    def measured_seconds(self, point: CurvePoint) -> float:
        return bus_bytes(self.kind, point.size_bytes, self.gpus) / point.measured_bus_bytes_per_second


def read_curves(*tables: Path) -> list[Curve]:
    """All curves of the tables (default: both) with their points up to 16 GiB; points from 64 KiB to 4 GiB
    are scored."""
    return [curve for table in tables or (ALL_REDUCE, NETWORKS) for curve in _curves_of(table)]


def _curves_of(table: Path) -> list[Curve]:
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row["curve"]: row for row in csv.DictReader(file)}
    points = [
        point
        for point in compare_curves(table)
        if point.measured_bus_bytes_per_second > 0 and point.size_bytes <= LARGEST
    ]
    return [_curve(row, [point for point in points if point.curve == name]) for name, row in rows.items()]


def _curve(row: Mapping[str, str], points: Sequence[CurvePoint]) -> Curve:
    kind: CollectiveKind = row["collective"]  # type: ignore[assignment]
    own = curve_of(row["cluster"], kind, int(row["nodes"]), int(row["gpus"]))
    return replace(
        own,
        name=row["curve"],
        network=row["network"],
        role=row["role"],
        source=row["source"],
        points=tuple(points),
        harness_seconds=float(row["harness_seconds"] or 0),
    )


def curve_of(preset: str, kind: CollectiveKind, nodes: int, gpus: int) -> Curve:
    """A collective of all GPUs of some nodes, without a measured point."""
    cluster = load_cluster(preset)
    work = Collective(kind, 8, "fp32", "world")
    topology = Topology(cluster, nodes, gpus // nodes)
    communicator = idle_fabric(topology, Group.regular("world", gpus), [work]).communicator("world")
    options = tuple(
        Option(
            choice.method,
            choice.protocol,
            choice.limits.inside / choice.costs.intra_fraction,
            choice.limits.across / choice.costs.inter_fraction,
        )
        for choice in communicator.choices[kind]
    )
    return Curve(preset, cluster, kind, gpus, "", "", "", communicator, options, (), 0.0)


def preset_constants(name: str) -> dict[tuple[str, str], ProtocolCosts]:
    """The preset's current constants; the ring of all-gathers and reduce-scatters is under `GATHER`."""
    own = load_cluster(name).collectives
    constants = {("ring", protocol): costs for protocol, costs in own.protocols.items()}
    constants |= {(GATHER, protocol): costs for protocol, costs in own.protocols.items()}
    for algorithm, protocols in own.algorithms.items():
        constants |= {(algorithm, protocol): costs for protocol, costs in protocols.items()}
    return constants
