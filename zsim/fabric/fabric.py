"""Collectives as fluid activities on the links of a topology.

A collective is one activity. Its size is its bus bytes (the bytes that every rank must send), its profile the
bytes that every link carries per bus byte under the chosen algorithm, its latency the time of the algorithm's
rounds. So its rate is the bus bandwidth of nccl-tests, whatever the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import simpy

from zsim.arrays import Bools, Floats, Ints
from zsim.cost.collectives.nccl_chunks import fill_seconds, tree_pieces
from zsim.cost.collectives.rounds import CallLimit, bus_bytes, unequal_bus_bytes
from zsim.fabric.algorithms.methods import CallKind, Method, Shape, call_kind, methods
from zsim.fabric.algorithms.nccl_choice import planned_seconds
from zsim.fabric.algorithms.others import link_usage, sent_by_gpu
from zsim.fabric.algorithms.rings import by_pattern, domains_of, fault_delays, longer_rounds
from zsim.fabric.communicators import (
    AlgorithmChoice,
    Communicator,
    Limits,
    LinkLoad,
    Transfer,
    UsedLinks,
    ramp_seconds,
    ring_latency,
)
from zsim.fabric.flight import Flight
from zsim.fabric.lumped_links import NO_EXTRA, NO_USAGE, Extra, Usage, at_representatives, lump, summed
from zsim.fabric.messages import Pairs, counted
from zsim.fluid.pool import FluidPool, Profile
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.collectives import CollectiveCosts, ProtocolCosts
from zsim.specs.topology.topology import Topology

_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")

Usages = dict[Hashable, Usage]  # by algorithm's shape and rows of slots


class Fabric:
    """The links of a topology as resources, and the communicators of a plan on them.

    `communicator_indices` gives, per kind of group, the communicator index of each of its groups (rows of
    `Group.members`). Groups with the same index share one activity, which simulates the collective of all of
    them and carries the load of all. Without these indices, `is_folded` puts all groups of a kind into one
    communicator, else each into a separate one. `collectives` are those to expect (None: any of the usual
    kinds in every group). `program_of` is the program of each rank, where there are several. Fabrics of
    co-located jobs are made with `is_connected` false, then joined with `connect`. `usages` caches the links
    that groups use on fabrics of one form (`Topology.form`).
    """

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        groups: Mapping[str, Group],
        *,
        is_folded: bool = True,
        blocks: Mapping[str, Ints] | None = None,
        extra: Extra = NO_EXTRA,
        works: Iterable[Collective] | None = None,
        program_of: Ints | None = None,
        is_connected: bool = True,
        usages: Usages | None = None,
    ) -> None:
        self.env = env
        self.topology = topology
        self.costs: CollectiveCosts = topology.cluster.collectives
        self.slowdown = max(gpu.interference.communication_slowdown for gpu in topology.cluster.gpus)
        self.groups = groups
        self.extra = extra
        self._usages: Usages = {} if usages is None else usages
        self.num_transfers = 0
        self.pool: FluidPool
        self._links: Ints
        self.extra_profiles: dict[Hashable, Profile] = {}
        self._transfers: dict[tuple[Collective, int], Transfer] = {}
        self._kinds = _kinds_by_group(groups, works)
        self._blocks = blocks or {
            name: np.zeros(count, dtype=np.int64) if is_folded else np.arange(count)
            for name, group in groups.items()
            for count in [len(group.members)]
        }
        self._communicators: dict[tuple[str, int], Communicator] = {}
        self._row_of = {name: group.row_of(topology.world_size) for name, group in groups.items()}
        self._sent: dict[tuple[str, int, Shape], tuple[float, float]] = {}
        self._receives = {
            name: group.receiving_row_of(topology.world_size)
            for name, group in groups.items()
            if isinstance(group, Pairs)
        }
        self._programs: dict[tuple[str, int], int] = {}  # of a communicator's first rank
        for name, group in groups.items():
            for number in range(int(self._blocks[name].max(initial=-1)) + 1):
                own = group.members[self._blocks[name] == number]
                self._communicators[name, number] = self._communicator(name, topology.slots[own])
                self._programs[name, number] = 0 if program_of is None else int(program_of[own[0, 0]])
        if is_connected:
            connect([self])

    # -- communicators ------------------------------------------------------------------------------

    def _communicator(self, name: str, members: Ints) -> Communicator:
        topology, group = self.topology, self.groups[name]
        patterns = by_pattern(topology, members)
        places = [domains_of(topology, alike[0]) for alike in patterns]
        count, most = max(n for n, _ in places), max(local for _, local in places)
        has_switch = topology.cluster.node_link.kind == "switch"
        kinds = {
            kind: methods(kind, group.size, count, self.costs, has_switch=has_switch, most_local_ranks=most)
            for kind in self._kinds[name]
        }
        shapes = list(dict.fromkeys(method.shape for found in kinds.values() for method in found))
        used, own = {}, {}
        for shape in shapes:
            used[shape] = self._usage_of(shape, patterns if group.size > 1 else [])
            if len(members) > 1 and group.size > 1:
                own[shape] = self._usage_of(shape, [members[:1]])
        longer = max(longer_rounds(topology, alike[0]) for alike in patterns)
        return Communicator(kinds, used, own, count, longer, fault_delays(topology, members))

    def _usage_of(self, shape: Shape, patterns: Sequence[Ints]) -> Usage:
        """The links that groups of one shape use, by the rows of their slots."""
        key = shape, *((len(rows), rows.tobytes()) for rows in patterns)
        known = self._usages.get(key)
        if known is None:
            usage = np.zeros(self.topology.num_links)
            for rows in patterns:
                usage += link_usage(shape, self.topology, rows)
            links = np.flatnonzero(usage)
            known = self._usages[key] = links, usage[links]
        return known

    def _add_choices(self, pool: FluidPool, links: Ints) -> None:
        """Make every (algorithm, protocol) choice of every communicator, for each kind of collective it runs.
        A protocol that reaches a fraction of a link's bandwidth divides the weight on the link by it."""
        self.pool, self._links = pool, links
        every = self.topology.capacities(), self.topology.leaves_node()
        lumped = every[0][links], every[1][links]
        trees: dict[str, list[Usage]] = {}
        for (name, _number), communicator in self._communicators.items():
            trees.setdefault(name, []).append(communicator.used.get("tree", NO_USAGE))
        loads = {name: summed(links, usages) for name, usages in trees.items()}
        for (name, _number), communicator in self._communicators.items():
            usage = {shape: at_representatives(links, used) for shape, used in communicator.used.items()}
            alone = {shape: UsedLinks.of(own, *lumped) for shape, own in usage.items()}
            together = dict(alone)
            if (tree := usage.get("tree")) is not None:
                together["tree"] = UsedLinks.of((tree[0], loads[name][tree[0]]), *lumped)
            single = {shape: UsedLinks.of(own, *every) for shape, own in communicator.own_used.items()}
            profiles: dict[tuple[Shape, float, float], Profile] = {}
            for kind, found in communicator.methods.items():
                communicator.choices[kind] = [
                    AlgorithmChoice(
                        method,
                        protocol,
                        costs,
                        *self._profiles(usage[method.shape], method, costs, profiles, lumped[1]),
                        alone[method.shape].limits(costs, method.fraction),
                        single.get(method.shape, alone[method.shape]).limits(costs, method.fraction),
                        together[method.shape].limits(costs, method.fraction),
                    )
                    for method in found
                    for protocol, costs in method.protocols.items()
                ]
            communicator.own_used = {}

    def _profiles(
        self,
        usage: Usage,
        method: Method,
        costs: ProtocolCosts,
        known: dict[tuple[Shape, float, float], Profile],
        leaves_node: Bools,
    ) -> tuple[Profile, Profile]:
        """The profiles of a usage of aggregated links: on idle GPUs, and while kernels run."""
        found = []
        for slowdown in (1.0, self.slowdown):
            key = (method.shape, costs.intra_fraction / slowdown, costs.inter_fraction)
            if key not in known:
                used, weights = usage[0], usage[1] / np.where(leaves_node[usage[0]], key[2], key[1])
                known[key] = self.pool.profile(list(zip(used.tolist(), weights.tolist(), strict=True)))
            found.append(known[key])
        return found[0], found[1]

    # -- running ------------------------------------------------------------------------------------

    def communicator(self, group_name: str, communicator: int = 0) -> Communicator:
        """The communicator with an index, of a kind of group."""
        return self._communicators[group_name, communicator]

    def communicator_of(self, group_name: str, rank: int) -> int:
        """Index of the communicator that simulates the rank's group. -1: in no group of the kind."""
        row = int(self._row_of[group_name][rank])
        return int(self._blocks[group_name][row]) if row >= 0 else -1

    def pair_of(self, name: str, rank: int, *, is_sender: bool) -> int:
        """Index of the communicator that simulates the pair in which a rank sends, or receives."""
        row = int((self._row_of if is_sender else self._receives)[name][rank])
        assert row >= 0, f"rank {rank} has no peer in '{name}'"
        return int(self._blocks[name][row])

    def transfer(self, work: Collective, communicator: int) -> Transfer:
        """The collective on a communicator, with the algorithm and protocol that the backend chooses."""
        known = self._transfers.get((work, communicator))
        if known is not None:
            return known
        best = min(self.options(work, communicator), key=self._preference(work, communicator))
        self._transfers[work, communicator] = best
        return best

    def limit(self, work: Collective) -> CallLimit:
        """Latency, time and bounding tier of the collective on idle links, on its slowest communicator."""
        numbers = [number for name, number in self._communicators if name == work.group]
        transfer = max((self.transfer(work, number) for number in numbers), key=lambda t: t.seconds_alone)
        tier, slowed = "", 0.0
        if transfer.profile.usage:
            slowest, rate = self._bound(transfer.profile)
            tier = self.topology.class_of(int(self._links[slowest])).tier
            if transfer.beside is not None:
                slowed = transfer.size / self._bound(transfer.beside)[1] - transfer.size / rate
        return CallLimit(transfer.latency_seconds, transfer.seconds_alone, tier, slowed)

    def _bound(self, profile: Profile) -> tuple[int, float]:
        """The link that bounds an activity on idle links, and the activity's rate."""
        link, weight = min(profile.usage, key=lambda use: self.pool.capacity[use[0]] / use[1])
        return link, self.pool.capacity[link] / weight

    def options(self, work: Collective, communicator: int = 0) -> list[Transfer]:
        """The collective with every algorithm and protocol that the communicator may run."""
        kind = self._kind(work)
        group = self.groups[work.group]
        size = self._bus_bytes(work)
        own = self._communicators[work.group, communicator]
        found = []
        for choice in own.choices[self._call_kind(work)]:
            latency = 0.0
            if group.size > 1:
                rounds = choice.method.rounds
                latency = ring_latency(rounds, choice.costs, own.longer) + own.fault_seconds(kind, rounds)
                latency += ramp_seconds(rounds, choice.costs, work.bytes)
                latency += self.costs.message_delay if kind == "send" and rounds.inter else 0.0
            limits = choice.limits, choice.own_limits
            filled = choice.together, choice.own_limits
            latencies = [latency + self._fill(work, choice, rates, own.num_domains) for rates in filled]
            seconds = [wait + size / rates.bandwidth for wait, rates in zip(latencies, limits, strict=True)]
            known = latencies[0], size / choice.method.fraction, choice.profile, choice.method.algorithm
            found.append(Transfer(*known, choice.protocol, seconds[0], seconds[1], choice.beside))
        return found

    def _fill(self, work: Collective, choice: AlgorithmChoice, limits: Limits, num_domains: int) -> float:
        """Seconds to fill the pipeline of a tree. 0 for every other algorithm."""
        if choice.method.shape != "tree" or not work.bytes:
            return 0.0
        num_ranks = self.groups[work.group].size
        size = self._bus_bytes(work)
        pieces = tree_pieces(choice.protocol, work.bytes, self.costs.channels, num_ranks, num_domains)
        return fill_seconds(choice.method.rounds, size / limits.inside, size / limits.across, pieces)

    def _preference(self, work: Collective, communicator: int) -> Callable[[Transfer], float]:
        """The time by which the backend chooses: seconds on idle links, or NCCL's estimate of them."""
        kind, group = self._kind(work), self.groups[work.group]
        domains = self._communicators[work.group, communicator].num_domains
        if self.costs.choice == "fastest" or group.size == 1 or kind == "send":
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

    def _call_kind(self, work: Collective) -> CallKind:
        kind = self._kind(work)
        return kind if kind != work.kind else call_kind(work)

    def _bus_bytes(self, work: Collective) -> float:
        if work.parts is not None:
            return float(unequal_bus_bytes(work.parts))
        return bus_bytes(self._kind(work), work.bytes, self.groups[work.group].size)

    def _shape(self, work: Collective, communicator: int) -> Shape:
        """The shape of the algorithm that the backend chooses on a communicator."""
        algorithm = self.transfer(work, communicator).algorithm
        return self._communicators[work.group, communicator].shape_of(self._call_kind(work), algorithm)

    def run(self, transfer: Transfer, on_end: Callable[[], None], busy: int = 0) -> Flight:
        """Start a transfer. `on_end` is called at its end. Kernels run on `num_busy` of its GPUs."""
        self.num_transfers += 1
        flight = Flight(self.pool, transfer, on_end, busy)
        if transfer.latency_seconds <= 0:
            flight.begin()
            return flight
        wait = simpy.Timeout(self.env, transfer.latency_seconds)
        wait.callbacks = [flight.begin]
        return flight

    # -- accounting ---------------------------------------------------------------------------------

    def traffic(self, works: Iterable[Collective]) -> dict[str, LinkLoad]:
        """Load of each class of links when every rank calls `collectives` in all of its groups."""
        return self.loads(self.usage(works))

    def loads(self, total: Floats, beside: Floats | float = 0.0) -> dict[str, LinkLoad]:
        """Load by class of links of `total` bytes per link. Background bytes count in utilisation only."""
        needed = total + beside
        if self.topology.condition is not None:
            needed = needed / self.topology.condition.fractions
        return {
            name: LinkLoad(
                float(total[c.first : c.first + c.count].sum()),
                float(needed[c.first : c.first + c.count].max(initial=0.0)),
            )
            for name, c in self.topology.classes.items()
        }

    def usage(self, works: Iterable[Collective], program: int = 0) -> Floats:
        """Bytes per link when every rank of a program calls `collectives` (or counts of them) everywhere."""
        counts = works if isinstance(works, Mapping) else counted(works)
        total = np.zeros(self.topology.num_links)
        for (name, number), communicator in self._communicators.items():
            if self._programs[name, number] != program:
                continue
            carried: dict[Shape, float] = {}
            for work, count in counts.items():
                if work.group == name and self.groups[name].size > 1:
                    shape = self._shape(work, number)
                    carried[shape] = carried.get(shape, 0.0) + count * self._bus_bytes(work)
            for shape, size in carried.items():
                links, weights = communicator.used[shape]
                total[links] += weights * size
        return total

    def carried(self, work: Collective, communicator: int) -> tuple[Ints, Floats]:
        """The links of a call of all groups that a communicator stands for, and the bytes on each."""
        links, weights = self._communicators[work.group, communicator].used[self._shape(work, communicator)]
        return links, weights * self._bus_bytes(work)

    def sent(self, work: Collective, program: int = 0) -> tuple[float, float]:
        """Bytes that one GPU sends for a call by the ranks of a program, as mean over all GPUs: inside its
        NVLink domain (over PCIe where there is no NVLink), and through the network cards."""
        size = self._bus_bytes(work)
        inside = between = 0.0
        for (name, number), communicator in self._communicators.items():
            if name != work.group or self._programs[name, number] != program:
                continue
            shape = self._shape(work, number)
            key = name, number, shape
            if key not in self._sent:
                self._sent[key] = sent_by_gpu(self.topology, *communicator.used[shape])
            inside += size * self._sent[key][0]
            between += size * self._sent[key][1]
        return inside, between


def connect(fabrics: Sequence[Fabric]) -> None:
    """Join the fabrics of co-located jobs (one topology, different ranks) in one pool of links."""
    first = fabrics[0]
    usages = [
        usage for fabric in fabrics for own in fabric._communicators.values() for usage in own.used.values()
    ]
    lumped = lump(first.env, first.topology, usages, [fabric.extra for fabric in fabrics])
    for fabric, profiles in zip(fabrics, lumped.extra_profiles, strict=True):
        fabric.extra_profiles = profiles
        fabric._add_choices(lumped.pool, lumped.links)


def _kinds_by_group(
    groups: Mapping[str, Group], works: Iterable[Collective] | None
) -> dict[str, tuple[CallKind, ...]]:
    """Each group's kinds of collectives, or tables of unequal parts. Gloo all-reduces to reduce-scatter."""
    if works is None:
        return {name: ("send",) if isinstance(group, Pairs) else _KINDS for name, group in groups.items()}
    found: dict[str, dict[CallKind, None]] = {name: {} for name in groups}
    for work in works:
        found[work.group][call_kind(work)] = None
        if work.kind == "reduce_scatter":
            found[work.group]["all_reduce"] = None
    return {name: tuple(kinds) for name, kinds in found.items()}
