"""What a bad link or a dead card does to collectives, and to which of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy

from zsim.fabric.algorithms.rings import ring_usage
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.faults import FaultsTable, apply_faults
from zsim.specs.topology.topology import Topology

CARD = 47.5e9  # bytes per second of a DGX H100's card: 400 Gb/s at 95 %
GIB = 2**30


def topology(cluster: str, nodes: int, **faults: Any) -> Topology:
    whole = Topology(load_cluster(cluster), nodes, load_cluster(cluster).gpus_per_node)
    return apply_faults(whole, FaultsTable.model_validate(faults))


def transfers(
    where: Topology, group: Group, kind: Any = "all_gather", algorithm: str = "ring"
) -> list[Transfer]:
    """1 GiB by one algorithm and the last of its protocols (Simple on rings), in every group of a kind."""
    work = Collective(kind, GIB, "bf16", group.name)
    fabric = Fabric(simpy.Environment(), where, {group.name: group}, is_folded=False, collectives=[work])
    return [
        [option for option in fabric.options(work, number) if option.algorithm == algorithm][-1]
        for number in range(where.world_size // group.size)
    ]


def rates(where: Topology, group: Group) -> list[float]:
    """Bus bandwidths of a ring all-gather of 1 GiB."""
    return [t.size / (t.isolated_seconds - t.latency_seconds) for t in transfers(where, group)]


WORLD = Group.regular("world", 16)
RAILS = Group.regular("replicate", 16, 2, 8)


def test_a_degraded_card_slows_a_ring_to_its_share() -> None:
    """Eight channels with an eighth of the bytes each: a card with a quarter of its bandwidth carries its
    channel at a quarter, and the ring waits for it: 8 x 0.25 x 47.5 = 95 GB/s."""
    [rate] = rates(topology("dgx-h100", 2, links={"node1.nic2": {"bandwidth_fraction": 0.25}}), WORLD)
    assert rate == pytest.approx(8 * 0.25 * CARD)


def test_only_rings_that_cross_a_degraded_card_are_slower() -> None:
    """Of the pairs (0, 8), (1, 9), ... the third; groups inside a node not at all."""
    bad = topology("dgx-h100", 2, links={"node1.nic2": {"bandwidth_fraction": 0.25}})
    whole = topology("dgx-h100", 2)
    np.testing.assert_allclose(rates(bad, RAILS), [CARD, CARD, CARD / 4, *([CARD] * 5)])
    inside = Group.regular("shard", 16, 8)
    assert rates(bad, inside) == rates(whole, inside)


def test_a_dead_card_of_eight_leaves_seven_channels_to_all_nodes() -> None:
    """Each card that is left carries a seventh of the bytes, and the ring reaches seven cards' bandwidth."""
    bad, whole = topology("dgx-h100", 4, dead_nics=["node1.nic2"]), topology("dgx-h100", 4)
    usage = ring_usage(bad, np.arange(32)[None])
    for name in ("nic_out", "nic_in"):
        cards = usage[bad.classes[name].first :][:32].reshape(4, 8)
        np.testing.assert_allclose(cards[1], [1 / 7, 1 / 7, 0, *([1 / 7] * 5)])
        np.testing.assert_allclose(cards[[0, 2, 3]], [[*([1 / 7] * 7), 0]] * 3)
    world = Group.regular("world", 32)
    assert rates(bad, world)[0] == pytest.approx(min(7 * CARD, rates(whole, world)[0]))


def test_a_dead_card_puts_a_ring_across_rails() -> None:
    """16 nodes of one unit of rails: without faults nothing passes the spine. With node 1's card 2 dead, its
    channels 2 to 6 use cards 3 to 7, the others' cards 2 to 6: on the way in and out 5/7 of a bus byte
    change leaves, by 5 leaves each, on 32 uplinks (the superpod's leaves have 32)."""
    whole, bad = (
        topology("dgx-superpod-h100", 16),
        topology("dgx-superpod-h100", 16, dead_nics=["node1.nic2"]),
    )
    up = whole.classes["leaf_up"]
    assert ring_usage(whole, np.arange(128)[None])[up.first : up.first + up.count].sum() == 0.0
    crossed = ring_usage(bad, np.arange(128)[None])[up.first : up.first + up.count]
    assert crossed.sum() == pytest.approx(2 * 5 / 7)
    assert crossed.reshape(8, 32).sum(axis=1) == pytest.approx(np.array([0, 0, 1, 2, 2, 2, 2, 1]) / 7)


def test_a_dead_card_halves_two_communicators_that_share_another() -> None:
    """Rank 10's card is dead: its pair (2, 10) uses card 3 of node 1, as the pair (3, 11) does. Alone, each
    has the whole card; both at once half of it."""
    bad = topology("dgx-h100", 2, dead_nics=["node1.nic2"])
    assert rates(bad, RAILS) == pytest.approx([CARD] * 8)
    work = Collective("all_gather", GIB, "bf16", "replicate")
    env = simpy.Environment()
    fabric = Fabric(env, bad, {"replicate": RAILS}, is_folded=False, collectives=[work])
    ends = [0.0] * 8
    for number in range(8):

        def end(number: int = number) -> None:
            ends[number] = env.now

        fabric.run(fabric.transfer(work, number), end)
    env.run()
    alone = GIB / 2 / CARD
    late = [seconds - min(ends) for seconds in ends]
    assert late == pytest.approx([0, 0, alone, alone, 0, 0, 0, 0], rel=1e-6)


def test_a_node_with_two_cards_loses_half_with_one() -> None:
    """A DGX-2 node: 16 GPUs, 8 cards. Seven dead leave the two GPUs of the last: two channels, one card."""
    whole = topology("dgx-2", 2)
    group = Group.regular("world", 32)
    bad = topology("dgx-2", 2, dead_nics=[f"node1.nic{n}" for n in range(1, 8)])
    usage, cards = ring_usage(bad, np.arange(32)[None]), bad.classes["nic_out"].first + 8
    assert usage[cards : cards + 8].tolist() == pytest.approx([1.0, *([0.0] * 7)])
    one = next(c for c in whole.classes.values() if c.name == "nic_out").capacity
    assert rates(bad, group)[0] == pytest.approx(one)


@pytest.mark.parametrize(
    ("kind", "algorithm", "passes"),
    [
        ("all_gather", "ring", 2),
        ("reduce_scatter", "ring", 2),
        ("all_reduce", "ring", 4),
        ("all_reduce", "tree", 4),
    ],
)
def test_a_late_card_delays_every_pass_over_it(kind: str, algorithm: str, passes: int) -> None:
    """50 us into node 1 and 50 us out of it: once around a ring, twice for an all-reduce; up and down the
    tree in which the node is not a leaf."""
    late = topology("dgx-h100", 4, links={"node1.nic2": {"added_latency": "50 us"}})
    group = Group.regular("world", 32)
    slow, fast = (
        transfers(where, group, kind, algorithm)[0].latency_seconds
        for where in (late, topology("dgx-h100", 4))
    )
    assert slow - fast == pytest.approx(passes * 50e-6)


def test_a_late_tier_delays_every_round_between_nodes() -> None:
    """A ring of 4 nodes goes from node to node 4 times, over two cards each time: 8 x 10 us."""
    late = topology("dgx-h100", 4, links={"network": {"added_latency": "10 us"}})
    group = Group.regular("world", 32)
    slow, fast = (transfers(where, group)[0].latency_seconds for where in (late, topology("dgx-h100", 4)))
    assert slow - fast == pytest.approx(80e-6)
