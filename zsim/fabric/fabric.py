"""Collectives as fluid activities on the links of a topology.

A collective is one activity. Its size is its bus bytes (the bytes that every rank must send), its profile the
bytes that every link carries per bus byte under the chosen algorithm, its latency the time of the algorithm's
rounds. So its rate is the bus bandwidth of nccl-tests, whatever the algorithm.

# [Note: a collective beside kernels]
Kernels and the copies of a collective compete for time slices of multiprocessors, caches and HBM bandwidth. A
ring is as fast as its slowest rank, so one busy GPU slows the whole collective. The fabric decides on which
links it is slowed (`Transfer.slow_profile`). Its latency is not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import simpy

from zsim.arrays import Bools, Floats, Ints
from zsim.cost.collectives.nccl_tuning import planned_seconds
from zsim.cost.collectives.rounds import CallLimit, bus_bytes, fill_seconds, tree_pieces, unequal_bus_bytes
from zsim.fabric.aggregate import (
    NO_EXTRA,
    NO_USAGE,
    Extra,
    Usage,
    aggregate_links,
    restrict_usage,
    sum_usages,
)
from zsim.fabric.algorithms.link_usage import link_usage, sent_by_gpu
from zsim.fabric.algorithms.methods import CallKind, Method, Shape, call_kind, methods
from zsim.fabric.algorithms.rings import domains_of, extra_round_seconds, fault_delays, partition_by_pattern
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
from zsim.fabric.messages import Pairs, count_collectives
from zsim.fluid.pool import Activity, FluidPool, Profile
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
    that groups use on fabrics of one form (`Topology.route_key`).
    """

    def __init__(
        self,
        env: simpy.Environment,
        topology: Topology,
        groups: Mapping[str, Group],
        *,
        is_folded: bool = True,
        communicator_indices: Mapping[str, Ints] | None = None,
        extra: Extra = NO_EXTRA,
        collectives: Iterable[Collective] | None = None,
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
        self._kinds = _kinds_by_group(groups, collectives)
        self._communicator_indices = communicator_indices or {
            name: np.zeros(count, dtype=np.int64) if is_folded else np.arange(count)
            for name, group in groups.items()
            for count in [len(group.members)]
        }
        self._communicators: dict[tuple[str, int], Communicator] = {}
        self._row_of = {name: group.row_per_rank(topology.world_size) for name, group in groups.items()}
        self._sent_bytes: dict[tuple[str, int, Shape], tuple[float, float]] = {}
        self._receiving_rows = {
            name: group.receiving_row_of(topology.world_size)
            for name, group in groups.items()
            if isinstance(group, Pairs)
        }
        self._programs: dict[tuple[str, int], int] = {}  # of a communicator's first rank
        for name, group in groups.items():
            for number in range(int(self._communicator_indices[name].max(initial=-1)) + 1):
                members = group.members[self._communicator_indices[name] == number]
                self._communicators[name, number] = self._communicator(name, topology.slots[members])
                self._programs[name, number] = 0 if program_of is None else int(program_of[members[0, 0]])
        if is_connected:
            connect([self])

    # -- communicators ------------------------------------------------------------------------------

    def _communicator(self, name: str, members: Ints) -> Communicator:
        topology, group = self.topology, self.groups[name]
        patterns = partition_by_pattern(topology, members)
        domain_sizes = [domains_of(topology, rows[0]) for rows in patterns]
        num_domains, most_local_ranks = (
            max(n for n, _ in domain_sizes),
            max(most_local_ranks for _, most_local_ranks in domain_sizes),
        )
        has_switch = topology.cluster.node_link.kind == "switch"
        kinds = {
            kind: methods(
                kind,
                group.size,
                num_domains,
                self.costs,
                has_switch=has_switch,
                most_local_ranks=most_local_ranks,
            )
            for kind in self._kinds[name]
        }
        shapes = list(dict.fromkeys(method.shape for options in kinds.values() for method in options))
        usages, group_usages = {}, {}
        for shape in shapes:
            usages[shape] = self._usage_of(shape, patterns if group.size > 1 else [])
            if len(members) > 1 and group.size > 1:
                group_usages[shape] = self._usage_of(shape, [members[:1]])
        extra = max(extra_round_seconds(topology, rows[0]) for rows in patterns)
        return Communicator(kinds, usages, group_usages, num_domains, extra, fault_delays(topology, members))

    def _usage_of(self, shape: Shape, patterns: Sequence[Ints]) -> Usage:
        """The links that groups of one shape use, by the rows of their slots."""
        key = shape, *((len(rows), rows.tobytes()) for rows in patterns)
        cached = self._usages.get(key)
        if cached is None:
            usages = (link_usage(shape, self.topology, rows) for rows in patterns)
            usage = next(usages, np.zeros(0))
            for pattern_usage in usages:
                usage += pattern_usage
            links = np.flatnonzero(usage != 0.0)
            cached = self._usages[key] = links, usage[links]
        return cached

    def _add_choices(self, pool: FluidPool, links: Ints) -> None:
        """Make every (algorithm, protocol) choice of every communicator, for each kind of collective it runs.
        A protocol that reaches a fraction of a link's bandwidth divides the weight on the link by it."""
        self.pool, self._links = pool, links
        all_links = self.topology.capacities(), self.topology.leaves_node()
        aggregated_links = all_links[0][links], all_links[1][links]
        trees: dict[str, list[Usage]] = {}
        for (name, _number), communicator in self._communicators.items():
            trees.setdefault(name, []).append(communicator.usages.get("tree", NO_USAGE))
        loads = {name: sum_usages(links, usages) for name, usages in trees.items()}
        for (name, _number), communicator in self._communicators.items():
            usage = {
                shape: restrict_usage(links, shape_usage)
                for shape, shape_usage in communicator.usages.items()
            }
            used_links = {shape: UsedLinks.of(weights, *aggregated_links) for shape, weights in usage.items()}
            combined_links = dict(used_links)
            if (tree := usage.get("tree")) is not None:
                combined_links["tree"] = UsedLinks.of((tree[0], loads[name][tree[0]]), *aggregated_links)
            group_links = {
                shape: UsedLinks.of(weights, *all_links)
                for shape, weights in communicator.group_usages.items()
            }
            profiles: dict[tuple[Shape, float, float], Profile] = {}
            for kind, options in communicator.methods.items():
                communicator.choices[kind] = [
                    AlgorithmChoice(
                        method,
                        protocol,
                        costs,
                        *self._profiles(usage[method.shape], method, costs, profiles, aggregated_links[1]),
                        used_links[method.shape].limits(costs, method.fraction),
                        group_links.get(method.shape, used_links[method.shape]).limits(
                            costs, method.fraction
                        ),
                        combined_links[method.shape].limits(costs, method.fraction),
                    )
                    for method in options
                    for protocol, costs in method.protocols.items()
                ]
            communicator.group_usages = {}

    def _profiles(
        self,
        usage: Usage,
        method: Method,
        costs: ProtocolCosts,
        cache: dict[tuple[Shape, float, float], Profile],
        leaves_node: Bools,
    ) -> tuple[Profile, Profile]:
        """The profiles of a usage of aggregated links: on idle GPUs, and while kernels run."""
        profiles = []
        for slowdown in (1.0, self.slowdown):
            key = (method.shape, costs.intra_fraction / slowdown, costs.inter_fraction)
            if key not in cache:
                used_links, weights = usage[0], usage[1] / np.where(leaves_node[usage[0]], key[2], key[1])
                cache[key] = self.pool.profile(list(zip(used_links.tolist(), weights.tolist(), strict=True)))
            profiles.append(cache[key])
        return profiles[0], profiles[1]

    # -- running ------------------------------------------------------------------------------------

    def communicator(self, group_name: str, index: int = 0) -> Communicator:
        """The communicator with an index, of a kind of group."""
        return self._communicators[group_name, index]

    def communicator_of(self, group_name: str, rank: int) -> int:
        """Index of the communicator that simulates the rank's group. -1: in no group of the kind."""
        row = int(self._row_of[group_name][rank])
        return int(self._communicator_indices[group_name][row]) if row >= 0 else -1

    def pair_of(self, name: str, rank: int, *, is_sender: bool) -> int:
        """Index of the communicator that simulates the pair in which a rank sends, or receives."""
        row = int((self._row_of if is_sender else self._receiving_rows)[name][rank])
        assert row >= 0, f"rank {rank} has no peer in '{name}'"
        return int(self._communicator_indices[name][row])

    def transfer(self, work: Collective, index: int) -> Transfer:
        """The collective on a communicator, with the algorithm and protocol that the backend chooses."""
        cached = self._transfers.get((work, index))
        if cached is not None:
            return cached
        best = min(self.options(work, index), key=self._preference(work, index))
        self._transfers[work, index] = best
        return best

    def limit(self, work: Collective) -> CallLimit:
        """Latency, time and bounding tier of the collective on idle links, on its slowest communicator."""
        numbers = [number for name, number in self._communicators if name == work.group]
        transfer = max((self.transfer(work, number) for number in numbers), key=lambda t: t.isolated_seconds)
        tier, slowdown = "", 0.0
        if transfer.profile.usage:
            slowest, rate = self._bounding_link(transfer.profile)
            tier = self.topology.class_of(int(self._links[slowest])).tier
            if transfer.slow_profile is not None:
                slowdown = (
                    transfer.size / self._bounding_link(transfer.slow_profile)[1] - transfer.size / rate
                )
        return CallLimit(transfer.latency_seconds, transfer.isolated_seconds, tier, slowdown)

    def _bounding_link(self, profile: Profile) -> tuple[int, float]:
        """The link that bounds an activity on idle links, and the activity's rate."""
        link, weight = min(profile.usage, key=lambda use: self.pool.capacity[use[0]] / use[1])
        return link, self.pool.capacity[link] / weight

    def options(self, work: Collective, index: int = 0) -> list[Transfer]:
        """The collective with every algorithm and protocol that the communicator may run."""
        kind = self._kind(work)
        group = self.groups[work.group]
        size = self._bus_bytes(work)
        communicator = self._communicators[work.group, index]
        transfers = []
        for choice in communicator.choices[self._call_kind(work)]:
            latency = 0.0
            if group.size > 1:
                rounds = choice.method.rounds
                latency = ring_latency(rounds, choice.costs, communicator.extra) + communicator.fault_seconds(
                    kind, rounds
                )
                latency += ramp_seconds(rounds, choice.costs, work.bytes)
                latency += self.costs.message_delay if kind == "send" and rounds.inter else 0.0
            limits = choice.limits, choice.group_limits
            fills = choice.combined_limits, choice.group_limits
            latencies = [
                latency + self._fill(work, choice, rates, communicator.num_domains) for rates in fills
            ]
            seconds = [wait + size / rates.bandwidth for wait, rates in zip(latencies, limits, strict=True)]
            fields = latencies[0], size / choice.method.fraction, choice.profile, choice.method.algorithm
            transfers.append(Transfer(*fields, choice.protocol, seconds[0], seconds[1], choice.slow_profile))
        return transfers

    def _fill(self, work: Collective, choice: AlgorithmChoice, limits: Limits, num_domains: int) -> float:
        """Seconds to fill the pipeline of a tree. 0 for every other algorithm."""
        if choice.method.shape != "tree" or not work.bytes:
            return 0.0
        num_ranks = self.groups[work.group].size
        size = self._bus_bytes(work)
        pieces = tree_pieces(choice.protocol, work.bytes, self.costs.channels, num_ranks, num_domains)
        return fill_seconds(choice.method.rounds, size / limits.inside, size / limits.across, pieces)

    def _preference(self, work: Collective, index: int) -> Callable[[Transfer], float]:
        """The time by which the backend chooses: seconds on idle links, or NCCL's estimate of them."""
        kind, group = self._kind(work), self.groups[work.group]
        domains = self._communicators[work.group, index].num_domains
        if self.costs.choice == "fastest" or group.size == 1 or kind == "send":
            return lambda transfer: transfer.choice_seconds

        def nccl_estimate(transfer: Transfer) -> float:
            return planned_seconds(
                self.topology.cluster,
                kind,
                transfer.algorithm,
                transfer.protocol,
                work.bytes,
                group.size,
                domains,
            )

        return nccl_estimate

    def _kind(self, work: Collective) -> str:
        runs_as_all_reduce = work.kind == "reduce_scatter" and self.costs.reduce_scatter == "all_reduce"
        return "all_reduce" if runs_as_all_reduce else work.kind

    def _call_kind(self, work: Collective) -> CallKind:
        kind = self._kind(work)
        return kind if kind != work.kind else call_kind(work)

    def _bus_bytes(self, work: Collective) -> float:
        if work.split_sizes is not None:
            return float(unequal_bus_bytes(work.split_sizes))
        return bus_bytes(self._kind(work), work.bytes, self.groups[work.group].size)

    def _shape(self, work: Collective, index: int) -> Shape:
        """The shape of the algorithm that the backend chooses on a communicator."""
        algorithm = self.transfer(work, index).algorithm
        return self._communicators[work.group, index].shape_of(self._call_kind(work), algorithm)

    def run(self, transfer: Transfer, on_end: Callable[[], None], num_busy: int = 0) -> InFlightTransfer:
        """Start a transfer. `on_end` is called at its end. Kernels run on `num_busy` of its GPUs."""
        self.num_transfers += 1
        transfer_in_flight = InFlightTransfer(self.pool, transfer, on_end, num_busy)
        if transfer.latency_seconds <= 0:
            transfer_in_flight.begin()
            return transfer_in_flight
        wait = simpy.Timeout(self.env, transfer.latency_seconds)
        wait.callbacks = [transfer_in_flight.begin]
        return transfer_in_flight

    # -- accounting ---------------------------------------------------------------------------------

    def traffic(self, collectives: Iterable[Collective]) -> dict[str, LinkLoad]:
        """Load of each class of links when every rank calls `collectives` in all of its groups."""
        return self.loads(self.usage(collectives))

    def loads(self, total: Floats, background_bytes: Floats | float = 0.0) -> dict[str, LinkLoad]:
        """Load by class of links of `total` bytes per link. Background bytes count in utilisation only."""
        needed_bytes = total + background_bytes
        if self.topology.condition is not None:
            needed_bytes = needed_bytes / self.topology.condition.fractions
        return {
            name: LinkLoad(
                float(total[link_class.first : link_class.first + link_class.count].sum()),
                float(needed_bytes[link_class.first : link_class.first + link_class.count].max(initial=0.0)),
            )
            for name, link_class in self.topology.classes.items()
        }

    def usage(self, collectives: Iterable[Collective], program: int = 0) -> Floats:
        """Bytes per link when every rank of a program calls `collectives` (or counts of them) everywhere."""
        counts = collectives if isinstance(collectives, Mapping) else count_collectives(collectives)
        total = np.zeros(self.topology.num_links)
        for (name, number), communicator in self._communicators.items():
            if self._programs[name, number] != program:
                continue
            bytes_of_shape: dict[Shape, float] = {}
            for work, count in counts.items():
                if work.group == name and self.groups[name].size > 1:
                    shape = self._shape(work, number)
                    bytes_of_shape[shape] = bytes_of_shape.get(shape, 0.0) + count * self._bus_bytes(work)
            for shape, size in bytes_of_shape.items():
                links, weights = communicator.usages[shape]
                total[links] += weights * size
        return total

    def link_bytes(self, work: Collective, index: int) -> tuple[Ints, Floats]:
        """The links of a call of all groups that a communicator stands for, and the bytes on each."""
        links, weights = self._communicators[work.group, index].usages[self._shape(work, index)]
        return links, weights * self._bus_bytes(work)

    def sent_bytes(self, work: Collective, program: int = 0) -> tuple[float, float]:
        """Bytes that one GPU sends for a call by the ranks of a program, as mean over all GPUs: inside its
        NVLink domain (over PCIe where there is no NVLink), and through the network cards."""
        size = self._bus_bytes(work)
        inside = between = 0.0
        for (name, number), communicator in self._communicators.items():
            if name != work.group or self._programs[name, number] != program:
                continue
            shape = self._shape(work, number)
            key = name, number, shape
            if key not in self._sent_bytes:
                self._sent_bytes[key] = sent_by_gpu(self.topology, *communicator.usages[shape])
            inside += size * self._sent_bytes[key][0]
            between += size * self._sent_bytes[key][1]
        return inside, between


def connect(fabrics: Sequence[Fabric]) -> None:
    """Join the fabrics of co-located jobs (one topology, different ranks) in one pool of links."""
    first = fabrics[0]
    usages = [
        usage
        for fabric in fabrics
        for group in fabric._communicators.values()
        for usage in group.usages.values()
    ]
    aggregated = aggregate_links(first.env, first.topology, usages, [fabric.extra for fabric in fabrics])
    for fabric, profiles in zip(fabrics, aggregated.extra_profiles, strict=True):
        fabric.extra_profiles = profiles
        fabric._add_choices(aggregated.pool, aggregated.links)


def _kinds_by_group(
    groups: Mapping[str, Group], collectives: Iterable[Collective] | None
) -> dict[str, tuple[CallKind, ...]]:
    """The kinds of collective calls of each group, tables of unequal parts included. Gloo all-reduces to
    reduce-scatter.
    """
    if collectives is None:
        return {name: ("send",) if isinstance(group, Pairs) else _KINDS for name, group in groups.items()}
    kinds_of_group: dict[str, dict[CallKind, None]] = {name: {} for name in groups}
    for work in collectives:
        kinds_of_group[work.group][call_kind(work)] = None
        if work.kind == "reduce_scatter":
            kinds_of_group[work.group]["all_reduce"] = None
    return {name: tuple(kinds) for name, kinds in kinds_of_group.items()}


class InFlightTransfer:
    """One run of a transfer.

    `num_busy` is the number of its GPUs on which kernels run. `member_transfers` are the lists of its
    members' collectives in flight, which it leaves when it ends.
    """

    __slots__ = ("_activity", "_on_end", "_pool", "_transfer", "member_transfers", "num_busy")

    def __init__(
        self, pool: FluidPool, transfer: Transfer, on_end: Callable[[], None], num_busy: int = 0
    ) -> None:
        self._pool = pool
        self._transfer = transfer
        self._on_end = on_end
        self._activity: Activity | None = None
        self.num_busy = num_busy
        self.member_transfers: Sequence[list[InFlightTransfer]] = ()

    def begin(self, _event: object = None) -> None:
        """Move the bytes. Called when the latency is over."""
        transfer = self._transfer
        profile = (
            transfer.slow_profile if self.num_busy and transfer.slow_profile is not None else transfer.profile
        )
        self._activity = self._pool.start(profile, transfer.size, self._finish)

    def _finish(self) -> None:
        self._activity = None  # which calls this
        for transfers in self.member_transfers:
            transfers.remove(self)
        self._on_end()

    def set_member_busy(self, is_busy: bool) -> None:
        """Count one more GPU as busy, or one less, and change the profile when that changes it."""
        num_busy_before, self.num_busy = self.num_busy, self.num_busy + (1 if is_busy else -1)
        slow_profile = self._transfer.slow_profile
        if self._activity is None or slow_profile is None or (num_busy_before > 0) == (self.num_busy > 0):
            return
        self._pool.change(self._activity, slow_profile if self.num_busy else self._transfer.profile)


def idle_fabric(topology: Topology, group: Group, collectives: Sequence[Collective] | None = None) -> Fabric:
    """The idle links of `topology`, ready to run `collectives` in all groups of `group`'s kind at once. None:
    any collective.
    """
    return Fabric(simpy.Environment(), topology, {group.name: group}, is_folded=True, collectives=collectives)


def idle_seconds(topology: Topology, groups: Mapping[str, Group], collectives: Iterable[Collective]) -> float:
    """Seconds of all `collectives` one after the other on otherwise idle links. The groups of a kind run at
    once, all as slow as the slowest of them.
    """
    calls = Counter(collectives)
    fabric = Fabric(simpy.Environment(), topology, groups, is_folded=True, collectives=calls)
    return sum(count * fabric.transfer(work, 0).isolated_seconds for work, count in calls.items())
