"""Network cards that read the host's memory: which links bytes cross, and what NCCL's rings then reach, held
to what others measured with and without GPUDirect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zsim.fabric.algorithms.link_usage import link_usage
from zsim.fabric.algorithms.rings import ring_orders, ring_usage
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.faults import FaultsTable, apply_faults
from zsim.specs.topology.topology import Topology


def dgx_1_with(**nic: Any) -> Cluster:
    """Two GPUs and, of four cards, one under each PCIe switch; an uplink carries 0.8 x 15.75 = 12.6 GB/s, a
    port 0.95 x 12.5 = 11.875."""
    cluster = load_cluster("dgx-1")
    return cluster.model_copy(update={"nic": cluster.nic.model_copy(update=nic)})


def bus_gigabytes(cluster: Cluster, nodes: int) -> float:
    """Bytes per second of a ring over all GPUs that the fullest link allows."""
    topology = Topology(cluster, nodes, 8)
    usage = ring_usage(topology, np.arange(8 * nodes)[None])
    used = usage > 0
    return float((topology.capacities()[used] / usage[used]).min() / 1e9)


def names(cluster: Cluster, source: int, target: int) -> list[str]:
    topology = Topology(cluster, 2, 8)
    return [topology.class_of(link).name for link in topology.route(source, target)]


def test_one_port_of_eight_v100_halves_without_gpudirect_as_measured() -> None:
    """github.com/NVIDIA/nccl-tests/issues/29: 4 servers of 8 V100 SXM2 with one EDR port under a switch with
    two GPUs; all_reduce_perf to 512 MB gave about 6 GB/s, and 12.2 once GPUDirect was on (6 GB/s without it
    also in NVIDIA/nccl/issues/465). The uplink carries every byte twice, 12.6 / 2."""
    assert bus_gigabytes(dgx_1_with(per_node=1, gpudirect=False), 4) == pytest.approx(6.3)
    assert bus_gigabytes(dgx_1_with(per_node=1), 4) == pytest.approx(11.875)


def test_four_ports_of_eight_v100_halve_without_gpudirect() -> None:
    """github.com/NVIDIA/nccl/issues/214: about 20 GB/s on two nodes of 8 V100 with four 100 Gb/s ports, and
    half of what GPUDirect should give; four uplinks carry twice 6.3."""
    assert bus_gigabytes(dgx_1_with(gpudirect=False), 2) == pytest.approx(25.2)
    assert bus_gigabytes(dgx_1_with(), 2) == pytest.approx(47.5)


def test_a_card_at_the_host_loses_nothing_without_gpudirect() -> None:
    """Every uplink carries a byte once each way: 12.6 GB/s, more than the port."""
    assert bus_gigabytes(dgx_1_with(per_node=1, gpudirect=False, attached="host"), 4) == pytest.approx(11.875)


@pytest.mark.parametrize(
    ("gpudirect", "attached", "there", "back"),
    [
        (True, "switch", [], []),
        (True, "host", ["uplink_up"], ["uplink_down"]),
        (False, "host", ["uplink_up"], ["uplink_down"]),
        (False, "switch", ["uplink_up", "uplink_down"], ["uplink_up", "uplink_down"]),
    ],
)
def test_routes_cross_the_uplinks_that_lead_to_the_card(
    gpudirect: bool, attached: str, there: list[str], back: list[str]
) -> None:
    found = names(dgx_1_with(gpudirect=gpudirect, attached=attached), 2, 12)
    assert found == ["pcie_up", *there, "nic_out", "nic_in", *back, "pcie_down"]


def test_staged_bytes_come_down_at_the_card_s_own_switch() -> None:
    """One card, at GPU 0: bytes of GPU 5 go up at the third switch and down at the first."""
    topology = Topology(dgx_1_with(per_node=1, gpudirect=False), 2, 8)
    up, down = (link - topology.class_of(link).first for link in topology.route(5, 8)[1:3])
    assert (up, down) == (2, 0)


def test_groups_without_a_gpu_at_the_card_still_have_all_their_channels() -> None:
    """GPUs 4 to 7 of two nodes, whose card is at GPU 0: their uplinks carry a byte once, the card's down one
    what they send and its up one what they receive, 12.6 GB/s; the port binds."""
    topology = Topology(dgx_1_with(per_node=1, gpudirect=False), 2, 8)
    usage = ring_usage(topology, np.array([[4, 5, 6, 7, 12, 13, 14, 15]]))
    used = usage > 0
    assert (topology.capacities()[used] / usage[used]).min() / 1e9 == pytest.approx(11.875)


def test_groups_at_the_card_and_away_from_it_are_the_same_in_any_order() -> None:
    """Of two groups of four GPUs of each of two nodes one has GPUs at the only card: the order of the groups
    changes nothing, and together they use what each uses alone."""
    topology = Topology(dgx_1_with(per_node=1, gpudirect=False), 2, 8)
    rows = np.array([[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]])
    for shape in ("ring", "tree"):
        apart = link_usage(shape, topology, rows[:1]) + link_usage(shape, topology, rows[1:])
        np.testing.assert_allclose(link_usage(shape, topology, rows), apart)
        np.testing.assert_allclose(link_usage(shape, topology, rows[::-1]), apart)


def test_with_a_dead_card_channels_still_enter_under_the_cards_that_work() -> None:
    """16 GPUs on nodes of two cards, 4 to a switch: with one card dead, both nodes' channels enter by the
    four GPUs under a living card each, and all bytes cross its uplinks twice, 12.6 / 2 GB/s."""
    cluster = load_cluster("dgx-2")
    nic = cluster.nic.model_copy(update={"per_node": 2, "gpudirect": False})
    pcie = cluster.pcie.model_copy(update={"gpus_per_switch": 4})
    whole = Topology(cluster.model_copy(update={"nic": nic, "pcie": pcie}), 2, 16)
    topology = apply_faults(whole, FaultsTable(dead_nics=("node0.nic1",)))
    entries = {int(order[0, 0]) for order, _crosses in ring_orders(topology, np.arange(32)[None])}
    assert entries == {0, 1, 2, 3}


def test_a_dead_card_s_bytes_come_down_at_the_card_that_carries_them() -> None:
    """DGX-1's card 1 is dead: GPU 2 hands its bytes over NVLink to the GPU at the card that carries them,
    whose switch has them up to the host and down again."""
    whole = Topology(dgx_1_with(gpudirect=False), 2, 8)
    topology = apply_faults(whole, FaultsTable(dead_nics=("node0.nic1",)))
    card = int(topology.nic_of(np.array([2]))[0])
    route = [(topology.class_of(link), link) for link in topology.route(2, 8)]
    found = [(kind.name, link - kind.first) for kind, link in route]
    assert card != 1
    assert found[:6] == [
        ("nvlink_out", 2), ("nvlink_in", 2 * card), ("pcie_up", 2 * card), ("uplink_up", card),
        ("uplink_down", card), ("nic_out", card),
    ]  # fmt: skip
