"""The one-activity model of a collective against its rounds, played message by message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy

from tests.oracles.rounds import Rounds
from zsim.cost.collectives.rounds import tree_pieces
from zsim.fabric.fabric import Fabric, idle_fabric
from zsim.plan.ops import Collective, CollectiveKind, Group, SplitSizes
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.collectives import ProtocolCosts
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.topology import Topology

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = [KIB, MIB, 32 * MIB, GIB]
FABRICS: dict[str, tuple[str, dict[str, Any]]] = {
    "one switch": ("dgx-h100", {}),
    "tree 2:1": ("dgx-a100-80gb", {"kind": "fat-tree", "nodes_per_leaf": 1, "oversubscription": 2.0}),
    "three levels": (
        "dgx-h100",
        {"kind": "fat-tree", "levels": 3, "nodes_per_leaf": 1, "leaves_per_pod": 2},
    ),
    "rails": ("dgx-h100", {"kind": "rail-optimized", "nodes_per_leaf": 4}),
    "planes": ("dgx-h100", {"kind": "rail-optimized", "nodes_per_leaf": 2, "planes": 2}),
    "dragonfly": ("dgx-h100", {"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 2}),
    "torus": ("dgx-h100", {"kind": "torus", "shape": (2, 2, 2)}),
    "NVL72": ("gb200-nvl72", {}),
    "longer links": ("roce-h100", {}),
    "mesh": ("mi300x-x8", {}),
    "PCIe": ("rtx-4090-x8", {}),
}


def cluster_of(name: str) -> Cluster:
    preset, network = FABRICS[name]
    cluster = load_cluster(preset)
    # Ramps are measured on top of rounds, not played.
    flat = {
        name: costs.model_copy(update={"ramp": 0.0, "network_ramp": 0.0})
        for name, costs in cluster.collectives.protocols.items()
    }
    plain = cluster.collectives.model_copy(update={"algorithms": {}, "protocols": flat})
    changes: dict[str, Any] = {"collectives": plain}
    if network:
        origin = {"source": "made up for a test", "evidence": "assumed"}
        changes["network"] = Network.model_validate({**origin, **network})
    return cluster.model_copy(update=changes)


def one_activity(topology: Topology, kind: CollectiveKind, size: int, algorithm: str, protocol: str) -> float:
    ranks = topology.world_size
    work = Collective(kind, size, "bf16", "world")
    fabric = Fabric(
        simpy.Environment(),
        topology,
        {"world": Group.regular("world", ranks)},
        is_folded=True,
        collectives=[work],
    )
    [found] = [o for o in fabric.options(work) if (o.algorithm, o.protocol) == (algorithm, protocol)]
    return found.isolated_seconds


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("name", [name for name in FABRICS if name != "mesh"])
def test_a_ring_takes_as_long_as_its_rounds(name: str, kind: CollectiveKind) -> None:
    """32 ranks, 1 KiB to 1 GiB, within 1 % (3 % asked for). A mesh runs more rings than one channel's."""
    cluster = cluster_of(name)
    topology = Topology(cluster, 32 // cluster.gpus_per_node, cluster.gpus_per_node)
    costs = cluster.collectives.protocols["simple"]
    for size in SIZES:
        played = Rounds(topology, np.arange(32), costs).ring(kind, size)
        assert one_activity(topology, kind, size, "ring", "simple") == pytest.approx(played, rel=0.01)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 4), (2, 8), (8, 1), (8, 8)])
def test_a_ring_takes_as_long_as_its_rounds_on_8_to_64_ranks(nodes: int, gpus: int) -> None:
    cluster = cluster_of("one switch")
    topology = Topology(cluster, nodes, gpus)
    for protocol, costs in cluster.collectives.protocols.items():
        for size in SIZES:
            played = Rounds(topology, np.arange(nodes * gpus), costs).ring("all_gather", size)
            assert one_activity(topology, "all_gather", size, "ring", protocol) == pytest.approx(
                played, rel=0.01
            )


def tree_and_its_rounds(name: str, nodes: int, gpus: int, size: int, protocol: str) -> tuple[float, float]:
    """Seconds of the one activity, and of the messages, in as many pieces as NCCL has."""
    cluster = cluster_of(name)
    costs = cluster.collectives.protocols[protocol]
    plain = cluster.collectives.model_copy(update={"algorithms": {"tree": {protocol: costs}}})
    topology = Topology(cluster.model_copy(update={"collectives": plain}), nodes, gpus)
    domains = nodes // cluster.node_link.nodes_per_domain
    pieces = tree_pieces(protocol, size, plain.channels, nodes * gpus, domains)
    played = Rounds(topology, np.arange(nodes * gpus), costs).tree(size, pieces)
    return one_activity(topology, "all_reduce", size, "tree", protocol), played


