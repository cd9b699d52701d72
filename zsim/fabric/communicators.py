"""Groups that run the same collectives at once: the algorithms and protocols they may use, and their costs.

# [Note: a communicator knows only itself]
A folded activity carries the load of all groups of its kind, which may share cards. But NCCL chooses the
algorithm and protocol of each communicator separately, so the choice goes by the time of one group alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from zsim.arrays import Bools, Floats
from zsim.cost.collectives.rounds import Rounds
from zsim.fabric.aggregate import Usage
from zsim.fabric.algorithms.methods import CallKind, Method, Shape
from zsim.fabric.algorithms.rings import ExtraRoundSeconds
from zsim.fluid.pool import Profile
from zsim.specs.cluster.collectives import ProtocolCosts

_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective ready to run: wait `latency_seconds`, then move `size` under `profile`."""

    latency_seconds: float
    size: float
    profile: Profile
    algorithm: str
    protocol: str
    isolated_seconds: float
    """Duration on otherwise idle links."""
    choice_seconds: float = 0.0
    """The same for a single group of its kind."""
    slow_profile: Profile | None = None
    """The profile while kernels run on at least one of its GPUs."""


class Limits(NamedTuple):
    """Bus bytes per second that the links inside nodes allow, and that the links between nodes allow."""

    inside: float
    across: float

    @property
    def bandwidth(self) -> float:
        return min(self)


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """One algorithm and protocol of one communicator. See [Note: a communicator knows only itself]."""

    method: Method
    protocol: str
    costs: ProtocolCosts
    profile: Profile
    slow_profile: Profile  # while kernels run on at least one of its GPUs
    limits: Limits  # of all its groups at once, on otherwise idle links
    group_limits: Limits  # of a single group, without the others of its kind
    combined_limits: Limits  # of its groups and all others of their kind at once, in whichever communicators


class UsedLinks(NamedTuple):
    """The links that a usage puts bytes on: their bytes per second, their bytes per bus byte, and whether
    they leave the node."""

    capacities: Floats
    usage: Floats
    leaves_node: Bools

    @staticmethod
    def of(usage: Usage, capacities: Floats, leaves_node: Bools) -> UsedLinks:
        """The used ones of all links, or of those that represent all."""
        link_indices, weights = usage
        return UsedLinks(capacities[link_indices], weights, leaves_node[link_indices])

    def limits(self, costs: ProtocolCosts, method_fraction: float) -> Limits:
        """Bus bytes per second that they allow, inside nodes and between them."""
        rates = self.capacities * method_fraction / self.usage
        inside = float(rates[~self.leaves_node].min(initial=float("inf"))) * costs.intra_fraction
        across = float(rates[self.leaves_node].min(initial=float("inf"))) * costs.inter_fraction
        return Limits(inside, across)


@dataclass(slots=True)
class Communicator:
    """One simulated communicator: the groups of a kind that share one activity."""

    methods: dict[CallKind, list[Method]]
    """The algorithms by kind of collective."""
    usages: dict[Shape, Usage]
    """By shape, the links that all its groups use and the bytes on each per bus byte."""
    group_usages: dict[Shape, Usage]
    """The same of a single group, where there are several."""
    num_domains: int
    """Maximum number of NVLink domains that a group spans."""
    extra: ExtraRoundSeconds
    delays: list[tuple[Floats, Floats]]
    """Seconds that faults add to messages, per channel (inside domains, across)."""
    choices: dict[CallKind, list[AlgorithmChoice]] = field(default_factory=dict)

    def shape_of(self, kind: CallKind, algorithm: str) -> Shape:
        """The shape of one of the algorithms of a kind of collective."""
        return next(method.shape for method in self.methods[kind] if method.algorithm == algorithm)

    def fault_seconds(self, kind: str, rounds: Rounds) -> float:
        """Seconds that faults add to the latency.

        A chain of messages passes as many edges as there are rounds, the worst among them. An all-reduce
        passes each edge twice. The slowest channel counts.
        """
        laps = 2 if kind == "all_reduce" else 1
        rounds_per_lap = -(-rounds.intra // laps), -(-rounds.inter // laps)
        return laps * max(
            (
                float(inside[: rounds_per_lap[0]].sum() + across[: rounds_per_lap[1]].sum())
                for inside, across in self.delays
            ),
            default=0.0,
        )


def round_seconds(costs: ProtocolCosts, extra: ExtraRoundSeconds, *, spans: bool) -> tuple[float, float]:
    """Seconds of a round inside nodes, and of a round between nodes. When a group spans nodes, a round inside
    takes at least the network's overhead (NCCL 2.20 src/graph/tuning.cc, netOverhead)."""
    inside = costs.intra_round + extra.inside
    return max(inside, costs.network_overhead) if spans else inside, costs.inter_round + extra.across


def ramp_seconds(rounds: Rounds, costs: ProtocolCosts, full_bytes: float) -> float:
    """Seconds that sending a tensor in pieces adds: `ramp` times sqrt(S / 1 MiB), where S is the tensor's
    bytes. See `ProtocolCosts`.
    """
    ramp = costs.ramp + (costs.network_ramp if rounds.inter > 0 else 0.0)
    return ramp * sqrt(full_bytes / _MIB)


def ring_latency(rounds: Rounds, costs: ProtocolCosts, extra: ExtraRoundSeconds) -> float:
    """Seconds of NCCL's ring latency: base + rounds inside nodes + rounds between nodes."""
    inside, across = round_seconds(costs, extra, spans=rounds.inter > 0)
    return costs.base + rounds.intra * inside + rounds.inter * across


class LinkLoad(NamedTuple):
    """Load of a class of links: bytes over all of them, and over the most utilised one. The bytes of a
    degraded link count divided by the fraction of its bandwidth that is left."""

    total_bytes: float
    fullest_bytes: float
