"""Groups that run the same collectives at once: what they may run them with, and what that costs.

# [Note: a communicator knows only itself]
A folded activity carries the load of all groups of its kind, which may share cards. But NCCL chooses
algorithm and protocol for each communicator by itself, so the choice goes by the time of one group alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.cost.collectives.rounds import Rounds
from zsim.fabric.algorithms.methods import Method
from zsim.fabric.algorithms.rings import Longer
from zsim.fluid.pool import Profile
from zsim.specs.cluster.collectives import ProtocolCosts

_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective ready to run: wait `latency_seconds`, then move `size` under `profile`.

    `seconds_alone` on links that nothing else uses; `choice_seconds` with a single group of its kind.
    `beside`: its profile while kernels run on one of its GPUs.
    """

    latency_seconds: float
    size: float
    profile: Profile
    algorithm: str
    protocol: str
    seconds_alone: float
    choice_seconds: float = 0.0
    beside: Profile | None = None


class Limits(NamedTuple):
    """Bus bytes per second that links inside nodes allow, and links between them."""

    inside: float
    across: float

    @property
    def bandwidth(self) -> float:
        return min(self)


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """One algorithm and protocol of one communicator; see [Note: a communicator knows only itself]."""

    method: Method
    protocol: str
    costs: ProtocolCosts
    profile: Profile
    beside: Profile  # while kernels run on one of its GPUs
    limits: Limits  # alone
    own_limits: Limits  # the same without the other groups of its kind


@dataclass(slots=True)
class Instance:
    """The groups of one block: what they may run, the bytes it puts on every link by shape (`usage`: all of
    them, `own_usage`: one alone, where there are several), and what faults add to messages per channel."""

    methods: dict[str, list[Method]]
    usage: dict[str, Floats]
    own_usage: dict[str, Floats]
    num_domains: int
    longer: Longer
    delays: list[tuple[Floats, Floats]]
    choices: dict[str, list[AlgorithmChoice]] = field(default_factory=dict)
    used: dict[str, tuple[Ints, Floats]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of every algorithm."""
        return {method.algorithm: method.shape for found in self.methods.values() for method in found}

    def keep_used_links(self) -> None:
        """Replace the usages by their entries that are not zero."""
        for shape, usage in self.usage.items():
            links = np.flatnonzero(usage)
            self.used[shape] = links, usage[links]
        self.usage, self.own_usage = {}, {}

    def fault_seconds(self, kind: str, rounds: Rounds) -> float:
        """What faults add to the latency: a chain of messages passes as many edges as there are rounds,
        among them the worst, there and back in an all-reduce; the slowest channel counts."""
        laps = 2 if kind == "all_reduce" else 1
        visited = -(-rounds.intra // laps), -(-rounds.inter // laps)
        return laps * max(
            (
                float(inside[: visited[0]].sum() + across[: visited[1]].sum())
                for inside, across in self.delays
            ),
            default=0.0,
        )


def round_seconds(costs: ProtocolCosts, longer: Longer, *, spans: bool) -> tuple[float, float]:
    """A round inside nodes, and one between them; once a group spans nodes, every round waits at least for
    the network's overhead (NCCL 2.20 src/graph/tuning.cc, netOverhead)."""
    inside = costs.intra_round + longer.inside
    return max(inside, costs.network_overhead) if spans else inside, costs.inter_round + longer.across


def ramp_seconds(rounds: Rounds, costs: ProtocolCosts, full_bytes: float) -> float:
    """What sending a tensor in pieces costs; see `ProtocolCosts`."""
    ramp = costs.ramp + (costs.network_ramp if rounds.inter > 0 else 0.0)
    return ramp * sqrt(full_bytes / _MIB)


def ring_latency(rounds: Rounds, costs: ProtocolCosts, longer: Longer) -> float:
    """NCCL's ring latency: base + rounds inside nodes + rounds between nodes."""
    inside, across = round_seconds(costs, longer, spans=rounds.inter > 0)
    return costs.base + rounds.intra * inside + rounds.inter * across
