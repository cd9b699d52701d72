"""Groups with unequal numbers of GPUs per domain: what trees put on links, and that they are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from zsim.fabric.algorithms.link_usage import link_usage
from zsim.fabric.fabric import idle_fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology


def on(*counts: int) -> Topology:
    """Nodes of 8 GPUs of which a job has so many."""
    slots = np.concatenate([8 * node + np.arange(count) for node, count in enumerate(counts)])
    return Topology(load_cluster("dgx-h100"), len(counts), 8, slots)


def test_trees_of_four_and_two_gpus_have_two_channels_by_hand() -> None:
    """6 ranks: 6 / (2 x 5) bytes of both trees on an edge per bus byte, 0.3 on each of two channels. Chains
    of 3 and 1 edges, there and back: (3 + 1) x 2 x 0.3 x 2 = 4.8 over NVLink; 0.3 between the nodes."""
    topology = on(4, 2)
    usage = link_usage("tree", topology, topology.slots[None, :6])
    sums = {
        name: float(usage[links.first : links.first + links.count].sum())
        for name, links in topology.classes.items()
    }
    assert sums["nvlink_out"] == sums["nvlink_in"] == pytest.approx(4.8)
    assert sums["nic_out"] == sums["nic_in"] == pytest.approx(2 * 2 * 0.3)


def test_even_domains_get_what_they_got_as_equal_chains() -> None:
    """2 x 8: every card carries n / (2 (n-1)) of a bus byte each way, on one eighth of the channels each."""
    topology = on(8, 8)
    usage = link_usage("tree", topology, topology.slots[None, :16])
    cards = topology.classes["nic_out"]
    assert usage[cards.first : cards.first + cards.count] == pytest.approx(16 / 30 / 8)


def test_an_all_reduce_over_uneven_nodes_may_take_a_tree() -> None:
    """20 nodes, 64 KiB: a ring has hundreds of rounds. The longest chain counts: 2 x 7 rounds inside."""
    topology = on(*([8] * 19), 4)
    work = Collective("all_reduce", 2**16, "fp32", "world")
    fabric = idle_fabric(topology, Group.regular("world", topology.world_size), [work])
    assert fabric.transfer(work, 0).algorithm == "tree"
    trees = [m for m in fabric.communicator("world").methods["all_reduce"] if m.algorithm == "tree"]
    assert {method.rounds.intra for method in trees} == {14}
