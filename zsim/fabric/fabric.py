"""Collectives as fluid activities on the links of a topology.

A collective is one activity. Its size is its bus bytes (what every rank must send), its profile what every
link carries per such byte under the chosen algorithm, its latency the algorithm's rounds. So its rate is
nccl-tests' bus bandwidth, whatever the algorithm.

# [Note: lumped links]
Links with the same capacity and the same weight in every profile constrain the rates in the same way, so
one of them stands for all: exact, whatever the topology, and 100,000 links become a handful.

# [Note: a communicator knows only itself]
A folded activity carries the load of all groups of its kind, which may share cards. But NCCL chooses
algorithm and protocol for each communicator by itself, so the choice goes by the time of one group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simpy

from zsim.cost.collectives import Rounds, edge_bytes
from zsim.fabric.choice import planned_seconds
from zsim.fabric.methods import Method, methods
from zsim.fabric.patterns import SHAPES
from zsim.fabric.rings import domains_of, hop_seconds
from zsim.fabric.symmetry import by_pattern
from zsim.fluid.sharing import FluidPool, Profile
from zsim.plan.ops import Collective, Group
from zsim.specs.hardware import CollectiveCosts, ProtocolCosts
from zsim.specs.topology import Topology

Floats = npt.NDArray[np.float64]
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_MIB = 2.0**20


class Extra(NamedTuple):
    """Resources besides links, numbered after them, and what else uses links or them: (key, resource
    numbers, units per unit of work) per kind of work. Their profiles are `Fabric.extra_profiles`."""

    capacities: Floats
    usages: Sequence[tuple[Hashable, npt.NDArray[np.int64], Floats]]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective ready to run: wait `latency_seconds`, then move `size` under `profile`.

    `seconds_alone` on links that nothing else uses; `choice_seconds` with a single group of its kind.
    """

    latency_seconds: float
    size: float
    profile: Profile
    algorithm: str
    protocol: str
    seconds_alone: float
    choice_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Choice:
    """One algorithm and protocol of one communicator; see [Note: a communicator knows only itself]."""

    method: Method
    protocol: str
    costs: ProtocolCosts
    profile: Profile
    bandwidth: float  # bus bytes per second, alone
    own_bandwidth: float  # the same without the other groups of its kind


