"""Every shipped cluster: it routes, joins all GPUs, and its cut through the middle is what it claims."""

from __future__ import annotations

import numpy as np
import pytest

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.presets import topology_preset_names
from zsim.specs.topology.graph import bisection_bandwidth, is_connected
from zsim.specs.topology.topology import Topology

NAMES = topology_preset_names()


def test_the_machines_people_rent_are_there() -> None:
    wanted = {
        "dgx-superpod-a100", "dgx-superpod-h100", "aws-p4d", "aws-p5", "azure-ndv4", "azure-ndv5",
        "mi300x-x8", "gb200-nvl72", "dgx-2", "roce-h100", "hgx-b200",
    }  # fmt: skip
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_routes_between_all_gpus(name: str) -> None:
    """Four nodes: all GPUs are joined; 50 random routes have as many bytes as the formulas say."""
    cluster = load_cluster(name)
    topology = Topology(cluster, 4, cluster.gpus_per_node)
    assert is_connected(topology)
    rng = np.random.default_rng(1)
    sources = rng.integers(0, topology.world_size, 50)
    targets = (sources + rng.integers(1, topology.world_size, 50)) % topology.world_size
    usage, expected = np.zeros(topology.num_links), np.zeros(topology.num_links)
    topology.add_routes(usage, sources, targets, 1.0)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for share, links in topology.paths(source, target):
            expected[links] += share
    np.testing.assert_allclose(usage, expected, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_non_blocking_preset_has_full_bisection(name: str) -> None:
    """64 nodes: the cut carries what the cards of 32 nodes can send, but no more; all shipped fabrics are
    non-blocking at that size (the RoCE fabric within a pod of 384 nodes)."""
    cluster = load_cluster(name)
    cut = bisection_bandwidth(Topology(cluster, 64, cluster.gpus_per_node))
    cards = 32 * cluster.nic.per_node * cluster.nic.bandwidth * cluster.nic.efficiency
    assert cut == pytest.approx(cards, rel=1e-6)


def test_above_the_pods_the_roce_fabric_has_a_seventh() -> None:
    """768 nodes are two pods of 3,072 GPUs; 3,072 x 50 GB/s / 7 = 21.9 TB/s between them."""
    topology = Topology(load_cluster("roce-h100"), 768, 8)
    capacity = topology.classes["core_up"]
    assert capacity.count / 2 * capacity.capacity == pytest.approx(3072 * 50e9 / 7)


def test_a_superpod_of_four_units_has_the_published_switches() -> None:
    """DGX SuperPOD H100, 4 scalable units: 32 leaves and 16 spines of 64 ports, 1,024 cables each way."""
    inventory = Topology(load_cluster("dgx-superpod-h100"), 128, 8).inventory()
    assert inventory.switches == {"leaf": 32, "spine": 16}
    assert inventory.ports == {"leaf": 64, "spine": 64}
    assert inventory.cables == {"card": 1024, "leaf-spine": 1024}


@pytest.mark.parametrize(
    ("nodes", "leaves", "spines", "cores", "cables"),
    [
        (64, 16, 8, 0, 512),
        (128, 32, 16, 0, 1024),
        (256, 64, 32, 0, 2048),
        (512, 128, 128, 64, 4096),
        (1024, 256, 256, 128, 8192),
        (2048, 512, 512, 256, 16384),
    ],
)
def test_superpods_have_nvidias_counts(nodes: int, leaves: int, spines: int, cores: int, cables: int) -> None:
    """The reference architecture's table of larger SuperPODs; every level has as many cables."""
    name = "dgx-superpod-h100-3-level" if cores else "dgx-superpod-h100"
    inventory = Topology(load_cluster(name), nodes, 8).inventory()
    found = inventory.switches
    assert (found["leaf"], found["spine"], found.get("core", 0)) == (leaves, spines, cores)
    assert set(inventory.cables.values()) == {cables}


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (
            "dgx-superpod-h100",
            "the cluster 'dgx-superpod-h100-3-level', which is dgx-superpod-h100 with levels = 3",
        ),
        ({"extends": "dgx-superpod-h100", "name": "ours"}, "levels = 3"),
    ],
)
def test_a_superpod_too_large_for_two_levels_says_what_would_do(
    cluster: str | dict[str, str], expected: str
) -> None:
    """The shipped one has a preset of three levels; one's own has not."""
    where = "a spine needs 128 ports, but switch_ports is 64; expected fewer nodes, or "
    with pytest.raises(InputError, match=f"{where}{expected}$"):
        Topology(load_cluster(cluster), 512, 8)


def test_72_gpus_of_an_nvl72_are_one_domain() -> None:
    topology = Topology(load_cluster("gb200-nvl72"), 36, 4)
    assert topology.domain_of(np.array([0, 71, 72])).tolist() == [0, 0, 1]
    assert topology.class_of(topology.route(0, 71)[0]).tier == "nvlink"
