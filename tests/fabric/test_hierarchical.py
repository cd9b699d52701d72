"""A ring across nodes and a ring inside each: bytes on every link, to the edges of what a group can be."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from zsim.arrays import Floats
from zsim.cost.collectives.rounds import Rounds, hierarchical_rounds, ring_rounds
from zsim.fabric.algorithms.link_usage import link_usage
from zsim.fabric.algorithms.methods import methods
from zsim.fabric.algorithms.rings import extra_round_seconds
from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.topology import Topology

ORIGIN = {"source": "made up for a test", "evidence": "assumed"}


def topology_of(nodes: int, gpus: int = 8, cluster: str = "dgx-h100") -> Topology:
    return Topology(load_cluster(cluster), nodes, gpus)


def by_class(topology: Topology, usage: Floats, name: str) -> Floats:
    """The usage of the links of a class that carry anything."""
    links = topology.classes[name]
    found: Floats = usage[links.first : links.first + links.count]
    return found[found > 0]


def test_an_edge_across_carries_a_part_of_one_inside() -> None:
    """8 ranks on each of 4 nodes, per edge byte of a flat ring, which carries 31/32 of S: inside 7/8, across
    3/4 of an eighth."""
    topology = topology_of(4)
    usage = link_usage("hierarchical", topology, np.arange(32)[None])
    assert by_class(topology, usage, "nvlink_out") == pytest.approx([7 / 8 * 32 / 31] * 32)
    assert by_class(topology, usage, "nic_out") == pytest.approx([3 / 4 / 8 * 32 / 31] * 32)


def test_on_one_node_nothing_leaves_it() -> None:
    topology = topology_of(2)
    usage = link_usage("hierarchical", topology, np.arange(8)[None])
    assert by_class(topology, usage, "nvlink_out") == pytest.approx([1.0] * 8)
    assert not len(by_class(topology, usage, "nic_out"))


def test_one_rank_on_each_node_is_the_flat_ring() -> None:
    topology = topology_of(4)
    usage = link_usage("hierarchical", topology, np.array([[0, 8, 16, 24]]))
    assert not len(by_class(topology, usage, "nvlink_out"))
    assert by_class(topology, usage, "nic_out") == pytest.approx([1.0] * 4)


def test_two_ranks_on_two_nodes_are_as_few_as_there_can_be() -> None:
    """Inside 1/2, across 1/2 of 1/2, over 3/4."""
    topology = topology_of(2)
    usage = link_usage("hierarchical", topology, np.array([[0, 1, 8, 9]]))
    assert by_class(topology, usage, "nvlink_out") == pytest.approx([2 / 3] * 4)
    assert by_class(topology, usage, "nic_out") == pytest.approx([1 / 3] * 4)


def test_groups_with_unequal_nodes_have_one_ring_across_all() -> None:
    """Three ranks on one node and one on another: every rank is a node by itself, on one ring of 4."""
    topology = topology_of(2)
    usage = link_usage("hierarchical", topology, np.array([[0, 1, 2, 8]]))
    assert by_class(topology, usage, "nic_out") == pytest.approx([1.0] * 2)
    assert by_class(topology, usage, "nvlink_out") == pytest.approx([1.0] * 2)


def test_two_groups_side_by_side_carry_their_own_bytes() -> None:
    topology = topology_of(2)
    usage = link_usage("hierarchical", topology, np.array([[0, 1, 8, 9], [2, 3, 10, 11]]))
    assert by_class(topology, usage, "nvlink_out") == pytest.approx([2 / 3] * 8)
    assert by_class(topology, usage, "nic_out") == pytest.approx([1 / 3] * 8)


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "expected"),
    [
        ("all_gather", 32, 4, (7, 3)),
        ("reduce_scatter", 32, 4, (7, 3)),
        ("all_reduce", 32, 4, (14, 6)),
        ("all_gather", 4, 4, (0, 3)),
        ("all_gather", 8, 1, (7, 0)),
        ("all_gather", 9, 2, (3, 1)),  # 4 whole ranks a node
    ],
)
def test_rounds_inside_come_before_rounds_across(
    kind: str, ranks: int, nodes: int, expected: tuple[int, int]
) -> None:
    assert hierarchical_rounds(kind, ranks, nodes) == Rounds(*expected)


def test_inside_one_domain_hierarchical_is_a_ring() -> None:
    costs = load_cluster("dgx-h100").collectives.model_copy(update={"algorithm": "hierarchical"})
    names = {
        domains: [one.algorithm for one in methods("all_gather", 8, domains, costs, has_switch=True)]
        for domains in (1, 2)
    }
    assert names == {1: ["ring"], 2: ["hierarchical"]}


# -- rounds over longer links ---------------------------------------------------------------------------


def fat_tree(levels: int, latency: str = "1 us") -> Topology:
    """8 nodes, one on each leaf switch, two leaves in a pod."""
    table = {"kind": "fat-tree", "levels": levels, "nodes_per_leaf": 1, "hop_latency": latency, **ORIGIN}
    table |= {"leaves_per_pod": 2} if levels == 3 else {}
    cluster = load_cluster("dgx-h100").model_copy(update={"network": Network.model_validate(table)})
    return Topology(cluster, 8, 8)


@pytest.mark.parametrize(
    ("levels", "slots", "switches"),
    [
        (2, [0, 8], 3),  # leaf, spine, leaf
        (3, [0, 8], 3),  # within a pod
        (3, [0, 16], 5),  # leaf, spine, core, spine, leaf
        (3, [0, 8, 16, 24], 5),  # the longest of its crossings
        (2, [0, 1, 2], 1),  # no crossing
    ],
)
def test_every_switch_after_the_first_makes_a_round_longer(
    levels: int, slots: list[int], switches: int
) -> None:
    found = extra_round_seconds(fat_tree(levels), np.array(slots))
    assert found.inside == 0.0
    assert found.across == pytest.approx((switches - 1) * 1e-6)


def test_longer_links_add_to_the_switches() -> None:
    """RoCE between nodes: 4 us above the rounds that were measured on InfiniBand. A link inside a node of 1.5
    us: 1 us above the 0.5 of NVLink."""
    assert extra_round_seconds(topology_of(2, cluster="roce-h100"), np.array([0, 8])).across == pytest.approx(
        4e-6
    )
    assert extra_round_seconds(topology_of(2), np.array([0, 8])) == (0.0, 0.0)
    cluster = load_cluster("roce-h100")
    link = cluster.node_link.model_copy(update={"latency": 1.5e-6})
    longer = Topology(cluster.model_copy(update={"node_link": link}), 2, 8)
    assert extra_round_seconds(longer, np.array([0, 8])) == pytest.approx((1e-6, 4e-6))


def test_a_call_waits_for_each_of_its_rounds_as_long_as_links_are() -> None:
    """An all-gather of 16 ranks on two nodes: 2 of 15 rounds leave a node, and pass two switches more than
    the first, of 1 us each."""
    seconds = []
    for latency in ("0 us", "1 us"):
        topology = Topology(fat_tree(2, latency).cluster, 2, 8)
        work = Collective("all_gather", 1, "bf16", "world")
        groups = {"world": Group.regular("world", 16)}
        fabric = Fabric(simpy.Environment(), topology, groups, is_folded=True, collectives=[work])
        (ring,) = [one for one in fabric.options(work) if (one.algorithm, one.protocol) == ("ring", "simple")]
        seconds.append(ring.latency_seconds)
    assert ring_rounds("all_gather", 16, 2).inter == 2
    assert seconds[1] - seconds[0] == pytest.approx(2 * 2e-6)
