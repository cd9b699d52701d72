"""Collectives on an idle ring: nccl-tests' closed forms and NCCL's count of rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cost.collectives.rounds import (
    Rounds,
    all_to_all_rounds,
    bus_bytes,
    hierarchical_rounds,
    pat_rounds,
    ring_rounds,
)
from zsim.errors import NotSimulatedError

KINDS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]
LARGE, MANY = st.integers(0, 10**12), st.integers(1, 4096)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 700.0),  # S (n-1)/n
        ("reduce_scatter", 700.0),
        ("all_reduce", 1400.0),  # 2 S (n-1)/n
        ("broadcast", 800.0),  # S
        ("reduce", 800.0),
    ],
)
def test_each_edge_of_a_ring_of_eight_carries_its_share_of_800_bytes(kind: str, expected: float) -> None:
    assert bus_bytes(kind, 800, 8) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing_and_takes_no_rounds(kind: str) -> None:
    assert bus_bytes(kind, 10**9, 1) == 0
    assert ring_rounds(kind, 1, 1) == Rounds(0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bytes_load_no_edge(kind: str) -> None:
    assert bus_bytes(kind, 0, 8) == 0


def test_bus_bandwidth_factors_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n, broadcast, reduce 1."""
    factors = {kind: bus_bytes(kind, 1.0, 8) for kind in KINDS}
    assert factors == {
        "all_gather": 7 / 8,
        "reduce_scatter": 7 / 8,
        "all_reduce": 14 / 8,
        "broadcast": 1.0,
        "reduce": 1.0,
    }


@given(LARGE, MANY)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(full_bytes: int, num_ranks: int) -> None:
    both = bus_bytes("reduce_scatter", full_bytes, num_ranks) + bus_bytes("all_gather", full_bytes, num_ranks)
    assert bus_bytes("all_reduce", full_bytes, num_ranks) == pytest.approx(both)


@given(st.sampled_from(KINDS), LARGE, st.integers(2, 4096))
def test_a_larger_ring_never_carries_less_per_edge(kind: str, full_bytes: int, num_ranks: int) -> None:
    assert bus_bytes(kind, full_bytes, num_ranks) <= bus_bytes(kind, full_bytes, num_ranks + 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "expected"),
    [
        ("all_gather", 8, 1, Rounds(7, 0)),
        ("all_gather", 16, 2, Rounds(13, 2)),  # a piece that starts inside a node leaves a node twice
        ("reduce_scatter", 16, 2, Rounds(13, 2)),
        ("all_reduce", 8, 1, Rounds(14, 0)),
        ("all_reduce", 16, 2, Rounds(26, 4)),
        ("broadcast", 16, 2, Rounds(14, 2)),
        ("reduce", 8, 1, Rounds(8, 0)),
        ("all_gather", 4, 4, Rounds(0, 3)),  # one GPU per node: every round leaves it
    ],
)
def test_rounds_are_ncclTopoTuneModels(kind: str, ranks: int, nodes: int, expected: Rounds) -> None:
    """nsteps and nInterSteps of the ring in NCCL 2.21's src/graph/tuning.cc."""
    assert ring_rounds(kind, ranks, nodes) == expected


@given(st.sampled_from(KINDS), st.integers(1, 64), st.integers(1, 64))
def test_rounds_are_never_negative_and_add_up(kind: str, nodes: int, local: int) -> None:
    rounds = ring_rounds(kind, nodes * local, nodes)
    assert rounds.intra >= 0
    assert rounds.inter >= 0
    total = {"all_reduce": 2 * (nodes * local - 1), "broadcast": nodes * local, "reduce": nodes * local}
    if nodes * local > 1:
        assert rounds.intra + rounds.inter == total.get(kind, nodes * local - 1)


def test_hierarchical_rounds_go_around_the_node_and_then_around_the_nodes() -> None:
    """8 x 4: 7 inside and 3 across, an all-reduce twice that."""
    assert hierarchical_rounds("all_gather", 32, 4) == Rounds(7, 3)
    assert hierarchical_rounds("all_reduce", 32, 4) == Rounds(14, 6)


def test_what_is_no_collective_is_refused_by_name() -> None:
    with pytest.raises(NotSimulatedError, match="gossip"):
        bus_bytes("gossip", 8, 2)
    with pytest.raises(NotSimulatedError, match="gossip"):
        ring_rounds("gossip", 2, 1)


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (8, 1, (1, 0)),  # 7 peers, 16 at a time
        (17, 1, (1, 0)),
        (18, 1, (2, 0)),
        (16, 2, (0, 1)),
        (17, 17, (0, 1)),
        (18, 18, (0, 2)),
        (256, 32, (0, 2)),  # by nodes, not by ranks
    ],
)
def test_an_all_to_all_has_a_round_for_16_peers_or_nodes(
    ranks: int, nodes: int, expected: tuple[int, int]
) -> None:
    assert all_to_all_rounds(ranks, nodes) == Rounds(*expected)


@pytest.mark.parametrize(("ranks", "expected"), [(2, (2, 1)), (8, (8, 3)), (9, (9, 4))])
def test_pat_has_a_linear_part_and_a_tree(ranks: int, expected: tuple[int, int]) -> None:
    assert pat_rounds(ranks) == Rounds(*expected)