@pytest.mark.parametrize("size", [KIB, MIB, GIB])
@pytest.mark.parametrize("name", [name for name in FABRICS if name != "NVL72"])
def test_a_double_tree_takes_as_long_as_its_rounds(name: str, size: int) -> None:
    """4 nodes of 8, filling and draining included: within 0.1 % (3 % asked for). 1 KiB is one piece, which
    passes all 18 edges whole; 1 GiB is 128 pieces, and filling the trees takes a tenth of it. The 32 GPUs of
    an NVL72 are one domain, without trees."""
    model, played = tree_and_its_rounds(name, 4, 8, size, "simple")
    assert model == pytest.approx(played, rel=0.001)


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 4), (8, 1), (5, 4), (8, 8), (64, 1)])
@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_a_double_tree_takes_as_long_as_its_rounds_on_8_to_64_ranks(
    protocol: str, nodes: int, gpus: int
) -> None:
    """An odd number of nodes (a shifted second tree), chains of 1, 4 and 8."""
    for size in (64 * KIB, 8 * MIB):
        model, played = tree_and_its_rounds("one switch", nodes, gpus, size, protocol)
        assert model == pytest.approx(played, rel=0.001)


@pytest.mark.parametrize("name", list(FABRICS))
def test_an_all_to_all_takes_as_long_as_its_rounds(name: str) -> None:
    """Direct, 32 and 64 ranks, node after node, 16 at a time: 31 peers inside an NVL72 are two turns. Rounds
    that load different links share them with those beside, as on dragonflies and tori."""
    cluster = cluster_of(name)
    costs = cluster.collectives.protocols["simple"]
    for ranks in (32, 64):
        per_node = min(cluster.gpus_per_node, ranks)
        topology = Topology(cluster, ranks // per_node, per_node)
        for size in (*SIZES, 64 * KIB):
            played = Rounds(topology, np.arange(ranks), costs).all_to_all(size)
            model = one_activity(topology, "all_to_all", size, "direct", "simple")
            assert model == pytest.approx(played, rel=0.01)


def test_rounds_one_after_the_other_take_their_latency_each() -> None:
    """Seven other nodes, a byte each: seven rounds where one would do."""
    topology = Topology(cluster_of("one switch"), 8, 8)
    costs = cluster_of("one switch").collectives.protocols["simple"]
    one, seven = (Rounds(topology, np.arange(64), costs).all_to_all(64, n) for n in (7, 1))
    assert seven - one == pytest.approx(6 * (one - costs.base), rel=0.01)


def test_rounds_without_bytes_take_their_latency() -> None:
    """8 ranks on 2 nodes: base 1 us, 7 edges on a piece's way, 2 between nodes: 1 + 5 x 2 + 2 x 30."""
    costs = ProtocolCosts.model_validate(
        {
            "base": "1 us",
            "intra_round": "2 us",
            "inter_round": "30 us",
            "intra_fraction": 1,
            "inter_fraction": 1,
        }
    )
    topology = Topology(cluster_of("one switch"), 2, 4)
    assert Rounds(topology, np.arange(8), costs).ring("all_gather", 0) == pytest.approx(71e-6)


def skewed(size: int, ranks: int) -> SplitSizes:
    """A table as of tokens to experts: every member sends about `size` bytes, more of them to some members
    than to others, each with a different spread."""
    generator = np.random.default_rng(1)
    popularity = generator.dirichlet(np.full(ranks, 8.0))
    shares = generator.dirichlet(popularity * ranks * 8, size=ranks)
    return tuple(tuple(int(size * share) for share in row) for row in shares)


@pytest.mark.parametrize("name", list(FABRICS))
def test_an_all_to_all_of_unequal_parts_takes_as_long_as_its_messages(name: str) -> None:
    """16 ranks, where the busiest link carries up to 1.6 times what it does in equal parts: within 0.1 %.
    Where a spine is the limit but cards are too at times (2:1), messages end up to an eighth later: senders
    do not hold back what others are waiting for."""
    cluster = cluster_of(name)
    costs = cluster.collectives.protocols["simple"]
    per_node = min(cluster.gpus_per_node, 16)
    topology = Topology(cluster, 16 // per_node, per_node)
    group = Group.regular("world", 16)
    for size in (64 * KIB, 32 * MIB):
        parts = skewed(size, 16)
        work = Collective.all_to_all(parts, "bf16", "world")
        played = Rounds(topology, np.arange(16), costs).unequal_all_to_all(parts)
        options = idle_fabric(topology, group, [work]).options(work)
        [model] = [
            one.isolated_seconds for one in options if (one.algorithm, one.protocol) == ("direct", "simple")
        ]
        assert played * (0.875 if name == "tree 2:1" else 0.999) < model < played * 1.001
