"""What a call adds to links, waits for and sends: each term by itself."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import simpy

from tests.fabric.test_fabric import collective, fabric_of
from zsim.cost.collectives.rounds import Rounds, bus_bytes, unequal_bus_bytes
from zsim.fabric.algorithms.rings import ExtraRoundSeconds
from zsim.fabric.communicators import ramp_seconds, ring_latency, round_seconds
from zsim.fabric.fabric import Fabric
from zsim.fabric.messages import Pairs
from zsim.fluid.pool import simulate_flows
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.faults import FaultsTable, apply_faults
from zsim.specs.topology.topology import Topology


def with_simple(**costs: float) -> Cluster:
    """H100 nodes whose only protocol has these costs and no others."""
    cluster = load_cluster("dgx-h100")
    free = dict.fromkeys(
        ("base", "intra_round", "inter_round", "network_overhead", "ramp", "network_ramp"), 0.0
    )
    simple = cluster.collectives.protocols["simple"].model_copy(update={**free, **costs})
    plain = {"algorithms": {}, "protocols": {"simple": simple}, "message_delay": 0.0}
    return cluster.model_copy(update={"collectives": cluster.collectives.model_copy(update=plain)})


def latency(cluster: Cluster, nodes: int, size: int = 2**22) -> float:
    return fabric_of(cluster, nodes).transfer(collective("all_gather", size), 0).latency_seconds


@pytest.mark.parametrize(
    ("costs", "nodes", "seconds"),
    [
        ({"base": 3.0}, 2, 3.0),
        ({"intra_round": 1.0}, 1, 7.0),
        ({"intra_round": 1.0}, 2, 13.0),  # 15 rounds, 2 of which leave a node
        ({"inter_round": 1.0}, 2, 2.0),
        ({"inter_round": 1.0}, 1, 0.0),
        ({"network_overhead": 1.0}, 2, 13.0),  # rounds inside take at least that
        ({"network_overhead": 1.0, "intra_round": 4.0}, 2, 52.0),
        ({"network_overhead": 1.0}, 1, 0.0),
        ({"ramp": 1.0}, 1, 2.0),  # sqrt(4 MiB / 1 MiB)
        ({"ramp": 1.0, "network_ramp": 0.5}, 2, 3.0),
        ({"network_ramp": 0.5}, 1, 0.0),
    ],
)
def test_a_call_waits_for_each_term_of_its_latency(
    costs: dict[str, float], nodes: int, seconds: float
) -> None:
    assert latency(with_simple(**costs), nodes) == pytest.approx(seconds)


def test_longer_links_are_in_every_round_they_are_crossed_in() -> None:
    costs = with_simple(base=1.0, intra_round=2.0, inter_round=3.0).collectives.protocols["simple"]
    assert ring_latency(Rounds(4, 2), costs, ExtraRoundSeconds(0.5, 0.25)) == pytest.approx(
        1 + 4 * 2.5 + 2 * 3.25
    )
    assert round_seconds(costs, ExtraRoundSeconds(0.5, 0.25), spans=True) == (2.5, 3.25)
    slow = costs.model_copy(update={"network_overhead": 9.0})
    assert round_seconds(slow, ExtraRoundSeconds(0.5, 0.25), spans=True) == (9.0, 3.25)
    assert round_seconds(slow, ExtraRoundSeconds(0.5, 0.25), spans=False) == (2.5, 3.25)
    assert ramp_seconds(Rounds(1, 0), costs.model_copy(update={"ramp": 2.0}), 2**21) == 2 * sqrt(2)


@pytest.mark.parametrize(("target", "seconds"), [(8, 0.75), (1, 0.0)])
def test_a_message_between_nodes_is_late(target: int, seconds: float) -> None:
    cluster = with_simple()
    delayed = cluster.collectives.model_copy(update={"message_delay": 0.75})
    topology = Topology(cluster.model_copy(update={"collectives": delayed}), 2, 8)
    pairs: dict[str, Group] = {"world +1": Pairs("world +1", np.array([[0, target]]))}
    work = Collective("send", 1000, "bf16", "world +1")
    fabric = Fabric(simpy.Environment(), topology, pairs, collectives=[work])
    assert fabric.transfer(work, 0).latency_seconds == pytest.approx(seconds)


def test_a_flow_waits_its_latency_without_using_its_link() -> None:
    """The first flow of 10 bytes has 1 byte per second for itself until 4 s, when the other's 3 bytes begin
    at half of it and end at 10 s; the first has 3 bytes left then."""
    flows = [
        {"route": ["a"], "size_bytes": 10},
        {"route": ["a"], "size_bytes": 3, "start_seconds": 1, "latency_seconds": 3},
    ]
    assert simulate_flows({"a": 1.0}, flows) == pytest.approx([13.0, 10.0])


# -- bytes on links --------------------------------------------------------------------------------------


def loads_of(fabric: Fabric, *works: Collective) -> dict[str, tuple[float, float]]:
    found = fabric.traffic(works)
    return {name: (found[name].total_bytes, found[name].fullest_bytes) for name in ("nvlink_out", "nic_out")}


def test_the_load_of_a_call_is_its_bus_bytes_on_every_link_it_crosses() -> None:
    """16 ranks: 15/16 of 1.6 GB on each of 16 GPUs' links to the switch; a card carries an eighth. However
    long it waits first is no load."""
    size = bus_bytes("all_gather", 1_600_000_000, 16)
    found = loads_of(fabric_of(), collective("all_gather", 1_600_000_000))
    assert found["nvlink_out"] == pytest.approx((16 * size, size))
    assert found["nic_out"] == pytest.approx((2 * size, size / 8))
    slow = loads_of(fabric_of(with_simple(base=100.0, ramp=5.0)), collective("all_gather", 1_600_000_000))
    assert all(slow[name] == pytest.approx(found[name]) for name in found)


def test_calls_add_up_and_each_counts_as_often_as_it_is_called() -> None:
    work, other = collective("all_gather", 16_000), collective("all_reduce", 16_000)
    single, both = loads_of(fabric_of(), work), loads_of(fabric_of(with_simple()), work, work, work)
    assert both["nic_out"] == pytest.approx(tuple(3 * amount for amount in single["nic_out"]))
    mixed = loads_of(fabric_of(with_simple()), work, other)
    ring = fabric_of(with_simple())
    assert ring.transfer(other, 0).algorithm in ("ring", "tree")
    assert mixed["nic_out"][0] > both["nic_out"][0] / 3


def test_bytes_beside_count_in_the_fullest_link_and_not_in_the_total() -> None:
    fabric = fabric_of()
    links = fabric.topology.num_links
    total, beside = np.full(links, 2.0), np.full(links, 1.0)
    count = fabric.topology.classes["nic_out"].count
    found = fabric.loads(total, beside)["nic_out"]
    assert (found.total_bytes, found.fullest_bytes) == (2.0 * count, 3.0)


def test_a_degraded_link_is_as_full_as_its_bytes_over_what_is_left_of_it() -> None:
    """A quarter of a card: as full with a byte as a whole one with four; in all it carries as many."""
    whole = Topology(load_cluster("dgx-h100"), 2, 8)
    faults = {"links": {"node1.nic2": {"bandwidth_fraction": 0.25}}}
    degraded = apply_faults(whole, FaultsTable.model_validate(faults))
    groups: dict[str, Group] = {"world": Group.regular("world", 16)}
    fabric = Fabric(simpy.Environment(), degraded, groups)
    found = fabric.loads(np.full(degraded.num_links, 2.0))
    assert (found["nic_out"].total_bytes, found["nic_out"].fullest_bytes) == (32.0, 8.0)
    assert found["nvlink_out"].fullest_bytes == 2.0


def test_what_is_carried_is_the_load_of_the_call() -> None:
    fabric, work = fabric_of(), collective("all_gather", 16_000)
    links, carried = fabric.link_bytes(work, 0)
    assert np.array_equal(links, np.flatnonzero(fabric.usage([work])))
    assert carried == pytest.approx(fabric.usage([work])[links])


def test_an_exchange_of_unequal_parts_is_as_long_as_its_largest_sender() -> None:
    """Member 1 sends 7 and keeps 100; what stays is no byte on a link."""
    parts = ((9, 1, 2), (3, 100, 4), (5, 1, 0))
    assert unequal_bus_bytes(parts) == 7
    assert unequal_bus_bytes(((5, 0), (0, 5))) == 0


# -- places in a node ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "num_sockets", "expected"),
    [
        (8, 2, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
        (8, 1, [0] * 8 + [1] * 8),
        (4, 2, [0] * 4 + [2] * 4),  # half of a node's GPUs are on its first socket
        (8, 4, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]),
    ],
)
def test_a_nodes_gpus_are_split_over_its_sockets_in_order(
    gpus: int, num_sockets: int, expected: list[int]
) -> None:
    """Of two nodes, all of whose sockets have numbers of their own."""
    cluster = load_cluster("dgx-h100")
    host = cluster.host.model_copy(update={"sockets": num_sockets})
    topology = Topology(cluster.model_copy(update={"host": host}), 2, gpus)
    assert topology.socket_of(np.arange(2 * gpus)).tolist() == expected
