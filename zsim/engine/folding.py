"""The simulated ranks of a job: one representative of every class of equal ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.fabric.folding.classes import (
    Classes,
    JobPlacement,
    each_by_itself,
    first_apart,
    one_class,
    stable_classes,
)
from zsim.fabric.messages import communicators_of, fabric_works
from zsim.plan.ops import Collective, Plan
from zsim.specs.topology.topology import Topology

_MAX_CLASSES = 512
_ROUGHLY = (
    "groups are at unequal places of the network; those with the same members' work are taken to be as slow "
    "as the slowest"
)


def find_classes(
    topology: Topology,
    plan: Plan,
    slowdowns: Floats,
    *,
    unfold: bool,
    by_links: bool = True,
) -> tuple[Classes, tuple[str, ...]]:
    """The classes of a job's ranks and groups, and notes on their approximations.

    `slowdowns` holds, per rank, the factor on kernels' seconds. Where `by_links` is False, groups whose
    members do the same count as one class even if their links differ, and this class is as slow as the
    slowest of them. The same approximation is made if links make more than `_MAX_CLASSES` classes.
    """
    if unfold:
        return each_by_itself(topology, communicators_of(plan)), ()
    if bool((slowdowns == slowdowns[0]).all()) and _all_meet(plan):
        return one_class(topology, plan.groups), ()
    placed = place_job(topology, plan, slowdowns)
    if by_links:
        classes = stable_classes([placed])[0]
        if len(classes.sizes) <= _MAX_CLASSES:
            return classes, ()
    return stable_classes([placed], by_links=False)[0], (_ROUGHLY,)


def with_firsts_apart(topology: Topology, plan: Plan, slowdowns: Floats, classes: Classes) -> Classes:
    """The classes with the first rank of each in a separate class. With messages, the ranks that it sends to
    and receives from are in separate classes too.
    """
    apart = first_apart(classes)
    if not plan.has_messages:
        return apart
    placed = place_job(topology, plan, slowdowns)
    return stable_classes([replace(placed, kinds=apart.of_rank)])[0]


def _all_meet(plan: Plan) -> bool:
    """Whether all ranks do the same and communicate only all at once, so that their position distinguishes
    none.

    They have one program, without messages, all-to-alls of unequal parts or use of the hosts.
    """
    if len(plan.programs) > 1 or plan.has_messages or plan.has_offload:
        return False
    if any(len(group.members) > 1 for group in plan.groups.values() if group.size > 1):
        return False
    return not any(isinstance(work, Collective) and work.parts is not None for work in plan.distinct_works())


def _socket_traits(topology: Topology) -> tuple[Ints, Ints]:
    """Per rank, the number of ranks on its socket, and whether its host memory is on another socket (0 or
    1)."""
    sockets = topology.socket_of(topology.slots)
    cluster = topology.cluster
    is_far = (sockets % cluster.host.sockets > 0) & (cluster.offload.placement == "first")
    return np.bincount(sockets)[sockets], is_far.astype(np.int64)


def find_classes_together(
    everyone: Sequence[tuple[Topology, Plan, Floats]], *, unfold: bool
) -> tuple[list[Classes], tuple[str, ...]]:
    """The classes of co-located jobs, each given by its topology, plan and slowdowns, and notes on their
    approximations."""
    if unfold:
        return [each_by_itself(topology, communicators_of(plan)) for topology, plan, _ in everyone], ()
    all_placed = [place_job(*one) for one in everyone]
    found = stable_classes(all_placed)
    if sum(len(classes.sizes) for classes in found) <= _MAX_CLASSES:
        return found, ()
    return stable_classes(all_placed, by_links=False), (_ROUGHLY,)


def place_job(topology: Topology, plan: Plan, slowdowns: Floats) -> JobPlacement:
    """A job as the input of `refine_classes`."""
    works = [work for program in plan.programs for work in fabric_works(program, plan.groups)]
    shares_nodes = plan.has_offload
    traits: list[Floats | Ints] = [slowdowns, plan.program_of]
    if shares_nodes:
        traits += _node_traits(topology)
    kinds = np.unique(np.stack(traits), axis=1, return_inverse=True)[1]
    return JobPlacement(topology, communicators_of(plan), works, kinds.ravel(), shares_nodes)


def _node_traits(topology: Topology) -> Sequence[Floats | Ints]:
    """Traits that distinguish ranks which use host memory: the numbers of ranks on their node and socket,
    where their memory is, the capacities of their PCIe links and uplinks."""
    nodes = topology.node_of(topology.slots)
    capacities = topology.capacities()
    beside = np.bincount(nodes)[nodes]
    switches = topology.switch_of(topology.slots)
    of_rank = [capacities[topology.classes[n].first + topology.slots] for n in ("pcie_up", "pcie_down")]
    uplinks = [capacities[topology.classes[n].first + switches] for n in ("uplink_up", "uplink_down")]
    return [beside, *_socket_traits(topology), *of_rank, *uplinks]


def node_ranks(topology: Topology, classes: Classes) -> dict[int, dict[int, int]]:
    """Per simulated rank, {representative: number of ranks of the node that it represents}."""
    nodes = topology.node_of(topology.slots)
    first = np.array(classes.representatives)
    stands_for = first[classes.of_rank]
    found = {}
    for rank in classes.representatives:
        beside, counts = np.unique(stands_for[nodes == nodes[rank]], return_counts=True)
        found[rank] = dict(zip(beside.tolist(), counts.tolist(), strict=True))
    return found
