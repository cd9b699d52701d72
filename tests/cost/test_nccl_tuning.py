"""NCCL's own estimates, worked out by hand from src/graph/tuning.cc and search.cc."""

from __future__ import annotations

import pytest

from zsim.cost.collectives.nccl_tuning import Machine, nccl_seconds

# Eight Voltas with 120 GB/s inside and one port of 12.5 GB/s.
VOLTA = Machine("volta", 120e9, 12.5e9, has_nvlink=True, channels=2, network_overhead=1e-6)
SIZE = 2.0**40  # latencies do not matter


@pytest.mark.parametrize(
    ("nodes", "ring", "tree"), [(2, 12.5 * 16 / 30, 25.0 * 0.92 / 2), (4, 12.5 * 32 / 62, 12.5 * 0.92 / 2)]
)
def test_trees_on_two_nodes_are_planned_with_twice_what_goes_between_them(
    nodes: int, ring: float, tree: float
) -> None:
    """On a ring 2 (n - 1) parts of 1/n go through the port, 6.7 GB/s of a tensor on 16 ranks; of two trees a
    node sends one half up and the other half down: 11.5. On four nodes a tree gains nothing, 5.75,
    and NCCL takes the ring."""
    for algorithm, rate in (("ring", ring), ("tree", tree)):
        seconds = nccl_seconds(VOLTA, "all_reduce", algorithm, "simple", SIZE, 8 * nodes, nodes)
        assert SIZE / seconds / 1e9 == pytest.approx(rate, rel=1e-3)


def test_a_tree_on_two_nodes_gets_no_more_than_there_is_inside() -> None:
    """15 GB/s of PCIe inside are less than twice the port's 12.5: 15 x 0.92 / 2."""
    pcie = Machine("volta", 15e9, 12.5e9, has_nvlink=False, channels=2, network_overhead=1e-6)
    seconds = nccl_seconds(pcie, "all_reduce", "tree", "simple", SIZE, 16, 2)
    assert SIZE / seconds / 1e9 == pytest.approx(6.9, rel=1e-3)
