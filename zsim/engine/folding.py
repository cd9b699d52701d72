"""The simulated ranks of a job: one representative of every class of equal ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.engine.prepare import StepRequest
from zsim.fabric.folding.classes import (
    JobPlacement,
    RankClasses,
    isolate_representatives,
    refine_classes,
    single_class,
    singleton_classes,
)
from zsim.fabric.messages import communicators_of, fabric_collectives
from zsim.plan.ops import Collective, Plan
from zsim.specs.topology.topology import Topology

_MAX_CLASSES = 512
_APPROXIMATION_NOTE = (
    "groups are at unequal places of the network; those with the same members' work are taken to be as slow "
    "as the slowest"
)


def find_classes(request: StepRequest, *, unfold: bool) -> tuple[RankClasses, tuple[str, ...]]:
    """The classes of a job's ranks and groups, and notes on their approximations.

    Of a request `is_for_network`, groups whose members do the same count as one class even if their links
    differ, and this class is as slow as the slowest of them. The same approximation is made if links make
    more than `_MAX_CLASSES` classes.
    """
    topology, plan, slowdowns = request.topology, request.plan, request.slowdowns
    if unfold:
        return singleton_classes(topology, communicators_of(plan)), ()
    if bool((slowdowns == slowdowns[0]).all()) and _all_ranks_are_equal(plan):
        return single_class(topology, plan.groups), ()
    placement = place_job(request)
    if not request.is_for_network:
        classes = refine_classes([placement])[0]
        if len(classes.sizes) <= _MAX_CLASSES:
            return classes, ()
    return refine_classes([placement], by_links=False)[0], (_APPROXIMATION_NOTE,)


def isolate_first_ranks(request: StepRequest, classes: RankClasses) -> RankClasses:
    """The classes with the first rank of each in a separate class. With messages, the ranks that it sends to
    and receives from are in separate classes too.
    """
    isolated_classes = isolate_representatives(classes)
    if not request.plan.has_messages:
        return isolated_classes
    placement = place_job(request)
    return refine_classes([replace(placement, kinds=isolated_classes.class_of_rank)])[0]


def _all_ranks_are_equal(plan: Plan) -> bool:
    """Whether all ranks do the same and communicate only all at once, so that their position distinguishes
    none.

    They have one program, without messages, all-to-alls of unequal parts or use of the hosts.
    """
    if len(plan.programs) > 1 or plan.has_messages or plan.has_offload:
        return False
    if any(len(group.members) > 1 for group in plan.groups.values() if group.size > 1):
        return False
    return not any(
        isinstance(work, Collective) and work.split_sizes is not None for work in plan.unique_work()
    )


def _socket_traits(topology: Topology) -> tuple[Ints, Ints]:
    """Per rank, the number of ranks on its socket, and whether its host memory is on another socket (0 or
    1)."""
    sockets = topology.socket_of(topology.slots)
    cluster = topology.cluster
    is_far = (sockets % cluster.host.sockets > 0) & (cluster.offload.placement == "first")
    return np.bincount(sockets)[sockets], is_far.astype(np.int64)


def find_concurrent_classes(
    requests: Sequence[StepRequest], *, unfold: bool
) -> tuple[list[RankClasses], tuple[str, ...]]:
    """The classes of co-located jobs, and notes on their approximations."""
    if unfold:
        singletons = [
            singleton_classes(request.topology, communicators_of(request.plan)) for request in requests
        ]
        return singletons, ()
    placements = [place_job(request) for request in requests]
    classes_of_jobs = refine_classes(placements)
    if sum(len(classes.sizes) for classes in classes_of_jobs) <= _MAX_CLASSES:
        return classes_of_jobs, ()
    return refine_classes(placements, by_links=False), (_APPROXIMATION_NOTE,)


def place_job(request: StepRequest) -> JobPlacement:
    """A job as the input of `refine_classes`."""
    topology, plan = request.topology, request.plan
    collectives = [work for program in plan.programs for work in fabric_collectives(program, plan.groups)]
    shares_nodes = plan.has_offload
    traits: list[Floats | Ints] = [request.slowdowns, plan.program_of]
    if shares_nodes:
        traits += _node_traits(topology)
    kinds = np.unique(np.stack(traits), axis=1, return_inverse=True)[1]
    return JobPlacement(topology, communicators_of(plan), collectives, kinds.ravel(), shares_nodes)


def _node_traits(topology: Topology) -> Sequence[Floats | Ints]:
    """Traits that distinguish ranks which use host memory: the numbers of ranks on their node and socket,
    where their memory is, the capacities of their PCIe and C2C links and uplinks."""
    nodes = topology.node_of(topology.slots)
    capacities = topology.capacities()
    ranks_per_node = np.bincount(nodes)[nodes]
    switches = topology.switch_of(topology.slots)
    link_capacities = [
        capacities[topology.classes[name].first + topology.slots]
        for name in ("pcie_up", "pcie_down", "c2c_up", "c2c_down")
        if name in topology.classes
    ]
    uplinks = [capacities[topology.classes[name].first + switches] for name in ("uplink_up", "uplink_down")]
    return [ranks_per_node, *_socket_traits(topology), *link_capacities, *uplinks]


def node_ranks(topology: Topology, classes: RankClasses) -> dict[int, dict[int, int]]:
    """Per simulated rank, {representative: number of ranks of the node that it represents}."""
    nodes = topology.node_of(topology.slots)
    first = np.array(classes.representatives)
    representative_of_rank = first[classes.class_of_rank]
    counts_of_rank = {}
    for rank in classes.representatives:
        representatives, counts = np.unique(representative_of_rank[nodes == nodes[rank]], return_counts=True)
        counts_of_rank[rank] = dict(zip(representatives.tolist(), counts.tolist(), strict=True))
    return counts_of_rank
