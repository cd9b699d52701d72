"""Collectives as fluid activities on the links of a topology.

A collective is one activity. Its size is the bytes of one ring edge, its profile what every link carries
per such byte, its latency the rounds of its algorithm. So its rate is nccl-tests' bus bandwidth.

# [Note: lumped links]
Links with the same capacity and the same weight in every profile constrain the rates in the same way, so
one of them stands for all: exact, whatever the topology, and 100,000 links become a handful.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simpy

from zsim.cost.collectives import Rounds, edge_bytes, hierarchical_rounds, ring_rounds, tree_rounds
from zsim.fabric.rings import hierarchical_usage, num_nodes_of, ring_usage
from zsim.fluid.sharing import FluidPool, Profile
from zsim.plan.ops import Collective, Group
from zsim.specs.hardware import CollectiveCosts, ProtocolCosts
from zsim.specs.topology import Topology

Floats = npt.NDArray[np.float64]
_NETWORK = "network"
_TREE_FRACTION = 0.92


class Extra(NamedTuple):
    """Resources besides links, numbered after them, and what else uses links or them: (key, resource
    numbers, units per unit of work) per kind of work. Their profiles are `Fabric.extra_profiles`."""

    capacities: Floats
    usages: Sequence[tuple[Hashable, npt.NDArray[np.int64], Floats]]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective or copy ready to run: wait `latency_seconds`, then move `size` under `profile`."""

    latency_seconds: float
    size: float
    profile: Profile
    algorithm: str
    protocol: str
    seconds_alone: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """One protocol of one communicator."""

    name: str
    costs: ProtocolCosts
    profile: Profile
    bandwidth: float  # bytes per second per ring edge, alone


