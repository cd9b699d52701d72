"""Fabrics as they are drawn: what is folded, and that no link is lost by folding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import Drawing, draw_fabric


def drawn(name: str, nodes: int) -> Drawing:
    cluster = load_cluster(name)
    return draw_fabric(Topology(cluster, nodes, cluster.gpus_per_node))


def test_pods_of_a_rail_optimised_tree_are_folded() -> None:
    """128 nodes, 32 to a pod: each pod's nodes in boxes of 8, its 8 leaves one circle, 16 spines another."""
    found = {box.name: box.devices for box in drawn("dgx-superpod-h100", 128).boxes}
    nodes = {name: count for name, count in found.items() if name.startswith("nodes")}
    assert list(nodes)[:2] == ["nodes 0-7", "nodes 8-15"]
    assert list(nodes.values()) == [8] * 16
    assert [count for name, count in found.items() if " x leaf" in name] == [8] * 4
    assert [count for name, count in found.items() if " x spine" in name] == [16]


def test_many_pods_share_boxes_and_few_nodes_are_not_folded() -> None:
    """1,024 nodes are 32 pods, two to a box; 24 nodes are 24 boxes."""
    boxes = [box for box in drawn("dgx-superpod-h100-3-level", 1024).boxes if box.is_nodes]
    assert [box.devices for box in boxes] == [64] * 16
    assert sum(box.is_nodes for box in drawn("dgx-h100", 24).boxes) == 24
    assert not drawn("dgx-h100", 24).is_folded
    assert drawn("dgx-h100", 25).is_folded


@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-h100", 100), ("dgx-superpod-h100", 128), ("gb200-nvl72", 72), ("aws-p5", 64)]
)
def test_folding_loses_no_link_of_the_network_and_none_inside_nodes(name: str, nodes: int) -> None:
    """Every link between different boxes is on one line, every link inside nodes in one box."""
    cluster = load_cluster(name)
    topology = Topology(cluster, nodes, cluster.gpus_per_node)
    found = draw_fabric(topology)
    first = topology.classes["nic_out"].first
    on_lines = np.concatenate([line.links for line in found.lines])
    inside = np.concatenate([own for box in found.boxes for own in box.links.values()])
    assert len(set(on_lines.tolist())) == len(on_lines)
    assert sorted(on_lines.tolist()) == list(range(first, topology.num_links))
    assert sorted(inside.tolist()) == list(range(first))


@pytest.mark.parametrize(
    ("network", "nodes", "boxes", "lines"),
    [
        ('kind = "torus"\nshape = [4, 4, 2]', 32, 32, 32 + 32 + 16),
        (
            'kind = "dragonfly"\nnodes_per_router = 2\nrouters_per_group = 8\nglobal_links_per_router = 4',
            160,
            10,
            45,
        ),
    ],
)
def test_direct_fabrics_hold_their_nodes(
    tmp_path: Path, network: str, nodes: int, boxes: int, lines: int
) -> None:
    """A 4 x 4 x 2 torus has 32 cables along x and y and 16 pairs along z; ten groups are joined by 45
    trunks."""
    path = tmp_path / "mine.toml"
    origin = 'source = "made up for a test"\nevidence = "assumed"'
    path.write_text(f'schema = 1\nextends = "dgx-h100"\n[network]\n{origin}\n{network}\n')
    found = drawn(str(path), nodes)
    assert len(found.boxes) == boxes
    assert len(found.lines) == lines
    assert len(set(found.positions().values())) == boxes
