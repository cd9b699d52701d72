"""Topologies: links by formula and as a graph; routes, capacities, what a fabric is built of."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from typing import Any

import networkx
import numpy as np
import pytest

from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.graph import bisection_bandwidth, is_connected, topology_graph
from zsim.specs.topology.topology import Topology

_ORIGIN = {"source": "made up for a test", "evidence": "assumed"}


def cluster_with(preset: str = "dgx-h100", **network: Any) -> Cluster:
    table = Network.model_validate({**_ORIGIN, **network})
    return load_cluster(preset).model_copy(update={"network": table})


def cable(source: str, target: str, bandwidth: str = "800 Gb/s", count: int = 1) -> dict[str, Any]:
    return {"from": source, "to": target, "bandwidth": bandwidth, "count": count}


TRIANGLE = [
    *(cable(f"node{n}", f"s{n % 3}") for n in range(6)),
    cable("s0", "s1"), cable("s1", "s2"), cable("s2", "s3"), cable("s0", "s3", count=2),
]  # fmt: skip
FABRICS: dict[str, dict[str, Any]] = {
    "single switch": {"kind": "single-switch"},
    "two-level tree": {"kind": "fat-tree", "nodes_per_leaf": 2, "oversubscription": 2.0},
    "hashed tree": {"kind": "fat-tree", "nodes_per_leaf": 2, "routing": "hash", "flows_per_pair": 3},
    "three-level tree": {
        "kind": "fat-tree", "levels": 3, "nodes_per_leaf": 1, "leaves_per_pod": 2,
        "oversubscription": 2.0, "spine_oversubscription": 2.0,
    },
    "hashed three-level tree": {
        "kind": "fat-tree", "levels": 3, "nodes_per_leaf": 1, "leaves_per_pod": 2, "routing": "hash",
    },
    "rails": {"kind": "rail-optimized", "nodes_per_leaf": 4},
    "planes": {"kind": "rail-optimized", "nodes_per_leaf": 2, "planes": 2},
    "hashed planes": {"kind": "fat-tree", "nodes_per_leaf": 2, "planes": 2, "routing": "hash"},
    "dragonfly": {
        "kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 2, "global_links_per_router": 2,
    },
    "2-D torus": {"kind": "torus", "shape": (3, 2)},
    "3-D torus": {"kind": "torus", "shape": (2, 3, 2)},
    "list": {"kind": "links", "links": TRIANGLE},
}  # fmt: skip


@pytest.fixture(params=FABRICS, ids=lambda name: name.replace(" ", "-"))
def topology(request: pytest.FixtureRequest) -> Topology:
    return Topology(cluster_with(**FABRICS[request.param]), 6, 8)


def test_every_route_is_a_shortest_path_in_the_graph(topology: Topology) -> None:
    """From GPU 1 to all others: link by link an edge of the graph, shares that add up to 1, and, between the
    two cards (a GPU uses its own, not its neighbour's), no longer than the way that networkx finds."""
    graph = topology_graph(topology)
    edges_with_links: list[tuple[str, str, Any]] = list(graph.edges(data="links"))
    edge_of = {link: (begin, end) for begin, end, links in edges_with_links for link in links or ()}
    network = graph.edge_subgraph([edge for edge in graph.edges if graph.edges[edge]["length"]])
    own = f"nic{int(topology.nic_of(np.array([1]))[0])}"
    lengths = dict(networkx.single_source_dijkstra_path_length(network, own, weight="length"))
    for target in range(2, 48):
        ways = topology.paths(1, target)
        assert sum(share for share, _ in ways) == pytest.approx(1.0, rel=1e-12)
        for _, links in ways[:: max(1, len(ways) // 5)]:
            edges = [edge_of[link] for link in links]
            assert (edges[0][0], edges[-1][1]) == ("gpu1", f"gpu{target}")
            for before, after in itertools.pairwise(edges):
                assert before[1] == after[0] or graph.edges[before[1], after[0]]["length"] == 0
            if target < 8:
                assert len(edges) == networkx.shortest_path_length(graph, "gpu1", f"gpu{target}")
                continue
            card = f"nic{int(topology.nic_of(np.array([target]))[0])}"
            between = [edge for edge in edges if not any(end.startswith(("gpu", "pcie")) for end in edge)]
            assert sum(graph.edges[edge]["length"] for edge in between) == lengths[card]


def test_bytes_counted_by_formula_are_those_of_the_routes(topology: Topology) -> None:
    """100 random pairs at once against one route at a time."""
    rng = np.random.default_rng(3)
    sources, targets = rng.integers(0, 48, 100), rng.integers(0, 48, 100)
    targets = np.where(sources == targets, (targets + 1) % 48, targets)
    usage, expected = np.zeros(topology.num_links), np.zeros(topology.num_links)
    topology.add_routes(usage, sources, targets, 2.0)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for share, links in topology.paths(source, target):
            for link in links:
                expected[link] += 2.0 * share
    np.testing.assert_allclose(usage, expected, rtol=1e-9, atol=1e-12)


def test_every_fabric_joins_all_gpus_and_has_a_bisection(topology: Topology) -> None:
    """No cut is wider than the cards of half of the nodes: 3 x 8 x 50 GB/s x 0.95."""
    assert is_connected(topology)
    assert 0 < bisection_bandwidth(topology) <= 24 * 47.5e9 * (1 + 1e-9)


def test_oversubscription_halves_the_bisection() -> None:
    """8 nodes, 4 per leaf; non-blocking: the cards of 4 nodes, 32 x 47.5 GB/s = 1.52 TB/s. Two to one: a leaf
    of 32 cards has 16 uplinks of 50 GB/s = 0.8 TB/s."""
    for ratio, expected in ((1.0, 32 * 47.5e9), (2.0, 16 * 50e9)):
        cluster = cluster_with(kind="fat-tree", nodes_per_leaf=4, oversubscription=ratio)
        assert bisection_bandwidth(Topology(cluster, 8, 8)) == pytest.approx(expected)


def test_a_torus_is_cut_through_its_rings() -> None:
    """8 x 2 nodes, links of 10 GB/s: the halves (y = 0 and y = 1) are joined by 8 rings of two, each with an
    up and a down link one way: 16 x 10 GB/s."""
    cluster = cluster_with(kind="torus", shape=(8, 2), link_bandwidth="10 GB/s")
    assert bisection_bandwidth(Topology(cluster, 16, 8)) == pytest.approx(160e9)


def test_what_people_pay_for_is_counted() -> None:
    """128 nodes of 8 cards, rails, 32 nodes per leaf: 4 x 8 leaves with 32 cards and 32 uplinks, 32 spines
    with a port for every leaf; 1024 cables to cards and 1024 between switches."""
    inventory = Topology(cluster_with(kind="rail-optimized", nodes_per_leaf=32), 128, 8).inventory()
    assert inventory.switches == {"leaf": 32, "spine": 32}
    assert inventory.ports == {"leaf": 64, "spine": 32}
    assert inventory.cables == {"card": 1024, "leaf-spine": 1024}
    assert (inventory.num_switches, inventory.num_cables, inventory.num_ports) == (64, 2048, 3072)


def test_a_k_ary_fat_tree_has_the_published_counts() -> None:
    """Al-Fares et al.: k = 4 gives k^3/4 = 16 hosts, 8 edge, 8 aggregation and 4 core switches of 4 ports."""
    nic = load_cluster("dgx-h100").nic.model_copy(update={"per_node": 1})
    cluster = cluster_with(kind="fat-tree", levels=3, nodes_per_leaf=2, leaves_per_pod=2, switch_ports=4)
    inventory = Topology(cluster.model_copy(update={"nic": nic}), 16, 8).inventory()
    assert inventory.switches == {"leaf": 8, "spine": 8, "core": 4}
    assert inventory.ports == {"leaf": 4, "spine": 4, "core": 4}


def test_a_rail_aligned_flow_stays_on_its_leaf_and_another_crosses_the_spine() -> None:
    topology = Topology(cluster_with(kind="rail-optimized", nodes_per_leaf=4), 4, 8)
    tiers = [[topology.class_of(link).tier for link in topology.route(0, target)] for target in (8, 9)]
    assert "leaf-spine" not in tiers[0]
    assert tiers[1].count("leaf-spine") == 2


def test_an_nvlink_domain_spans_nodes() -> None:
    """Two nodes of 8 in one domain: GPU 0 reaches GPU 15 over NVLink, GPU 16 over the network."""
    cluster = load_cluster("dgx-h100")
    link = cluster.node_link.model_copy(update={"nodes_per_domain": 2})
    topology = Topology(cluster.model_copy(update={"node_link": link}), 4, 8)
    assert [topology.class_of(link).name for link in topology.route(0, 15)] == ["nvlink_out", "nvlink_in"]
    assert "nic_out" in [topology.class_of(link).name for link in topology.route(0, 16)]


def calls_of_ring(cluster: Cluster, nodes: int) -> int:
    """How many functions, numpy's included, the links of a ring over 8 GPUs of each node take."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before, ranks = sys.getprofile(), np.arange(8 * nodes)
    sys.setprofile(count)
    try:
        topology = Topology(cluster, nodes, 8)
        topology.add_routes(np.zeros(topology.num_links), ranks, np.roll(ranks, -1), 1.0)
    finally:
        sys.setprofile(before)
    return calls


def test_the_links_of_100_000_gpus_take_no_more_calls_than_those_of_8000_and_little_memory() -> None:
    """Whole arrays at a time: the number of calls does not grow with GPUs. 16,384 need less than 200 MB."""
    cluster = cluster_with(kind="fat-tree", levels=3, nodes_per_leaf=4, leaves_per_pod=32)
    calls_of_ring(cluster, 128)  # what is imported or looked up once
    assert calls_of_ring(cluster, 12_512) == pytest.approx(calls_of_ring(cluster, 1024), rel=0.1)
    ranks = np.arange(16_384)
    tracemalloc.start()
    small = Topology(cluster, 2048, 8)
    small.add_routes(np.zeros(small.num_links), ranks, np.roll(ranks, -1), 1.0)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("nodes", "segment"), [(4, 18), (18, 18), (19, 18), (20, 10), (36, 18), (64, 16), (256, 16), (624, 16)]
)
def test_domains_of_several_nodes_hold_equal_segments_of_a_job(nodes: int, segment: int) -> None:
    """The largest divisor of a job's nodes up to a domain's 18, and whole domains where that is 9 or less."""
    cluster = load_cluster("gb200-nvl72")
    assert cluster.node_link.segment(nodes) == segment
    assert Topology(cluster, nodes, 4).ranks_per_domain == 4 * segment


def test_named_slots_are_in_full_domains() -> None:
    cluster = load_cluster("gb200-nvl72")
    assert Topology(cluster, 20, 4, np.arange(8)).ranks_per_domain == 72
