"""The one-activity model of a collective against its rounds, played message by message."""

from __future__ import annotations

from typing import Any

import pytest
import simpy

from zsim.fabric.fabric import Fabric
from zsim.fabric.rounds import Rounds
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.specs.cluster_files import load_cluster
from zsim.specs.hardware import Cluster, Network, ProtocolCosts
from zsim.specs.topology import Topology

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
    "mesh": ("mi300x-x8", {}),
    "PCIe": ("rtx-4090-x8", {}),
}


def cluster_of(name: str) -> Cluster:
    preset, network = FABRICS[name]
    cluster = load_cluster(preset)
    plain = cluster.collectives.model_copy(update={"algorithms": {}})
    changes: dict[str, Any] = {"collectives": plain}
    if network:
        origin = {"source": "made up for a test", "evidence": "assumed"}
        changes["network"] = Network.model_validate({**origin, **network})
    return cluster.model_copy(update=changes)


def one_activity(topology: Topology, kind: CollectiveKind, size: int, algorithm: str, protocol: str) -> float:
    ranks = topology.world_size
    work = Collective(kind, size, "bf16", "world")
    fabric = Fabric(
        simpy.Environment(), topology, {"world": Group("world", ranks)}, is_folded=True, works=[work]
    )
    [found] = [o for o in fabric.options(work) if (o.algorithm, o.protocol) == (algorithm, protocol)]
    return found.seconds_alone


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("name", [name for name in FABRICS if name != "mesh"])
def test_a_ring_takes_as_long_as_its_rounds(name: str, kind: CollectiveKind) -> None:
    """32 ranks, 1 KiB to 1 GiB, within 1 % (3 % asked for). A mesh runs more rings than one channel's."""
    cluster = cluster_of(name)
    topology = Topology(cluster, 32 // cluster.gpus_per_node, cluster.gpus_per_node)
    costs = cluster.collectives.protocols["simple"]
    for size in SIZES:
        played = Rounds(topology, range(32), costs).ring(kind, size)
        assert one_activity(topology, kind, size, "ring", "simple") == pytest.approx(played, rel=0.01)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 4), (2, 8), (8, 1), (8, 8)])
def test_a_ring_takes_as_long_as_its_rounds_on_8_to_64_ranks(nodes: int, gpus: int) -> None:
    cluster = cluster_of("one switch")
    topology = Topology(cluster, nodes, gpus)
    for protocol, costs in cluster.collectives.protocols.items():
        for size in SIZES:
            played = Rounds(topology, range(nodes * gpus), costs).ring("all_gather", size)
            assert one_activity(topology, "all_gather", size, "ring", protocol) == pytest.approx(
                played, rel=0.01
            )


@pytest.mark.parametrize(("nodes", "gpus", "pieces"), [(2, 4, 256), (4, 2, 256), (8, 1, 256), (2, 8, 512)])
def test_a_double_tree_takes_as_long_as_its_rounds(nodes: int, gpus: int, pieces: int) -> None:
    """Within 3 %: filling and draining the tree costs one piece per level, which is 1 to 3 %."""
    cluster = cluster_of("one switch")
    costs = cluster.collectives.protocols["simple"]
    plain = cluster.collectives.model_copy(update={"algorithms": {"tree": {"simple": costs}}})
    topology = Topology(cluster.model_copy(update={"collectives": plain}), nodes, gpus)
    for size in SIZES:
        played = Rounds(topology, range(nodes * gpus), costs).tree(size, pieces)
        assert one_activity(topology, "all_reduce", size, "tree", "simple") == pytest.approx(played, rel=0.03)


@pytest.mark.parametrize("name", FABRICS)
def test_an_all_to_all_takes_as_long_as_its_rounds(name: str) -> None:
    """Direct, 32 ranks. On a dragonfly and on a torus rounds load other links than all pairs at once."""
    cluster = cluster_of(name)
    topology = Topology(cluster, 32 // cluster.gpus_per_node, cluster.gpus_per_node)
    costs = cluster.collectives.protocols["simple"]
    for size in SIZES:
        played = Rounds(topology, range(32), costs).all_to_all(size)
        model = one_activity(topology, "all_to_all", size, "direct", "simple")
        if name in ("dragonfly", "torus"):
            assert 0.5 * played < model <= played * 1.001
        else:
            assert model == pytest.approx(played, rel=0.03)


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
    assert Rounds(topology, range(8), costs).ring("all_gather", 0) == pytest.approx(71e-6)
