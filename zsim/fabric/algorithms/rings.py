"""Link usage of rings, and the traffic of any algorithm: its parts, and what is summed over their links.

One entry of a usage is the bytes a link carries while every rank sends one bus byte (one byte per ring edge).
NCCL runs one ring per channel, each leaving the node through a different GPU's card, so that all cards share
the load. With g local ranks there are g rotations, each with 1/g of the bytes.

# [Note: rails]
A ring enters and leaves a node by cards of the same number (NCCL_CROSS_NIC=0, and 2 where that is as fast),
so that on rail-optimised fabrics it never crosses the spine. The node's last rank hands the bytes over NVLink
to the GPU of that card (PXN, NCCL 2.12 and later). So every GPU sends one whole byte over NVLink per bus
byte, and a large ring across nodes is as fast as NVLink or as all cards together, whichever is slower.

# [Note: dead cards]
NCCL looks for as many channels as a node's live cards can carry, and then every node takes the minimum over
all nodes (NCCL 2.21 src/init.cc, initTransportsRank: nChannels is the minimum over ranks). So one dead card
of eight leaves seven channels on all nodes, each with a seventh of the bytes. The channels enter the node by
its seven live cards and the other nodes by their first seven, so from the dead card on the two ends of a
channel are on different rails (github.com/NVIDIA/nccl/issues/1671). A communicator with one GPU on the node,
whose card is dead, shares another card of the node.

# [Note: few cards]
NCCL enters a node by the GPUs nearest to a card (2.8 src/graph/search.cc, ncclTopoSearchRecNet: the fewest
hops). Here every local rank has a channel, which is as fast as long as only ports bind. Where bytes cross the
uplink of a card's switch twice (specs/topology/node_links.py, [Note: staged bytes]) ports are not what binds,
and the channels enter by the GPUs under that switch (tests/fabric/test_staged.py holds that to measurements).

Algorithms (`zsim.fabric.algorithms.rings`, `zsim.fabric.algorithms.link_usage`) yield their parts one by one.
Whoever asks decides what to sum: bytes per link, bytes weighted by the sender's group, or values of links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.specs.topology.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class RouteTraffic:
    """Bytes on every link of the routes of pairs of slots."""

    senders: Ints
    """By pair, the slot that the bytes leave."""
    receivers: Ints
    """By pair, the slot that they arrive at."""
    amount: float | Floats
    """Bytes of every pair, or of each pair."""

    def scale(self, factors: Floats) -> RouteTraffic:
        """The same pairs with `factors` (one per pair) times the bytes."""
        return RouteTraffic(self.senders, self.receivers, self.amount * factors)

    def add_to(self, usage: Floats, topology: Topology) -> None:
        """Add the bytes to `usage`, which has an entry per link."""
        topology.add_routes(usage, self.senders, self.receivers, self.amount)

    def weigh(self, values: Floats, topology: Topology) -> Floats:
        """Per pair, the sum of its bytes on each link times the link's entry of `values`."""
        return self.amount * topology.gather_routes(values, self.senders, self.receivers)


@dataclass(frozen=True, slots=True, eq=False)
class LinkTraffic:
    """Bytes on the links of slots in a class that has one link per slot."""

    name: str
    """Of the class of links."""
    senders: Ints
    """The slots."""
    amount: float | Floats
    """Bytes of every slot, or of each slot."""

    def scale(self, factors: Floats) -> LinkTraffic:
        """The same links with `factors` (one per slot) times the bytes."""
        return LinkTraffic(self.name, self.senders, self.amount * factors)

    def add_to(self, usage: Floats, topology: Topology) -> None:
        """Add the bytes to `usage`, which has an entry per link."""
        topology.add_links(usage, self.name, self.senders, self.amount)

    def weigh(self, values: Floats, topology: Topology) -> Floats:
        """Per slot, its bytes times its link's entry of `values`."""
        weighed: Floats = self.amount * values[topology.classes[self.name].first + self.senders]
        return weighed


Traffic: TypeAlias = RouteTraffic | LinkTraffic


def bytes_by_link(topology: Topology, traffic: Iterable[Traffic]) -> Floats:
    """Bytes per link of all parts of some traffic."""
    usage = np.zeros(topology.num_links)
    for part in traffic:
        part.add_to(usage, topology)
    return usage


