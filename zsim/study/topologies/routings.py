"""The effect of routing on an experiment: flows spread evenly over all paths, or hashed onto single paths.

Where several paths lead from card to card, adaptive routing and packet spraying share them out (ideal). A
switch that hashes headers (ECMP) puts every flow of a pair on one path, so that some links carry two flows
and others none. How bad it is depends on the draw: NUM_DRAWS seeds are drawn, and for each the plan's
collectives are timed one after the other on idle links, all groups of a kind at the pace of the slowest. The
step is simulated at the median seed and at the seed of the 95th percentile.

# [Note: why rings hide oversubscription]
Consecutive ranks of a ring are under the same leaf switch, so only one in `nodes_per_leaf` of its hops
between nodes crosses a spine, and each card's bytes cross an uplink equally rarely. The lower uplink
bandwidth is offset by the lower uplink traffic, up to an oversubscription of as many to one as there are
nodes under a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from zsim.arrays import Ints
from zsim.engine.simulate import simulate_job
from zsim.fabric.algorithms.rings import ring_usage
from zsim.fabric.fabric import idle_seconds
from zsim.fabric.messages import communicators_of, fabric_collectives
from zsim.plan.make import make_plan
from zsim.plan.ops import Group, Plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.topology.topology import Topology
from zsim.specs.topology.trees import Tree

NUM_DRAWS = 20


@dataclass(frozen=True, slots=True)
class UplinkUse:
    """Uplink use of the widest group's rings under ideal routing."""

    hops: int
    """The hops between nodes."""
    leaving: int
    """The hops that leave a leaf switch."""
    fraction: float
    """The time of the busiest links between switches over the time of the network cards."""
    oversubscription: float
    """The bandwidth below these links over their own."""


