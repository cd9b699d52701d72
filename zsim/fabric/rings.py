"""Which links a collective uses, and how much of each.

One entry of `usage` is the bytes a link carries while every ring edge carries one byte. NCCL runs one ring
per channel, each leaving the node through another GPU's card, so that all cards share the load; with g
local ranks there are g rotations, each with 1/g of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zsim.specs.topology import Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def ring_usage(topology: Topology, groups: Sequence[range]) -> Floats:
    """Per link, bytes carried when each of `groups` (all of the same shape) runs its rings at one byte per
    edge, all groups at once."""
    usage = np.zeros(topology.num_links)
    if len(groups[0]) <= 1:
        return usage
    members = np.array([list(group) for group in groups], dtype=np.int64)
    local = _local_ranks(topology, members)
    for rotation in range(local):
        order = _rotate(members, local, rotation)
        topology.add_routes(usage, order.ravel(), np.roll(order, -1, axis=1).ravel(), 1.0 / local)
    return usage


def hierarchical_usage(topology: Topology, groups: Sequence[range], kind: str) -> Floats:
    """The same, relative to the flat ring's edge bytes, for a ring across nodes among equal local ranks and
    a ring inside each node, pipelined: with g local ranks on k nodes, an edge across carries
    S/g (k-1)/k and an edge inside S (g-1)/g, against S (n-1)/n on the flat ring (both doubled for an
    all-reduce)."""
    members = np.array([list(group) for group in groups], dtype=np.int64)
    size = members.shape[1]
    local = _local_ranks(topology, members)
    nodes = size // local
    flat = (size - 1) / size
    by_node = members.reshape(len(members) * nodes, local)
    across = members.reshape(len(members), nodes, local).transpose(0, 2, 1).reshape(-1, nodes)
    usage = np.zeros(topology.num_links)
    for order, edge in ((by_node, (local - 1) / local), (across, (nodes - 1) / nodes / local)):
        if order.shape[1] > 1:
            for rotation in range(order.shape[1]):
                rotated = np.roll(order, -rotation, axis=1)
                topology.add_routes(
                    usage,
                    rotated.ravel(),
                    np.roll(rotated, -1, axis=1).ravel(),
                    edge / flat / order.shape[1],
                )
    return usage


def num_nodes_of(topology: Topology, group: range) -> int:
    """Nodes that the ranks of a group are on."""
    return len(np.unique(topology.node_of(np.array(group, dtype=np.int64))))


def _local_ranks(topology: Topology, members: Ints) -> int:
    """Ranks per node of the first group, or 1 when its nodes hold unequal numbers."""
    counts = np.unique(topology.node_of(members[0]), return_counts=True)[1]
    return int(counts[0]) if (counts == counts[0]).all() else 1


def _rotate(members: Ints, local: int, rotation: int) -> Ints:
    """Every node's ranks shifted by `rotation`: channel c enters each node at its c-th rank."""
    count, size = members.shape
    return np.roll(members.reshape(count, size // local, local), -rotation, axis=2).reshape(count, size)
