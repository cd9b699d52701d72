"""One group may stand for all only where a symmetry of the fabric maps it on the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from zsim.fabric.algorithms.link_usage import link_usage
from zsim.fabric.algorithms.methods import Shape, UnequalShape
from zsim.fabric.algorithms.rings import partition_by_pattern
from zsim.fabric.folding.classes import JobPlacement, refine_classes
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.experiment.load import build_experiment
from zsim.specs.topology.topology import Topology


def topology_with(nodes: int, **network: Any) -> Topology:
    table = Network.model_validate({"source": "made up for a test", "evidence": "assumed", **network})
    return Topology(load_cluster("dgx-h100").model_copy(update={"network": table}), nodes, 8)


def are_alike(topology: Topology, groups: dict[str, Group]) -> bool:
    """Whether the groups' gathers load the links of all ranks alike, so that one rank stands for all."""
    works = [Collective("all_gather", 10**9, "bf16", name) for name in groups]
    placed = JobPlacement(topology, groups, works, np.zeros(topology.world_size, dtype=np.int64))
    return len(refine_classes([placed])[0].sizes) == 1


def test_groups_within_equal_leaves_are_alike_and_those_across_their_border_are_not() -> None:
    """8 nodes, 2 per leaf: groups of 2 nodes each have their own leaf; with 4 per leaf, groups of 4 nodes
    too, also under a leaf that is half empty. Groups of 3 nodes (24 of 48 GPUs) on leaves of 2 mirror one
    another; of groups of 2 nodes on leaves of 3, the second alone crosses the border."""
    groups = {"shard": Group.regular("shard", 64, 16), "replicate": Group.regular("replicate", 64, 4, 16)}
    assert are_alike(topology_with(8, kind="fat-tree", nodes_per_leaf=2), groups)
    assert are_alike(topology_with(8, kind="rail-optimized", nodes_per_leaf=4), groups)
    half_full = topology_with(6, kind="fat-tree", nodes_per_leaf=4)
    assert are_alike(half_full, {"shard": Group.regular("shard", 48, 16)})
    odd = {"shard": Group.regular("shard", 48, 24)}
    assert are_alike(topology_with(6, kind="fat-tree", nodes_per_leaf=2), odd)
    pairs = {"shard": Group.regular("shard", 48, 16)}
    assert not are_alike(topology_with(6, kind="fat-tree", nodes_per_leaf=3), pairs)
    assert are_alike(topology_with(6, kind="single-switch"), odd)


def test_hashed_paths_make_groups_unequal() -> None:
    hashed = topology_with(8, kind="fat-tree", nodes_per_leaf=1, routing="hash")
    assert not are_alike(hashed, {"shard": Group.regular("shard", 64, 16)})
    assert are_alike(hashed, {"world": Group.regular("world", 64)})


def test_groups_are_sorted_by_where_they_change_domains() -> None:
    """19 trays of an NVL72 (76 GPUs): of two groups of 38, the second leaves the first domain after 34."""
    topology = Topology(load_cluster("gb200-nvl72"), 19, 4)
    rows = np.arange(76).reshape(2, 38)
    assert [found.tolist() for found in partition_by_pattern(topology, rows)] == [
        [row.tolist()] for row in rows
    ]


@pytest.mark.parametrize(("cluster", "nodes"), [("roce-h100", 4), ("gb200-nvl72", 19), ("aws-p4d", 4)])
def test_folded_equals_unfolded_at_unequal_places_too(cluster: str, nodes: int) -> None:
    experiment = zsim.Experiment(
        model="gpt2", cluster=cluster, nodes=nodes, strategy={"kind": "fsdp2", "replicate": 2}
    )
    folded, unfolded = (zsim.simulate(experiment, unfold=unfold) for unfold in (False, True))
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    "shape", ["ring", "tree", "nvls", "hierarchical", "all_to_all", "all_to_all_by_rail", "unequal"]
)
def test_trays_named_in_turns_from_two_domains_use_the_links_of_trays_in_order(shape: str) -> None:
    """Trays 0, 18, 1, 19 of NVL72s, `placement.nodes = "0,18,1,19"`: NCCL puts the ranks of a domain together
    whatever their numbers. In-switch reduction sent nothing between the domains."""
    topology = Topology(load_cluster("gb200-nvl72"), 36, 4)
    turns = np.concatenate([np.arange(4) + 4 * tray for tray in (0, 18, 1, 19)])[None]
    equal = tuple((1,) * 16 for _ in range(16))
    form: Shape = UnequalShape("all_to_all_by_rail", equal) if shape == "unequal" else shape
    found, expected = (link_usage(form, topology, rows) for rows in (turns, np.sort(turns, axis=1)))
    np.testing.assert_allclose(found, expected)
    assert found[topology.classes["nic_out"].first :].any()


def test_groups_that_come_back_to_a_domain_are_apart_from_those_that_do_not() -> None:
    """Both go to another domain after each member."""
    topology = Topology(load_cluster("gb200-nvl72"), 54, 4)
    rows = np.array([[0, 72, 4, 76], [8, 80, 144, 12]])
    assert [found.tolist() for found in partition_by_pattern(topology, rows)] == [
        [row.tolist()] for row in rows
    ]


def test_trees_of_groups_that_share_cards_fill_alike_folded_and_unfolded() -> None:
    """Four data-parallel groups on two cards of each of two nodes: a chunk on a tree's edge takes as long as
    the others leave it, though each group is a communicator by itself. The step was 0.5 % shorter."""
    file = {"model": "gpt2", "cluster": "dgx-2", "nodes": 2, "strategy": {"kind": "megatron"}}
    two_cards = {"cluster.gpus_per_node": 8, "cluster.nic.per_node": 2}
    changes = {"model.n_layer": 2, "parallelism.tensor": 4, **two_cards}
    experiment = build_experiment(file, changes, origin="test")
    folded, unfolded = (zsim.simulate(experiment, unfold=unfold) for unfold in (False, True))
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)


def test_groups_of_unequal_places_in_a_node_are_not_alike() -> None:
    """Pairs of six GPUs on PCIe, three to a switch: the second crosses the host, the others do not. Seven
    GPUs of a node, four of which share one of two cards. Eight are even."""
    pcie = load_cluster("a100-pcie-x8")
    three = pcie.model_copy(update={"pcie": pcie.pcie.model_copy(update={"gpus_per_switch": 3})})
    assert not are_alike(Topology(three, 1, 6), {"shard": Group.regular("shard", 6, 2)})
    assert not are_alike(Topology(pcie, 2, 7), {"replicate": Group.regular("replicate", 14, 2, 7)})
    assert are_alike(Topology(pcie, 2, 8), {"replicate": Group.regular("replicate", 16, 2, 8)})
    assert are_alike(Topology(pcie, 2, 8), {"shard": Group.regular("shard", 16, 4)})


def test_pairs_across_a_pcie_switch_are_simulated_apart_from_those_under_one() -> None:
    """The folded step was 0.1 % shorter than that of all ranks."""
    file = {"model": "gpt2", "cluster": "a100-pcie-x8", "strategy": {"kind": "fsdp2", "replicate": 3}}
    six = {"nodes": 1, "cluster.gpus_per_node": 6, "cluster.pcie.gpus_per_switch": 3, "model.n_layer": 2}
    experiment = build_experiment(file, six, origin="test")
    folded, unfolded = (zsim.simulate(experiment, unfold=unfold) for unfold in (False, True))
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)