@dataclass(frozen=True)
class Routing:
    """A step under ideal and under hashed routing."""

    configured: str
    """The routing in the cluster file."""
    num_paths: int
    """The number of paths between two cards, or 0 where it depends on the pair (a list of links)."""
    flows_per_pair: int
    ideal_seconds: float
    hashed_seconds: float
    hashed_p95_seconds: float
    collective_seconds: tuple[float, float, float]
    """All collectives of a step one after the other on idle links: ideal, hashed at the median, hashed at the
    95th percentile. All three are equal without a choice of paths.
    """
    uplinks: UplinkUse

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Hashed over ideal time of the collectives, at the median and at the 95th percentile."""
        ideal, median, high = self.collective_seconds
        return (median / ideal, high / ideal) if ideal else (1.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        median, high = self.slowdowns
        return {
            "given": self.configured,
            "num_paths": self.num_paths,
            "flows_per_pair": self.flows_per_pair,
            "draws": NUM_DRAWS,
            "ideal_step_seconds": self.ideal_seconds,
            "hashed_step_seconds": {"p50": self.hashed_seconds, "p95": self.hashed_p95_seconds},
            "hashed_collectives_slowdown": {"p50": median, "p95": high},
            "oversubscription": self.uplinks.oversubscription,
            "ring_hops": self.uplinks.hops,
            "ring_hops_leaving_a_leaf": self.uplinks.leaving,
            "uplinks_over_cards": self.uplinks.fraction,
        }


def compare_routings(job: Job, step_seconds: float) -> Routing:
    """The job's step under both routings. `step_seconds` is its time with the routing in the cluster file."""
    plan, network = make_plan(job), job.cluster.network
    configured_cluster, even = job.cluster, set_routing(job.cluster)
    topology = job_topology(replace(job, cluster=even))
    uplinks = uplink_use(topology, plan.groups)
    flows = flows_per_pair(configured_cluster)
    num_paths: int = getattr(topology.wiring, "num_paths", 0)
    ideal = collective_seconds(topology, plan)
    if not can_hash(configured_cluster) or num_paths == 1 or not uplinks.fraction:
        equal_steps = step_seconds, step_seconds, step_seconds
        return Routing(network.routing, 1, flows, *equal_steps, (ideal, ideal, ideal), uplinks)
    draws = [set_routing(configured_cluster, seed) for seed in range(NUM_DRAWS)]
    hashed_seconds = [collective_seconds(job_topology(replace(job, cluster=draw)), plan) for draw in draws]
    order = np.argsort(hashed_seconds, kind="stable").tolist()
    median, high = order[(NUM_DRAWS - 1) // 2], order[ceil(0.95 * NUM_DRAWS) - 1]
    ideal_step, median_step, high_step = (
        _network_step(job, cluster) for cluster in (even, draws[median], draws[high])
    )
    # The allocator and the exact classes add the same time to the step under every routing.
    extra_seconds = step_seconds - (
        _network_step(job, configured_cluster) if network.routing == "hash" else ideal_step
    )
    return Routing(
        network.routing,
        num_paths,
        flows,
        ideal_step + extra_seconds,
        median_step + extra_seconds,
        high_step + extra_seconds,
        (ideal, hashed_seconds[median], hashed_seconds[high]),
        uplinks,
    )


def _network_step(job: Job, cluster: Cluster) -> float:
    return simulate_job(replace(job, cluster=cluster), is_for_network=True).trace.step_seconds


def can_hash(cluster: Cluster) -> bool:
    """Whether this kind of network has several paths among which a switch could hash."""
    return cluster.network.kind in ("fat-tree", "rail-optimized", "dragonfly", "links")


def flows_per_pair(cluster: Cluster) -> int:
    """Flows between two cards: the cluster file's number if it hashes, else one per NCCL channel of a card.
    Each channel has one queue pair, since NCCL_IB_QPS_PER_CONNECTION is 1.
    """
    if cluster.network.routing == "hash":
        return cluster.network.flows_per_pair
    return max(round(cluster.collectives.channels / cluster.nic.per_node), 1)


def set_routing(cluster: Cluster, hash_seed: int | None = None) -> Cluster:
    """The cluster with flows spread evenly, or hashed with `hash_seed`."""
    changes: dict[str, Any] = {"routing": "even-split", "flows_per_pair": 1, "hash_seed": 0}
    if hash_seed is not None:
        changes = {"routing": "hash", "flows_per_pair": flows_per_pair(cluster), "hash_seed": hash_seed}
    return cluster.model_copy(update={"network": cluster.network.model_copy(update=changes)})


def collective_seconds(topology: Topology, plan: Plan) -> float:
    """Seconds of all collectives of a step, one after the other on idle links, on the rank where they take
    longest."""
    groups = communicators_of(plan)
    return max(
        idle_seconds(topology, groups, fabric_collectives(program, plan.groups)) for program in plan.programs
    )


def uplink_use(topology: Topology, groups: Mapping[str, Group]) -> UplinkUse:
    """The uplink use of the group on the most nodes. See [Note: why rings hide oversubscription]."""
    widest: tuple[int, Ints] = (1, np.zeros((0, 0), dtype=np.int64))
    for group in groups.values():
        if group.size > 1:
            members = topology.slots[group.members]
            domains = len(np.unique(topology.domain_of(members[0])))
            widest = max(widest, (domains, members), key=lambda entry: entry[0])
    hops, members = widest
    if hops == 1:
        return UplinkUse(0, 0, 0.0, 1.0)
    seconds = ring_usage(topology, members) / topology.capacities()
    class_seconds = {
        name: float(seconds[link_class.first : link_class.first + link_class.count].max(initial=0.0))
        for name, link_class in topology.classes.items()
    }
    switch_seconds = {links.name: class_seconds[links.name] for links in topology.wiring.links()}
    busiest = max(switch_seconds, key=lambda name: switch_seconds[name], default="")
    fraction = switch_seconds.get(busiest, 0.0) / max(class_seconds["nic_out"], class_seconds["nic_in"])
    slots = members[0]
    firsts = slots[np.flatnonzero(np.diff(topology.domain_of(slots), prepend=-1))]
    leaving = hops if fraction else 0
    network = topology.cluster.network
    ratio = network.oversubscription
    if isinstance(topology.wiring, Tree):
        leaves = topology.wiring.leaf_of(topology.nic_of(firsts))
        leaving = int((leaves != np.roll(leaves, -1)).sum())
        ratio *= network.spine_oversubscription if busiest.startswith("core") else 1.0
    return UplinkUse(hops, leaving, fraction, ratio)


def explain_routing(routing: Routing) -> str:
    """A sentence on why the two routings differ as they do, and on the cost of oversubscription."""
    use = routing.uplinks
    ratio = use.oversubscription
    if not use.hops:
        return "every group stays inside a node: no link between switches is used"
    if not use.fraction:
        return (
            f"none of a ring's {use.hops} hops between nodes leaves its switch: neither routing nor "
            "oversubscription counts"
        )
    text = f"of a ring's {use.hops} hops between nodes {use.leaving} leave a leaf switch"
    text += ", neighbours being under one" if use.leaving < use.hops else ""
    text += f"; routed ideally, uplinks take {use.fraction:.2g} times as long as network cards"
    if use.fraction <= 1:
        text += f", so rings hide oversubscription up to {ratio / use.fraction:.3g}:1 (here {ratio:g}:1)"
    else:
        text += f", so {ratio:g}:1 is more than rings hide"
    if routing.num_paths == 1:
        return f"{text}; there is one path, and nothing to hash"
    median, high = routing.slowdowns
    flows = f"{routing.flows_per_pair} flow{'s' if routing.flows_per_pair > 1 else ''}"
    paths = f"{routing.num_paths} paths" if routing.num_paths else "one of the shortest paths each"
    return (
        f"{text}; hashed, the {flows} of a pair of cards fall on {paths}, and collectives take {median:.2f} "
        f"times as long ({high:.2f} in one draw of twenty)"
    )
