"""Contention where it belongs: spines that are shared, rails that are not, replicas off InfiniBand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy

import zsim
from zsim.fabric.algorithms.rings import ring_usage
from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.topology import Topology


def topology_with(nodes: int, **network: Any) -> Topology:
    table = Network.model_validate({"source": "made up for a test", "evidence": "assumed", **network})
    return Topology(load_cluster("dgx-h100").model_copy(update={"network": table}), nodes, 8)


def finish_times(topology: Topology, jobs: list[int]) -> list[float]:
    """Seconds of one ring all-gather of 1 GiB in each of `jobs`: groups of every second node's GPUs."""
    env = simpy.Environment()
    # Ranks r and r + 16: one GPU of a node and of the node two further on.
    group = Group.regular("job", 32, 2, 16)
    work = Collective("all_gather", 2**30, "bf16", "job")
    fabric = Fabric(env, topology, {"job": group}, is_folded=False, collectives=[work])
    ends = dict.fromkeys(jobs, 0.0)
    for job in jobs:
        fabric.run(fabric.transfer(work, job), lambda job=job: ends.update({job: env.now}))  # type: ignore[misc]
    env.run()
    return list(ends.values())


def test_jobs_on_an_oversubscribed_spine_slow_each_other_by_the_fair_share() -> None:
    """4 nodes, two per leaf, one uplink of 50 GB/s for 16 cards. A job of two GPUs on different leaves alone
    has its card's 47.5 GB/s; two such jobs have 25 GB/s each: 1.9 times as long, latency aside."""
    topology = topology_with(4, kind="fat-tree", nodes_per_leaf=2, oversubscription=16.0)
    [alone] = finish_times(topology, [0])
    both = finish_times(topology, [0, 1])
    sent = 2**30 / 2
    assert both == pytest.approx([both[0]] * 2)
    assert both[0] - alone == pytest.approx(sent / 25e9 - sent / 47.5e9, rel=1e-6)


def test_jobs_on_a_full_spine_do_not_notice_each_other() -> None:
    topology = topology_with(4, kind="fat-tree", nodes_per_leaf=2)
    [alone] = finish_times(topology, [0])
    assert finish_times(topology, [0, 1, 2, 3]) == pytest.approx([alone] * 4)


def test_a_rail_optimised_fabric_carries_a_ring_without_its_spine() -> None:
    """16 nodes of one unit: rails end at their leaves. On leaves of all cards of 4 nodes, 4 of 16 crossings
    leave a leaf: on each of its 32 uplinks 8 cards x 1/8 of a byte / 32."""
    rails = topology_with(16, kind="rail-optimized", nodes_per_leaf=16)
    tree = topology_with(16, kind="fat-tree", nodes_per_leaf=4)
    for topology, expected in ((rails, 0.0), (tree, 1 / 32)):
        usage = ring_usage(topology, np.arange(128)[None])
        up = topology.classes["leaf_up"]
        assert usage[up.first : up.first + up.count].max() == pytest.approx(expected)
        own = topology.classes["nic_out"]
        np.testing.assert_allclose(usage[own.first : own.first + own.count], 1 / 8)


@pytest.mark.parametrize(("nodes", "has_crossed"), [(16, False), (128, True)])
def test_replicas_beat_full_sharding_beyond_the_crossing(nodes: int, has_crossed: bool) -> None:
    """llama-3-8b, 2,048 tokens, DGX SuperPOD H100. A ring over all ranks has a round per rank: its
    all-gathers hide under compute up to 512 GPUs, at 1,024 they do not. Replicas of one node gather over
    NVLink and add an all-reduce by trees, whose rounds grow with log2 of the nodes: dearer at first, cheaper
    past the crossing."""
    full, replicas = (
        zsim.simulate(
            zsim.Experiment(
                model="llama-3-8b",
                cluster="dgx-superpod-h100",
                nodes=nodes,
                training={"sequence_length": 2048},
                strategy={"kind": "fsdp2", "replicate": replicate},
            )
        ).report.step_seconds
        for replicate in (1, nodes)
    )
    assert (replicas < full) is has_crossed
