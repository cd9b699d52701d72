"""Which links a ring uses, and how much of each.

One entry of a usage is the bytes a link carries while every rank sends one bus byte (one byte per ring
edge). NCCL runs one ring per channel, each leaving the node through another GPU's card, so that all cards
share the load; with g local ranks there are g rotations, each with 1/g of the bytes.

# [Note: rails]
A ring enters and leaves a node by cards of the same number (NCCL_CROSS_NIC=0, and 2 where that is as fast),
so that on rail-optimised fabrics it never crosses the spine. The node's last rank hands the bytes over
NVLink to the GPU whose card it is (PXN, NCCL 2.12 and later): every GPU then sends one whole byte over
NVLink per bus byte, and a large ring across nodes is as fast as NVLink allows or as all cards together,
whichever is less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zsim.specs.topology import Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_MOST_SAMPLED = 64


def ring_usage(topology: Topology, groups: Sequence[range]) -> Floats:
    """Per link, bytes carried when each of `groups` (all of the same shape) runs its rings at one byte per
    edge, all groups at once."""
    usage = np.zeros(topology.num_links)
    if len(groups[0]) <= 1:
        return usage
    members = members_of(groups)
    size = members.shape[1]
    starts, counts = _segments(topology, members)
    is_mesh = topology.cluster.node_link.kind == "mesh"
    if is_mesh and int(counts.min()) == int(counts.max()) > 1:
        # Direct links: as many rings as it takes to use all of them (RCCL does the same on xGMI).
        local = int(counts[0])
        inside = 1.0 if local == size else (local - 1) / local
        add_all_pairs(topology, usage, members.reshape(-1, local), inside / (local - 1))
    else:
        is_mesh = False
    spans = len(counts) > 1
    rotations = int(counts.min()) if spans else 1
    crosses = np.zeros(size, dtype=bool)
    crosses[starts + counts - 1] = spans
    for rotation in range(rotations):
        places = [
            start + (np.arange(count) + rotation * count // rotations) % count
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
        order = members[:, np.concatenate(places)]
        targets = np.roll(order, -1, axis=1)
        if not is_mesh:
            inside_edges = order[:, ~crosses].ravel(), targets[:, ~crosses].ravel()
            topology.add_routes(usage, *inside_edges, 1.0 / rotations)
        if spans:
            edges = order[:, crosses].ravel(), order[:, starts].ravel(), targets[:, crosses].ravel()
            add_crossings(topology, usage, *edges, 1.0 / rotations)
    return usage


def _segments(topology: Topology, members: Ints) -> tuple[Ints, Ints]:
    """Where each domain's ranks start in a group, and how many they are; one by one when groups differ."""
    changes = np.diff(topology.domain_of(members), axis=1) != 0
    size = members.shape[1]
    if not (changes == changes[0]).all():
        return np.arange(size), np.ones(size, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(changes[0]) + 1])
    return starts, np.diff(np.concatenate([starts, [size]]))


def add_crossings(
    topology: Topology, usage: Floats, sources: Ints, proxies: Ints, targets: Ints, amount: float
) -> None:
    """Bytes from domain to domain, by way of `proxies`, whose cards are on the targets' rails."""
    if not len(sources):
        return
    rails = topology.cluster.nic.per_node * topology.cluster.node_link.nodes_per_domain
    if topology.cluster.node_link.kind == "switch":
        changes = topology.nic_of(sources) % rails != topology.nic_of(targets) % rails
        changes &= (proxies != sources) & (topology.domain_of(sources) != topology.domain_of(targets))
        topology.add_routes(usage, sources[changes], proxies[changes], amount)
        sources = np.where(changes, proxies, sources)
    topology.add_routes(usage, sources, targets, amount)


def add_all_pairs(topology: Topology, usage: Floats, rows: Ints, amount: float) -> None:
    """`amount` from every rank of a row to every other rank of it."""
    for offset in range(1, rows.shape[1]):
        topology.add_routes(usage, rows.ravel(), np.roll(rows, -offset, axis=1).ravel(), amount)


def hierarchical_usage(topology: Topology, groups: Sequence[range], kind: str) -> Floats:
    """The same, relative to the flat ring's edge bytes, for a ring across nodes among equal local ranks and
    a ring inside each node, pipelined: with g local ranks on k nodes, an edge across carries
    S/g (k-1)/k and an edge inside S (g-1)/g, against S (n-1)/n on the flat ring (both doubled for an
    all-reduce)."""
    members = members_of(groups)
    size = members.shape[1]
    local = local_ranks(topology, members)
    nodes = size // local
    flat = (size - 1) / size
    by_node = members.reshape(len(members) * nodes, local)
    across = members.reshape(len(members), nodes, local).transpose(0, 2, 1).reshape(-1, nodes)
    usage = np.zeros(topology.num_links)
    for order, edge in ((by_node, (local - 1) / local), (across, (nodes - 1) / nodes / local)):
        if order.shape[1] > 1:
            topology.add_routes(usage, order.ravel(), np.roll(order, -1, axis=1).ravel(), edge / flat)
    return usage


def domains_of(topology: Topology, group: range) -> tuple[int, bool]:
    """NVLink domains (nodes) that the ranks of a group are on, and whether each has as many of them."""
    counts = np.unique(topology.domain_of(np.array(group, dtype=np.int64)), return_counts=True)[1]
    return len(counts), bool((counts == counts[0]).all())


def hop_seconds(topology: Topology, group: range) -> float:
    """What the switches after the first add to a round between domains: `hop_latency` for each on the
    longest of the group's (up to 64) crossings from domain to next domain, rail by rail."""
    latency = topology.cluster.network.hop_latency
    if not latency:
        return 0.0
    ranks = np.array(group, dtype=np.int64)
    heads = np.concatenate([[0], np.flatnonzero(np.diff(topology.domain_of(ranks))) + 1])
    targets = ranks[heads[1 : _MOST_SAMPLED + 1]]
    by_rail = topology.cluster.node_link.kind == "switch"
    sources = ranks[heads[:-1]][:_MOST_SAMPLED] if by_rail else ranks[heads[1:] - 1][:_MOST_SAMPLED]
    first = topology.classes["nic_out"].first
    switches = [
        sum(link >= first for link in topology.route(source, target)) - 1
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
    ]
    return latency * (max(switches, default=1) - 1)


def members_of(groups: Sequence[range]) -> Ints:
    """The groups' ranks, one row each."""
    starts = np.array([group.start for group in groups], dtype=np.int64)
    return starts[:, None] + np.arange(0, len(groups[0]), dtype=np.int64) * groups[0].step


def local_ranks(topology: Topology, members: Ints) -> int:
    """Ranks per domain of the first group, or 1 when its domains hold unequal numbers."""
    counts = np.unique(topology.domain_of(members[0]), return_counts=True)[1]
    return int(counts[0]) if (counts == counts[0]).all() else 1


def rotate(members: Ints, local: int, rotation: int) -> Ints:
    """Every node's ranks shifted by `rotation`: channel c enters each node at its c-th rank."""
    count, size = members.shape
    return np.roll(members.reshape(count, size // local, local), -rotation, axis=2).reshape(count, size)
