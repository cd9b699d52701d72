"""Whether the groups of a kind are at equivalent places of the fabric, so that one can represent all.

Groups are alike when a symmetry of the fabric maps one to the other: the same pattern of NVLink domains, leaf
switches and pods, on a tree whose leaves and pods are all full and whose flows are spread evenly. On other
fabrics (hashed paths, tori, dragonflies, lists of links) the links of the groups are compared one by one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.fabric.algorithms.rings import first_places, ring_usage
from zsim.plan.ops import Group
from zsim.specs.topology.topology import Topology
from zsim.specs.topology.trees import SingleSwitch, Tree

_MAX_COMPARED = 30_000_000  # groups times links


def are_alike(topology: Topology, groups: Mapping[str, Group]) -> bool:
    """Whether, for every kind of group, all groups of the kind are at equivalent places."""
    return all(
        _is_symmetric(topology, topology.slots[group.members]) for group in groups.values() if group.size > 1
    )


def by_pattern(topology: Topology, members: Ints) -> list[Ints]:
    """The groups (rows of slots), partitioned by the places at which they go from domain to domain, and by
    the domains to which they come back."""
    domains = topology.domain_of(members)
    changes = np.diff(domains, axis=1) != 0
    returns = changes.sum(axis=1) > (np.diff(np.sort(domains, axis=1), axis=1) != 0).sum(axis=1)
    if len(members) == 1 or ((changes == changes[0]).all() and not returns.any()):
        return [members]
    found: dict[bytes, list[int]] = {}
    for number, row in enumerate(changes):
        key = first_places(domains[number]) if returns[number] else row
        found.setdefault(key.tobytes(), []).append(number)
    return [members[numbers] for numbers in found.values()]


def _is_symmetric(topology: Topology, members: Ints) -> bool:
    if len(members) == 1:
        return True
    if not _is_shifted(topology.domain_of(members)):
        return False
    if not _are_alike_inside(topology, members):
        return _same_links(topology, members)
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
    return _same_links(topology, members)


def _are_alike_inside(topology: Topology, members: Ints) -> bool:
    """Whether groups are at equal places of their nodes, or at places that nothing in the nodes tells apart:
    as many GPUs at every card and PCIe switch, and where bytes cross switches the same of them."""
    places = members % topology.gpus_per_node
    if (places == places[0]).all():
        return True
    slots = np.arange(topology.gpus_per_node)
    for shared in (topology.own_card_of(slots), topology.switch_of(slots)):
        counts = np.unique(shared, return_counts=True)[1]
        if (counts != counts[0]).any():
            return False
    if topology.copies_twice:
        under = topology.is_under_card(members)
        if (under != under[0]).any():
            return False
    return topology.cluster.node_link.kind != "none" or _is_shifted(topology.switch_of(members))


def _is_shifted(places: Ints) -> bool:
    """Whether all rows are the first one plus a constant."""
    relative = places - places[:, :1]
    return bool((relative == relative[0]).all())


def _same_links(topology: Topology, members: Ints) -> bool:
    """Whether the links of every group's ring have the same capacities, bytes of the group and bytes of all
    groups."""
    if len(members) * topology.num_links > _MAX_COMPARED:
        return False
    capacities, total = topology.capacities(), ring_usage(topology, members)
    first: Floats | None = None
    for row in range(len(members)):
        own = ring_usage(topology, members[[row]])
        used = np.flatnonzero(own)
        rows = np.stack([capacities[used], own[used], total[used]])
        rows = rows[:, np.lexsort(np.round(rows, 9))]
        if first is None:
            first = rows
        elif rows.shape != first.shape or not np.allclose(rows, first, rtol=1e-12):
            return False
    return True