class Fabric:
    """The links of a topology as resources, and the communicators of a plan on them.

    `is_folded`: one activity stands for the same collective in all groups of a kind, and carries the load
    of all of them; else every group has its own. `works`: the collectives to expect (any of the usual kinds
    in every group when None).
    """

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        groups: Mapping[str, Group],
        *,
        is_folded: bool,
        extra: Extra | None = None,
        works: Iterable[Collective] | None = None,
    ) -> None:
        self.env = env
        self.topology = topology
        self.costs: CollectiveCosts = topology.cluster.collectives
        self.groups = groups
        self.is_folded = is_folded
        self.num_transfers = 0
        self._transfers: dict[tuple[Collective, int], Transfer] = {}
        self._shapes: dict[tuple[str, str], str] = {}
        self._domains: dict[tuple[str, int], tuple[int, bool]] = {}
        self._extra_hops: dict[tuple[str, int], float] = {}
        self._kinds = _kinds_by_group(groups, works)
        self._base_usage: dict[tuple[str, str], Floats] = {}
        self._own_usage: dict[tuple[str, str], Floats] = {}
        usages: list[tuple[tuple[str, int, str], Floats]] = []
        for name, group in groups.items():
            for number, ranks in enumerate(self._instances(group)):
                patterns = by_pattern(topology, ranks)
                places = [domains_of(topology, alike[0]) for alike in patterns]
                self._domains[name, number] = max(n for n, _ in places), all(even for _, even in places)
                self._extra_hops[name, number] = max(hop_seconds(topology, alike[0]) for alike in patterns)
                shapes = {m.shape: None for k in self._kinds[name] for m in self._methods_of(name, number, k)}
                for shape in shapes:
                    usage = np.zeros(topology.num_links)
                    for alike in patterns if group.size > 1 else []:
                        usage += SHAPES[shape](topology, alike)
                    self._base_usage[name, shape] = usage + self._base_usage.get((name, shape), 0.0)
                    usages.append(((name, number, shape), usage))
                    if len(ranks) > 1 and group.size > 1:
                        self._own_usage[name, shape] = SHAPES[shape](topology, ranks[:1])
        self._build_pool(usages, extra or Extra(np.zeros(0), []))

    # -- communicators ------------------------------------------------------------------------------

    def _instances(self, group: Group) -> list[list[range]]:
        """The groups that run at once, as lists of groups that share one activity."""
        span = group.size * group.stride
        starts = range(0, self.topology.world_size, span)
        firsts = [start + offset for start in starts for offset in range(group.stride)]
        parts = [group.ranks_of(first) for first in firsts]
        return [parts] if self.is_folded else [[part] for part in parts]

    def _methods_of(self, name: str, number: int, kind: str) -> list[Method]:
        has_switch = self.topology.cluster.node_link.kind == "switch"
        count, is_even = self._domains[name, number]
        size = self.groups[name].size
        return methods(kind, size, count, self.costs, has_switch=has_switch, is_even=is_even)

    def _build_pool(self, usages: list[tuple[tuple[str, int, str], Floats]], extra: Extra) -> None:
        """Lump the links and register one profile per usage; see [Note: lumped links]."""
        capacities = np.concatenate([self.topology.capacities(), extra.capacities])
        num_links = self.topology.num_links
        signature = np.stack([capacities, capacities])
        # Two independent weighted sums tell links apart; equal rows give equal sums, bit for bit.
        coefficients = np.random.default_rng(20010).uniform(1.0, 2.0, size=(2, len(usages) + 1))
        leaves_node = self.topology.leaves_node()
        columns = [leaves_node.astype(np.float64), *(usage for _key, usage in usages)]
        for column, usage in enumerate(columns):
            signature[:, :num_links] += coefficients[:, column : column + 1] * usage
        coefficients = np.random.default_rng(20011).uniform(1.0, 2.0, size=(2, len(extra.usages)))
        for column, (_extra_key, indices, weights) in enumerate(extra.usages):
            signature[:, indices] += coefficients[:, column : column + 1] * weights
        keys = signature.view(np.int64)
        mixed = keys[0] * np.int64(0x1003F) ^ keys[1]
        _unique, representatives = np.unique(mixed, return_index=True)
        representatives = np.sort(representatives)
        self.pool = FluidPool(self.env, capacities[representatives].tolist())
        of_links = representatives[representatives < num_links]
        lumped = {key: usage[of_links] for key, usage in usages}
        self._choices: dict[tuple[str, int, str], list[_Choice]] = {}
        instances = sorted({(name, number) for name, number, _shape in lumped})
        for name, number in instances:
            self._add_choices(name, number, lumped, leaves_node[of_links])
        self.extra_profiles: dict[Hashable, Profile] = {}
        position = {resource: place for place, resource in enumerate(representatives.tolist())}
        for key, indices, weights in extra.usages:
            pairs = zip(indices.tolist(), weights.tolist(), strict=True)
            self.extra_profiles[key] = self.pool.profile(
                [(position[index], weight) for index, weight in pairs if index in position]
            )

    def _add_choices(
        self,
        name: str,
        number: int,
        lumped: Mapping[tuple[str, int, str], Floats],
        leaves_node: npt.NDArray[np.bool_],
    ) -> None:
        """Every (algorithm, protocol) of one communicator, for each kind of collective it runs. A protocol
        reaches only its fraction of each link's bandwidth, so it weighs more."""
        profiles: dict[tuple[str, float, float], Profile] = {}
        for kind in self._kinds[name]:
            choices = self._choices[name, number, kind] = []
            for method in self._methods_of(name, number, kind):
                self._shapes[name, method.algorithm] = method.shape
                for protocol, costs in method.protocols.items():
                    key = (method.shape, costs.intra_fraction, costs.inter_fraction)
                    profile = profiles.get(key)
                    if profile is None:
                        fraction = np.where(leaves_node, costs.inter_fraction, costs.intra_fraction)
                        weights = lumped[name, number, method.shape] / fraction
                        used = np.nonzero(weights)[0]
                        pairs = zip(used.tolist(), weights[used].tolist(), strict=True)
                        profile = profiles[key] = self.pool.profile(list(pairs))
                    alone = min((self.pool.capacity[r] / w for r, w in profile.usage), default=float("inf"))
                    own = self._own_bandwidth(name, method.shape, costs)
                    own = alone if own is None else own
                    bandwidths = alone * method.fraction, own * method.fraction
                    choices.append(_Choice(method, protocol, costs, profile, *bandwidths))

    def _own_bandwidth(self, name: str, shape: str, costs: ProtocolCosts) -> float | None:
        """Bus bytes per second of one group without the others of its kind; None where it has none."""
        usage = self._own_usage.get((name, shape))
        if usage is None:
            return None
        used = np.flatnonzero(usage)
        leaves_node = self.topology.leaves_node()[used]
        fraction = np.where(leaves_node, costs.inter_fraction, costs.intra_fraction)
        rates = self.topology.capacities()[used] * fraction / usage[used]
        return float(rates.min(initial=float("inf")))

    # -- running ------------------------------------------------------------------------------------

    def instance_of(self, group_name: str, rank: int) -> int:
        """Which of a group's instances a rank belongs to (0 for all when folded)."""
        if self.is_folded:
            return 0
        group = self.groups[group_name]
        block, offset = divmod(group.ranks_of(rank).start, group.size * group.stride)
        return block * group.stride + offset

    def transfer(self, work: Collective, instance: int) -> Transfer:
        """The collective with the algorithm and protocol that the backend chooses."""
        known = self._transfers.get((work, instance))
        if known is not None:
            return known
        best = min(self.options(work, instance), key=self._preference(work, instance))
        self._transfers[work, instance] = best
        return best

    def options(self, work: Collective, instance: int = 0) -> list[Transfer]:
        """The collective with every algorithm and protocol that it may run with."""
        kind = self._kind(work)
        group = self.groups[work.group]
        size = edge_bytes(kind, work.bytes, group.size)
        extra_hops = self._extra_hops[work.group, instance]
        found = []
        for choice in self._choices[work.group, instance, kind]:
            latency = 0.0
            if group.size > 1:
                latency = _latency(choice.method.rounds, choice.costs, extra_hops)
                latency += choice.costs.ramp * (work.bytes / _MIB) ** 0.5
            seconds, own = (latency + size / rate for rate in (choice.bandwidth, choice.own_bandwidth))
            fraction, name = choice.method.fraction, choice.method.algorithm
            transfer = Transfer(latency, size / fraction, choice.profile, name, choice.protocol, seconds, own)
            found.append(transfer)
        return found

    def _preference(self, work: Collective, instance: int) -> Callable[[Transfer], float]:
        """What the backend minimises: the time on idle links, or NCCL's own estimate of it."""
        kind, group = self._kind(work), self.groups[work.group]
        domains, _is_even = self._domains[work.group, instance]
        if self.costs.choice == "fastest" or group.size == 1:
            return lambda transfer: transfer.choice_seconds

        def planned(transfer: Transfer) -> float:
            return planned_seconds(
                self.topology.cluster,
                kind,
                transfer.algorithm,
                transfer.protocol,
                work.bytes,
                group.size,
                domains,
            )

        return planned

    def _kind(self, work: Collective) -> str:
        is_whole = work.kind == "reduce_scatter" and self.costs.reduce_scatter == "all_reduce"
        return "all_reduce" if is_whole else work.kind

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

    def traffic(self, works: Iterable[Collective]) -> dict[str, float]:
        """Bytes over the busiest link of every link class, for the collectives one rank calls."""
        total = self.usage(works)
        return {
            name: float(total[c.first : c.first + c.count].max(initial=0.0))
            for name, c in self.topology.classes.items()
        }

    def usage(self, works: Iterable[Collective]) -> Floats:
        """Bytes over every link, when every rank calls `works` in all groups."""
        carried: dict[tuple[str, str], float] = {}
        for work in works:
            size = edge_bytes(self._kind(work), work.bytes, self.groups[work.group].size)
            shape = self._shapes[work.group, self.transfer(work, 0).algorithm]
            carried[work.group, shape] = carried.get((work.group, shape), 0.0) + size
        total = np.zeros(self.topology.num_links)
        for key, size in carried.items():
            total += self._base_usage[key] * size
        return total


def _kinds_by_group(
    groups: Mapping[str, Group], works: Iterable[Collective] | None
) -> dict[str, tuple[str, ...]]:
    """The kinds of collectives that every group runs, an all-reduce in place of gloo's reduce-scatter too."""
    if works is None:
        return dict.fromkeys(groups, _KINDS)
    found: dict[str, dict[str, None]] = {name: {} for name in groups}
    for work in works:
        found[work.group][work.kind] = None
        if work.kind == "reduce_scatter":
            found[work.group]["all_reduce"] = None
    return {name: tuple(kinds) for name, kinds in found.items()}


def _latency(rounds: Rounds, costs: ProtocolCosts, extra_hops: float) -> float:
    """NCCL's ring latency: base + rounds inside nodes + rounds between nodes; once a group spans nodes, every
    round waits at least for the network's overhead (NCCL 2.20 src/graph/tuning.cc, netOverhead)."""
    intra_round = max(costs.intra_round, costs.network_overhead) if rounds.inter else costs.intra_round
    return costs.base + rounds.intra * intra_round + rounds.inter * (costs.inter_round + extra_hops)