class Fabric:
    """The links of a topology as resources, and the communicators of a plan on them.

    `is_folded`: one activity stands for the same collective in all groups of a kind, and carries the load
    of all of them; else every group has its own.
    """

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        groups: Mapping[str, Group],
        *,
        is_folded: bool,
        extra: Extra | None = None,
    ) -> None:
        self.env = env
        self.topology = topology
        self.costs: CollectiveCosts = topology.cluster.collectives
        self.groups = groups
        self.is_folded = is_folded
        self.num_transfers = 0
        self._transfers: dict[tuple[Collective, int], Transfer] = {}
        self._base_usage: dict[str, Floats] = {}
        instances = {name: self._instances(group) for name, group in groups.items()}
        usages: list[tuple[tuple[str, int, str], Floats]] = []
        for name, parts in instances.items():
            for number, ranks in enumerate(parts):
                base = self._usage(ranks)
                self._base_usage[name] = base + self._base_usage.get(name, 0.0)
                usages += [
                    ((name, number, protocol), self._slowed(base, costs))
                    for protocol, costs in self.costs.protocols.items()
                ]
        self._build_pool(usages, extra or Extra(np.zeros(0), []))

    # -- communicators ------------------------------------------------------------------------------

    def _instances(self, group: Group) -> list[list[range]]:
        """The groups that run at once, as lists of groups that share one activity."""
        span = group.size * group.stride
        starts = range(0, self.topology.world_size, span)
        firsts = [start + offset for start in starts for offset in range(group.stride)]
        parts = [group.ranks_of(first) for first in firsts]
        return [parts] if self.is_folded else [[part] for part in parts]

    def _usage(self, ranks: list[range]) -> Floats:
        if self.costs.algorithm == "hierarchical" and num_nodes_of(self.topology, ranks[0]) > 1:
            return hierarchical_usage(self.topology, ranks, "all_gather")
        return ring_usage(self.topology, ranks)

    def _slowed(self, usage: Floats, costs: ProtocolCosts) -> Floats:
        """Usage that makes a protocol reach only its fraction of each link's bandwidth."""
        slowed = usage / costs.intra_fraction
        for link_class in self.topology.classes.values():
            if link_class.tier == _NETWORK:
                part = slice(link_class.first, link_class.first + link_class.count)
                slowed[part] = usage[part] / costs.inter_fraction
        return slowed

    def _build_pool(self, usages: list[tuple[tuple[str, int, str], Floats]], extra: Extra) -> None:
        """Lump the links and register one profile per usage; see [Note: lumped links]."""
        capacities = np.concatenate([self.topology.capacities(), extra.capacities])
        num_links = self.topology.num_links
        signature = np.stack([capacities, capacities])
        # Two independent weighted sums tell links apart; equal rows give equal sums, bit for bit.
        coefficients = np.random.default_rng(20010).uniform(1.0, 2.0, size=(2, len(usages)))
        for column, (_key, usage) in enumerate(usages):
            signature[:, :num_links] += coefficients[:, column : column + 1] * usage
        coefficients = np.random.default_rng(20011).uniform(1.0, 2.0, size=(2, len(extra.usages)))
        for column, (_extra_key, indices, weights) in enumerate(extra.usages):
            signature[:, indices] += coefficients[:, column : column + 1] * weights
        keys = signature.view(np.int64)
        mixed = keys[0] * np.int64(0x1003F) ^ keys[1]
        _unique, representatives = np.unique(mixed, return_index=True)
        representatives = np.sort(representatives)
        self.pool = FluidPool(self.env, capacities[representatives].tolist())
        self._choices: dict[tuple[str, int], list[_Choice]] = {}
        of_links = representatives[representatives < num_links]
        for (name, number, protocol), usage in usages:
            weights = usage[of_links]
            used = np.nonzero(weights)[0]
            profile = self.pool.profile(list(zip(used.tolist(), weights[used].tolist(), strict=True)))
            bandwidth = min((self.pool.capacity[r] / w for r, w in profile.usage), default=float("inf"))
            choice = _Choice(protocol, self.costs.protocols[protocol], profile, bandwidth)
            self._choices.setdefault((name, number), []).append(choice)
        self.extra_profiles: dict[Hashable, Profile] = {}
        position = {resource: place for place, resource in enumerate(representatives.tolist())}
        for key, indices, weights in extra.usages:
            pairs = zip(indices.tolist(), weights.tolist(), strict=True)
            self.extra_profiles[key] = self.pool.profile(
                [(position[index], weight) for index, weight in pairs if index in position]
            )

    # -- running ------------------------------------------------------------------------------------

    def instance_of(self, group_name: str, rank: int) -> int:
        """Which of a group's instances a rank belongs to (0 for all when folded)."""
        if self.is_folded:
            return 0
        group = self.groups[group_name]
        block, offset = divmod(group.ranks_of(rank).start, group.size * group.stride)
        return block * group.stride + offset

    def transfer(self, work: Collective, instance: int) -> Transfer:
        """The fastest protocol for a collective on idle links."""
        known = self._transfers.get((work, instance))
        if known is not None:
            return known
        group = self.groups[work.group]
        kind = work.kind
        if kind == "reduce_scatter" and self.costs.reduce_scatter == "all_reduce":
            kind = "all_reduce"
        size = edge_bytes(kind, work.bytes, group.size)
        nodes = self._num_nodes(work.group)
        best: Transfer | None = None
        for algorithm, rounds, fraction in self._algorithms(kind, group.size, nodes):
            for choice in self._choices[work.group, instance]:
                latency = _latency(rounds, choice.costs) if group.size > 1 else 0.0
                seconds = latency + size / (choice.bandwidth * fraction)
                if best is None or seconds < best.seconds_alone:
                    best = Transfer(latency, size / fraction, choice.profile, algorithm, choice.name, seconds)
        assert best is not None
        self._transfers[work, instance] = best
        return best

    def _algorithms(self, kind: str, num_ranks: int, num_nodes: int) -> list[tuple[str, Rounds, float]]:
        """What the backend may run: name, rounds, fraction of the ring's bandwidth.

        NCCL's double binary tree moves the same bytes as the ring at 0.92 of its bandwidth in far fewer
        rounds (NCCL 2.21 src/graph/tuning.cc), so it wins for small all-reduces.
        """
        if self.costs.algorithm == "hierarchical" and num_nodes > 1:
            return [("hierarchical", hierarchical_rounds(kind, num_ranks, num_nodes), 1.0)]
        algorithms = [("ring", ring_rounds(kind, num_ranks, num_nodes), 1.0)]
        if kind == "all_reduce" and self.costs.backend != "gloo" and num_nodes > 1:
            algorithms.append(("tree", tree_rounds(num_ranks, num_nodes), _TREE_FRACTION))
        return algorithms

    def run(self, transfer: Transfer, on_end: Callable[[], None]) -> None:
        """Start a transfer now; `on_end` is called when it is done."""
        self.num_transfers += 1
        if transfer.latency_seconds <= 0:
            self.pool.start(transfer.profile, transfer.size, on_end)
            return
        wait = simpy.Timeout(self.env, transfer.latency_seconds)

        def begin(_event: simpy.Event) -> None:
            self.pool.start(transfer.profile, transfer.size, on_end)

        wait.callbacks = [begin]

    # -- accounting ---------------------------------------------------------------------------------

    def _num_nodes(self, group_name: str) -> int:
        group = self.groups[group_name]
        return num_nodes_of(self.topology, group.ranks_of(0))

    def traffic(self, works: Iterable[Collective]) -> dict[str, float]:
        """Bytes over the busiest link of every link class, for the collectives one rank calls."""
        edge_total: dict[str, float] = {}
        for work in works:
            kind = work.kind
            if kind == "reduce_scatter" and self.costs.reduce_scatter == "all_reduce":
                kind = "all_reduce"
            carried = edge_bytes(kind, work.bytes, self.groups[work.group].size)
            edge_total[work.group] = edge_total.get(work.group, 0.0) + carried
        total = np.zeros(self.topology.num_links)
        for name, carried in edge_total.items():
            total += self._base_usage[name] * carried
        return {
            name: float(total[c.first : c.first + c.count].max(initial=0.0))
            for name, c in self.topology.classes.items()
        }


def _latency(rounds: Rounds, costs: ProtocolCosts) -> float:
    """NCCL's ring latency: base + rounds inside nodes + rounds between nodes; once a group spans nodes, every
    round waits at least for the network's overhead (NCCL 2.20 src/graph/tuning.cc, netOverhead)."""
    intra_round = max(costs.intra_round, costs.network_overhead) if rounds.inter else costs.intra_round
    return costs.base + rounds.intra * intra_round + rounds.inter * costs.inter_round