_MAX_SAMPLED = 64


def ring_usage(topology: Topology, members: Ints) -> Floats:
    """Bytes per link of `ring_traffic`."""
    return bytes_by_link(topology, ring_traffic(topology, members))


def ring_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """The bytes when every group (a row of slots, all of the same shape) runs its rings at one byte per edge,
    all groups at once."""
    if members.shape[1] > 1:
        for rows in partition_by_entries(topology, members):
            yield from _rings(topology, rows)


def partition_by_pattern(topology: Topology, members: Ints) -> list[Ints]:
    """The groups (rows of slots), partitioned by the positions at which they go from domain to domain, and by
    the domains to which they come back.
    """
    domains = topology.domain_of(members)
    changes = np.diff(domains, axis=1) != 0
    returns = changes.sum(axis=1) > (np.diff(np.sort(domains, axis=1), axis=1) != 0).sum(axis=1)
    if len(members) == 1 or ((changes == changes[0]).all() and not returns.any()):
        return [members]
    rows_of_pattern: dict[bytes, list[int]] = {}
    for number, row in enumerate(changes):
        key = first_of_domain(domains[number]) if returns[number] else row
        rows_of_pattern.setdefault(key.tobytes(), []).append(number)
    return [members[numbers] for numbers in rows_of_pattern.values()]


def partition_by_entries(topology: Topology, members: Ints) -> list[Ints]:
    """The rows of `members`, sorted by domain, partitioned by the positions at which channels enter them.

    Rows whose cards all work are in one partition (where [Note: few cards] holds, in one per position under
    the cards' switches). Each other row is in a partition by itself.
    """
    members = sort_by_domain(topology, members)
    is_intact = live_cards(topology, members).all(axis=1)
    intact, broken = members[is_intact], np.flatnonzero(~is_intact)
    partitions = [intact] if len(intact) else []
    if topology.copies_twice and len(intact):
        patterns, numbers = np.unique(topology.is_under_card(intact), axis=0, return_inverse=True)
        partitions = [intact[numbers.ravel() == number] for number in range(len(patterns))]
    return [*partitions, *(members[[row]] for row in broken.tolist())]


def domain_order(domains: Ints) -> Ints:
    """The order of a group's members, whose `domains` these are, in which the members of each domain follow
    one another.

    NCCL numbers nodes by their first rank, wherever the others are (2.21 src/init.cc, initTransportsRank).
    """
    order: Ints = np.argsort(first_of_domain(domains), kind="stable")
    return order


def first_of_domain(domains: Ints) -> Ints:
    """By member of a group, whose `domains` these are, the index of the first member of its domain."""
    _, firsts, inverse = np.unique(domains, return_index=True, return_inverse=True)
    return firsts[inverse]


def sort_by_domain(topology: Topology, members: Ints) -> Ints:
    """Groups of one pattern of domains with the members of each domain next to one another. See
    `domain_order`.
    """
    return members[:, domain_order(topology.domain_of(members[0]))]


def live_cards(topology: Topology, members: Ints) -> Bools:
    """Whether the network card of each slot works."""
    alive: Bools = topology.nic_of(members) == topology.nearest_card_of(members)
    return alive


