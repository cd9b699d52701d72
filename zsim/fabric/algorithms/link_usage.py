"""Link usage of the algorithms other than the ring: bytes per link while every rank sends one bus byte.

Groups are rows of slots.

With n ranks on k domains, g on each, and S the tensor, an all-reduce has 2 S (n-1)/n bus bytes:

    tree        a chain inside each domain, two binary trees across, S/2 each way on each of their edges,
                one pair of trees per local rank. A card sends 2 S/g as on the ring, times n/(n-1)
    nvls        every GPU sends its S once, to be reduced in the switch, and S/n that is multicast:
                S (n+1)/n each way, against 2 S (n-1)/n on the ring (NVLink SHARP)
    nvls_tree   S (g+1)/g each way inside the domain, and the two trees of S/g for every rail across
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.cost.collectives.rounds import unequal_bus_bytes
from zsim.errors import NotSimulatedError
from zsim.fabric.algorithms.methods import ForwardedShape, Shape, UnequalShape
from zsim.fabric.algorithms.rings import (
    LinkTraffic,
    RouteTraffic,
    Traffic,
    bytes_by_link,
    crossings,
    domain_order,
    hierarchical_traffic,
    local_ranks,
    partition_by_entries,
    ring_orders,
    ring_traffic,
    segments,
    sort_by_domain,
)
from zsim.plan.ops import SplitSizes
from zsim.specs.topology.topology import Topology

_MAX_PAIRS = 4096  # maximum of ranks in an all-to-all group: n^2 pairs are counted one offset at a time


def tree_parents(count: int) -> tuple[Ints, Ints]:
    """Parent of each of `count` nodes (-1: the root) in NCCL's two trees.

    The second tree is the first shifted by one node, or mirrored where the count is even, so that inner nodes
    of one are leaves of the other (NCCL src/graph/trees.cc, ncclGetBtree and ncclGetDtree. Sanders, Speck,
    Traff 2009).
    """
    nodes = np.arange(count, dtype=np.int64)
    lowest = nodes & -nodes
    up = (nodes ^ lowest) | (lowest << 1)
    first = np.where(up < count, up, nodes ^ lowest)
    first[0] = -1
    if count % 2:
        shifted = first[(nodes - 1) % count]
        second = np.where(shifted < 0, -1, (shifted + 1) % count)
    else:
        mirrored = first[count - 1 - nodes]
        second = np.where(mirrored < 0, -1, count - 1 - mirrored)
    return first, second


def _tree_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """Double binary trees across domains, chains inside them.

    There is one pair of trees per channel: as many as the smallest domain has ranks with live cards, see
    [Note: dead cards] in zsim.fabric.algorithms.rings.
    """
    for rows in partition_by_entries(topology, members):
        size = rows.shape[1]
        starts, counts = segments(topology, rows)
        is_last = np.zeros(size, dtype=bool)
        is_last[starts + counts - 1] = True
        chained = np.flatnonzero(~is_last)
        orders = ring_orders(topology, rows)
        share = size / (2 * (size - 1)) / len(orders)  # bytes on a chain's edge (both trees), per bus byte
        for order, _crosses in orders:
            above, below = order[:, chained].ravel(), order[:, chained + 1].ravel()
            yield RouteTraffic(below, above, share)
            yield RouteTraffic(above, below, share)
        yield from _trees(topology, np.concatenate([order[:, starts] for order, _ in orders]), share)


def _trees(topology: Topology, heads: Ints, amount: float) -> Iterator[RouteTraffic]:
    """Both trees over the columns of `heads` (one row per group), half of `amount` on each, up and
    down."""
    for parents in tree_parents(heads.shape[1]):
        children = np.flatnonzero(parents >= 0)
        below, above = heads[:, children].ravel(), heads[:, parents[children]].ravel()
        yield from crossings(topology, below, below, above, amount / 2)
        yield from crossings(topology, above, above, below, amount / 2)


def _nvls_traffic(topology: Topology, members: Ints) -> Iterator[Traffic]:
    """In-switch reduction inside domains. Across domains there is a pair of trees per rail."""
    size = members.shape[1]
    local = local_ranks(topology, members)
    bus = 2 * (size - 1) / size
    for name in ("nvlink_out", "nvlink_in"):
        yield LinkTraffic(name, members.ravel(), (local + 1) / local / bus)
    if local < size:
        rails = (
            sort_by_domain(topology, members)
            .reshape(len(members), -1, local)
            .transpose(2, 0, 1)
            .reshape(-1, size // local)
        )
        yield from _trees(topology, rails, 1.0 / local / bus)


def _pat_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """PAT: in round d of log2 n, rank i exchanges with i + 2^d what both have gathered so far, S/n min(2^d, n
    - 2^d) bytes (Bruck's pattern, NCCL 2.23 release notes).
    """
    size = members.shape[1]
    distance = 1
    while distance < size:
        amount = min(distance, size - distance) / (size - 1)
        yield RouteTraffic(members.ravel(), np.roll(members, -distance, axis=1).ravel(), amount)
        distance *= 2


def _all_to_all_traffic(
    topology: Topology, members: Ints, *, by_rail: bool = False, split_sizes: SplitSizes | None = None
) -> Iterator[RouteTraffic]:
    """S/n from every rank to every other: 1/(n-1) of a bus byte per pair.

    With `by_rail`, bytes that leave a node first go over NVLink to the GPU on the target's rail (PXN).
    `split_sizes` is the table of an all-to-all of unequal parts, in which the member that sends most sends
    one bus byte. NCCL has all-to-alls as grouped sends and receives (ncclSend, ncclRecv), so that every
    pair's bytes are on the pair's route.
    """
    size = members.shape[1]
    if size > _MAX_PAIRS:
        raise NotSimulatedError(
            f"all_to_all among {size} ranks is not simulated; the maximum is {_MAX_PAIRS} (two hops, as "
            "ZeRO++ does, need smaller groups)"
        )
    local = local_ranks(topology, members)
    sources = members.ravel()
    order = domain_order(topology.domain_of(members[0]))
    position_of_member = np.argsort(order)  # of the members in this order
    table = None if split_sizes is None else np.array(split_sizes) / max(unequal_bus_bytes(split_sizes), 1)
    for offset in range(1, size):
        targets = np.roll(members, -offset, axis=1)
        target_index = (np.arange(size) + offset) % size
        proxies = members[
            :, order[position_of_member // local * local + position_of_member[target_index] % local]
        ].ravel()
        targets = targets.ravel()
        is_local = topology.domain_of(sources) == topology.domain_of(targets)
        far = ~is_local
        near_share: float | Floats = 1 / (size - 1)
        far_share = near_share
        if table is not None:
            shares = np.tile(table[np.arange(size), target_index], len(members))
            near_share, far_share = shares[is_local], shares[far]
        yield RouteTraffic(sources[is_local], targets[is_local], near_share)
        if by_rail:
            yield from crossings(topology, sources[far], proxies[far], targets[far], far_share)
        else:
            yield RouteTraffic(sources[far], targets[far], far_share)


def _forwarded_traffic(topology: Topology, members: Ints, times: float) -> Iterator[Traffic]:
    """An all-to-all whose bytes every GPU passes on to others of its domain, `times` as many, in the same
    kernels (DeepEP: csrc/kernels/internode.cu). Without a switch inside nodes they are left out."""
    yield from _all_to_all_traffic(topology, members)
    if topology.cluster.node_link.kind == "switch":
        for name in ("nvlink_out", "nvlink_in"):
            yield LinkTraffic(name, members.ravel(), times)


def _binomial_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """gloo's broadcast: in every round, each rank that has the tensor sends it to one that does not.

    The root sends in every round, so the load of its links is that of all rounds.
    """
    size = members.shape[1]
    distance = 1
    while distance < size:
        senders = np.arange(min(distance, size - distance))
        yield RouteTraffic(members[:, senders].ravel(), members[:, senders + distance].ravel(), 1.0)
        distance *= 2


def _pair_traffic(topology: Topology, members: Ints) -> Iterator[RouteTraffic]:
    """The first rank of a group sends to the last."""
    yield RouteTraffic(members[:, 0], members[:, -1], 1.0)


def sent_by_gpu(topology: Topology, links: Ints, weights: Floats) -> tuple[float, float]:
    """Mean bytes that one GPU sends when `links` carry `weights`: inside its NVLink domain, and through the
    network cards. Without NVLink, all bytes pass PCIe, and those of the network cards are subtracted."""

    def total(name: str) -> float:
        first, count = topology.classes[name].first, topology.classes[name].count
        return float(weights[(links >= first) & (links < first + count)].sum())

    between = total("nic_out")
    kind = topology.cluster.node_link.kind
    if kind == "none":
        inside = total("pcie_up") - between
    else:
        inside = total("nvlink_out" if kind == "switch" else "nvlink_direct")
    return inside / topology.world_size, between / topology.world_size


SHAPES: Mapping[str, Callable[[Topology, Ints], Iterator[Traffic]]] = {
    "ring": ring_traffic,
    "hierarchical": hierarchical_traffic,
    "tree": _tree_traffic,
    "nvls": _nvls_traffic,
    "pat": _pat_traffic,
    "all_to_all": _all_to_all_traffic,
    "all_to_all_by_rail": lambda topology, members: _all_to_all_traffic(topology, members, by_rail=True),
    "binomial": _binomial_traffic,
    "pair": _pair_traffic,
}


def shape_traffic(shape: Shape, topology: Topology, members: Ints) -> Iterator[Traffic]:
    """The traffic of every group (a row of slots) while each of its ranks sends one bus byte."""
    if isinstance(shape, ForwardedShape):
        return _forwarded_traffic(topology, members, shape.times)
    if isinstance(shape, UnequalShape):
        by_rail = shape.name == "all_to_all_by_rail"
        return _all_to_all_traffic(topology, members, by_rail=by_rail, split_sizes=shape.split_sizes)
    return SHAPES[shape](topology, members)


def link_usage(shape: Shape, topology: Topology, members: Ints) -> Floats:
    """Bytes per link while every rank of every group (a row of slots) sends one bus byte."""
    return bytes_by_link(topology, shape_traffic(shape, topology, members))
