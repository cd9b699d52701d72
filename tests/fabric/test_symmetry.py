"""One group may stand for all only where a symmetry of the fabric maps it on the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from zsim.fabric.folding.alike import are_alike, by_pattern
from zsim.plan.ops import Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.topology import Topology


def topology_with(nodes: int, **network: Any) -> Topology:
    table = Network.model_validate({"source": "made up for a test", "evidence": "assumed", **network})
    return Topology(load_cluster("dgx-h100").model_copy(update={"network": table}), nodes, 8)


def test_groups_within_equal_leaves_are_alike_and_those_across_their_border_are_not() -> None:
    """8 nodes, 2 per leaf: groups of 2 nodes each have their own leaf; with 4 per leaf, groups of 4 nodes
    too; groups of 3 nodes' GPUs (24 of 48) on leaves of 2 lie differently, and so
    do groups on a leaf that is half empty."""
    groups = {"shard": Group.regular("shard", 64, 16), "replicate": Group.regular("replicate", 64, 4, 16)}
    assert are_alike(topology_with(8, kind="fat-tree", nodes_per_leaf=2), groups)
    assert are_alike(topology_with(8, kind="rail-optimized", nodes_per_leaf=4), groups)
    half_full = topology_with(6, kind="fat-tree", nodes_per_leaf=4)
    assert not are_alike(half_full, {"shard": Group.regular("shard", 48, 16)})
    odd = {"shard": Group.regular("shard", 48, 24)}
    assert not are_alike(topology_with(6, kind="fat-tree", nodes_per_leaf=2), odd)
    assert are_alike(topology_with(6, kind="single-switch"), odd)


def test_hashed_paths_make_groups_unequal() -> None:
    hashed = topology_with(8, kind="fat-tree", nodes_per_leaf=1, routing="hash")
    assert not are_alike(hashed, {"shard": Group.regular("shard", 64, 16)})
    assert are_alike(hashed, {"world": Group.regular("world", 64)})


def test_groups_are_sorted_by_where_they_change_domains() -> None:
    """20 trays of an NVL72 (80 GPUs): of two groups of 40, the second leaves the first domain after 32."""
    topology = Topology(load_cluster("gb200-nvl72"), 20, 4)
    rows = np.arange(80).reshape(2, 40)
    assert [found.tolist() for found in by_pattern(topology, rows)] == [[row.tolist()] for row in rows]


@pytest.mark.parametrize(("cluster", "nodes"), [("roce-h100", 4), ("gb200-nvl72", 20), ("aws-p4d", 4)])
def test_folded_equals_unfolded_at_unequal_places_too(cluster: str, nodes: int) -> None:
    experiment = zsim.Experiment(
        model="gpt2", cluster=cluster, nodes=nodes, strategy={"kind": "fsdp2", "replicate": 2}
    )
    folded, unfolded = (zsim.simulate(experiment, unfold=unfold) for unfold in (False, True))
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)