def channel_entries(topology: Topology, members: Ints, starts: Ints, counts: Ints) -> Ints:
    """Position in the domain at which the channel enters, per domain and channel. See [Note: dead cards] and
    [Note: few cards].
    """
    alive = live_cards(topology, members[0])
    if alive.all() and not topology.copies_twice:
        fewest = int(counts.min())
        entries: Ints = np.arange(fewest) * counts[:, None] // fewest
        return entries
    is_near = alive & topology.is_under_card(members[0]) if topology.copies_twice else alive
    entries_of_domains: list[Ints] = []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        candidates = (np.flatnonzero(fits[start : start + count]) for fits in (is_near, alive))
        entries_of_domains.append(
            next((positions for positions in candidates if len(positions)), np.arange(count))
        )
    channels = np.arange(min(len(domain_entries) for domain_entries in entries_of_domains))
    return np.stack(
        [
            domain_entries[channels * len(domain_entries) // len(channels)]
            for domain_entries in entries_of_domains
        ]
    )


def _rings(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    size = members.shape[1]
    starts, counts = segments(topology, members)
    is_mesh = topology.cluster.node_link.kind == "mesh"
    if is_mesh and int(counts.min()) == int(counts.max()) > 1:
        # Direct links: as many rings as it takes to use all of them (RCCL does the same on xGMI).
        local = int(counts[0])
        inside = 1.0 if local == size else (local - 1) / local
        yield from _all_pairs(members.reshape(-1, local), inside / (local - 1))
    else:
        is_mesh = False
    is_intact = bool(live_cards(topology, members).all())
    orders = ring_orders(topology, members)
    for order, crosses in orders:
        targets = np.roll(order, -1, axis=1)
        if not is_mesh:
            inside_edges = order[:, ~crosses].ravel(), targets[:, ~crosses].ravel()
            yield RouteTraffic(*inside_edges, 1.0 / len(orders))
        if crosses.any():
            edges = order[:, crosses].ravel(), order[:, starts].ravel(), targets[:, crosses].ravel()
            yield from crossings(topology, *edges, 1.0 / len(orders), is_fixed=not is_intact)


def ring_orders(topology: Topology, members: Ints) -> list[tuple[Ints, Bools]]:
    """Slots of every row in the order of its ring, and after which of them the ring goes to another domain,
    per channel.
    """
    starts, counts = segments(topology, members)
    entries = channel_entries(topology, members, starts, counts)
    crosses = np.zeros(members.shape[1], dtype=bool)
    crosses[starts + counts - 1] = len(counts) > 1
    firsts, sizes = np.repeat(starts, counts), np.repeat(counts, counts)
    offsets = np.arange(members.shape[1]) - firsts
    orders = []
    for channel in range(entries.shape[1] if len(counts) > 1 else 1):
        turned = offsets + np.repeat(entries[:, channel], counts)
        ring_order = firsts + np.where(turned < sizes, turned, turned - sizes)
        orders.append((members[:, ring_order], crosses))
    return orders


def fault_delays(topology: Topology, members: Ints) -> list[tuple[Floats, Floats]]:
    """Seconds that faults add to a message on each of the ring's edges inside domains, and on each across
    them.

    The largest come first. There is one entry per channel of all groups.
    """
    if topology.condition is None or not topology.condition.delays.any() or members.shape[1] < 2:
        return []
    delays = topology.condition.delays
    return [
        channel_delays
        for row in range(len(members))
        for channel_delays in _ring_delays(topology, members[[row]], delays)
    ]


def _ring_delays(topology: Topology, members: Ints, delays: Floats) -> list[tuple[Floats, Floats]]:
    members = sort_by_domain(topology, members)
    starts, _counts = segments(topology, members)
    edge_delays = []
    for order, crosses in ring_orders(topology, members):
        targets = np.roll(order, -1, axis=1)
        sources = order[0].copy()
        if topology.cluster.node_link.kind == "switch":
            sources[crosses] = order[0, starts]
        seconds = topology.gather_routes(delays, sources, targets[0], is_peak=True)
        edge_delays.append((np.sort(seconds[~crosses])[::-1], np.sort(seconds[crosses])[::-1]))
    return edge_delays


def segments(topology: Topology, members: Ints) -> tuple[Ints, Ints]:
    """Where each domain's ranks start in a group, and how many they are. When the groups change domains at
    different positions, every rank is a segment by itself.
    """
    changes = np.diff(topology.domain_of(members), axis=1) != 0
    size = members.shape[1]
    if not (changes == changes[0]).all():
        return np.arange(size), np.ones(size, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(changes[0]) + 1])
    return starts, np.diff(np.concatenate([starts, [size]]))


def crossings(
    topology: Topology,
    sources: Ints,
    proxies: Ints,
    targets: Ints,
    amount: float | Floats,
    *,
    is_fixed: bool = False,
) -> Iterator[RouteTraffic]:
    """Bytes from domain to domain, one `amount` for all pairs or one each. Where source and target are on
    different rails (`is_fixed`: in any case), they go by way of `proxies`, whose cards are on the targets'
    rails."""
    if not len(sources):
        return
    rails = topology.cluster.nic.per_node * topology.nodes_per_domain
    if topology.cluster.node_link.kind == "switch":
        changes = topology.nic_of(sources) % rails != topology.nic_of(targets) % rails
        changes |= is_fixed
        changes &= (proxies != sources) & (topology.domain_of(sources) != topology.domain_of(targets))
        proxy_amount = amount[changes] if isinstance(amount, np.ndarray) else amount
        yield RouteTraffic(sources[changes], proxies[changes], proxy_amount)
        sources = np.where(changes, proxies, sources)
    yield RouteTraffic(sources, targets, amount)


def _all_pairs(rows: Ints, amount: float) -> Iterator[RouteTraffic]:
    """`amount` bytes from every rank of a row to every other rank of the row."""
    for offset in range(1, rows.shape[1]):
        yield RouteTraffic(rows.ravel(), np.roll(rows, -offset, axis=1).ravel(), amount)


def hierarchical_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """The bytes, per edge byte of the flat ring, for a ring across nodes among equal local ranks and a
    ring inside each node, pipelined. With g local ranks on k nodes, an edge across carries S/g (k-1)/k and an
    edge inside S (g-1)/g, against S (n-1)/n on the flat ring (all doubled for an all-reduce)."""
    size = members.shape[1]
    local = local_ranks(topology, members)
    nodes = size // local
    members = sort_by_domain(topology, members)
    flat = (size - 1) / size
    by_node = members.reshape(len(members) * nodes, local)
    across = members.reshape(len(members), nodes, local).transpose(0, 2, 1).reshape(-1, nodes)
    for order, edge in ((by_node, (local - 1) / local), (across, (nodes - 1) / nodes / local)):
        if order.shape[1] > 1:
            yield RouteTraffic(order.ravel(), np.roll(order, -1, axis=1).ravel(), edge / flat)


def domains_of(topology: Topology, slots: Ints) -> tuple[int, int]:
    """Number of NVLink domains (nodes) that a group's slots are on, and the maximum of slots on one."""
    counts = np.unique(topology.domain_of(slots), return_counts=True)[1]
    return len(counts), int(counts.max())


class ExtraRoundSeconds(NamedTuple):
    """Seconds to add to the cluster's cost of a round, for a group's rounds inside domains and between."""

    inside: float
    across: float


def extra_round_seconds(topology: Topology, slots: Ints) -> ExtraRoundSeconds:
    """Extra seconds per round for links longer than those of the measured rounds, and for switches after the
    first."""
    inside, across = topology.cluster.extra_link_seconds
    return ExtraRoundSeconds(inside, across + _hop_seconds(topology, slots))


def _hop_seconds(topology: Topology, slots: Ints) -> float:
    """Seconds that the switches after the first add to a round between domains: `hop_latency` for each on the
    longest of the group's (up to 64) crossings from domain to next domain, rail by rail."""
    latency = topology.cluster.network.hop_latency
    if not latency:
        return 0.0
    sources, targets = _crossings(topology, slots)
    if not len(sources):
        return 0.0
    between = topology.leaves_node().astype(float)
    links = topology.gather_routes(between, sources[:_MAX_SAMPLED], targets[:_MAX_SAMPLED])
    switches = round(float(links.max())) - 1
    return latency * (switches - 1)


def _crossings(topology: Topology, slots: Ints) -> tuple[Ints, Ints]:
    """Pairs of slots at which a group goes from domain to next domain, on one rail where there are rails."""
    heads = np.concatenate([[0], np.flatnonzero(np.diff(topology.domain_of(slots))) + 1])
    by_rail = topology.cluster.node_link.kind == "switch"
    sources = slots[heads[:-1]] if by_rail else slots[heads[1:] - 1]
    return sources, slots[heads[1:]]


def local_ranks(topology: Topology, members: Ints) -> int:
    """Ranks per domain of the first group, or 1 when its domains hold unequal numbers."""
    counts = np.unique(topology.domain_of(members[0]), return_counts=True)[1]
    return int(counts[0]) if (counts == counts[0]).all() else 1
