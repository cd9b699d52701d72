"""Whether the groups of a kind are at equal places of the fabric, so that one can stand for all.

Groups are alike when a symmetry of the fabric maps one on the other: the same pattern of NVLink domains, leaf
switches and pods, on a tree whose leaves and pods are all full and whose flows are spread evenly. On other
fabrics (hashed paths, tori, dragonflies, lists of links) their links are compared one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.fabric.algorithms.rings import members_of, ring_usage
from zsim.plan.ops import Group
from zsim.specs.topology.topology import Topology
from zsim.specs.topology.trees import SingleSwitch, Tree

_MOST_COMPARED = 30_000_000  # groups times links


def are_alike(topology: Topology, groups: Mapping[str, Group]) -> bool:
    """Whether, for every kind of group, all groups of the kind are at equal places."""
    return all(
        _is_symmetric(topology, groups_of(topology.world_size, group))
        for group in groups.values()
        if group.size > 1
    )


def groups_of(world_size: int, group: Group) -> list[range]:
    """All groups of a kind, in the order of their first ranks."""
    starts = range(0, world_size, group.size * group.stride)
    return [group.ranks_of(start + offset) for start in starts for offset in range(group.stride)]


def by_pattern(topology: Topology, groups: Sequence[range]) -> list[list[range]]:
    """Groups that change from domain to domain at the same places, together."""
    changes = np.diff(topology.domain_of(members_of(topology, groups)), axis=1) != 0
    if len(groups) == 1 or (changes == changes[0]).all():
        return [list(groups)]
    found: dict[bytes, list[range]] = {}
    for group, row in zip(groups, changes, strict=True):
        found.setdefault(row.tobytes(), []).append(group)
    return list(found.values())


def _is_symmetric(topology: Topology, groups: list[range]) -> bool:
    if len(groups) == 1:
        return True
    members = members_of(topology, groups)
    if not _is_shifted(topology.domain_of(members)):
        return False
    wiring, network = topology.wiring, topology.cluster.network
    if isinstance(wiring, SingleSwitch):
        return True
    if isinstance(wiring, Tree) and network.routing == "even-split":
        is_full = topology.num_nodes % network.nodes_per_leaf == 0
        leaves = wiring.leaf_of(topology.nic_of(members))
        if wiring.has_core:
            is_full &= wiring.num_leaves % wiring.leaves_per_pod == 0
            if not _is_shifted(leaves // wiring.leaves_per_pod):
                return False
        return (is_full or wiring.num_leaves == wiring.rails) and _is_shifted(leaves)
    return _same_links(topology, groups)


def _is_shifted(places: Ints) -> bool:
    """Whether all rows are the first one plus a constant."""
    relative = places - places[:, :1]
    return bool((relative == relative[0]).all())


def _same_links(topology: Topology, groups: list[range]) -> bool:
    """Whether every group's ring finds the same capacities, own bytes and total bytes on its links."""
    if len(groups) * topology.num_links > _MOST_COMPARED:
        return False
    capacities, total = topology.capacities(), ring_usage(topology, groups)
    first: Floats | None = None
    for group in groups:
        own = ring_usage(topology, [group])
        used = np.flatnonzero(own)
        rows = np.stack([capacities[used], own[used], total[used]])
        rows = rows[:, np.lexsort(np.round(rows, 9))]
        if first is None:
            first = rows
        elif rows.shape != first.shape or not np.allclose(rows, first, rtol=1e-12):
            return False
    return True
