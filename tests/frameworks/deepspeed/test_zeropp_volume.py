"""What ZeRO++ and MiCS send inside nodes and between them, counted by hand.

A node of g = 8 GPUs lets out, per byte of the full tensor among n GPUs on k nodes: (n-1)/n for an all-gather
or a reduce-scatter over all of them, (k-1)/k for an all-to-all of what its GPUs hold. Llama-2-7B:
6,738,415,616 elements, 266,240 of them in 65 norms; no two modules share a weight, so that with nothing kept
every weight is gathered once in forward and once in backward.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from tests.frameworks.deepspeed.zeropp_jobs import HPZ, NOTHING_KEPT, QGZ, QWZ, experiment_of
from zsim.report.traffic import SentRow

NORMS = 65 * 4096
WEIGHTS = 6_738_415_616 - NORMS
SCALES = 4 * (32 * (4 * 4096 + 3 * 11008) + 2 * 32000)  # of qgZ, inside the node


def sent(zero: dict[str, Any], nodes: int = 2, **options: Any) -> tuple[SentRow, ...]:
    options.setdefault("micro_batch_size", 1)
    experiment = experiment_of({**NOTHING_KEPT, **zero}, model="llama-2-7b", nodes=nodes, **options)
    return zsim.simulate(experiment).report.sent


def between(rows: tuple[SentRow, ...], *phases: str, kind: str = "") -> float:
    """Bytes that leave a node for others."""
    return 8 * sum(
        row.inter_node_bytes_per_gpu
        for row in rows
        if (not phases or row.phase in phases) and kind in ("", row.kind)
    )


def inside(rows: tuple[SentRow, ...], phase: str, kind: str) -> float:
    """Bytes that one GPU sends over NVLink."""
    return sum(row.intra_node_bytes_per_gpu for row in rows if (row.phase, row.kind) == (phase, kind))


def test_hpz_takes_backward_all_gathers_off_infiniband() -> None:
    """2 nodes: 2 W 15/16 bytes leave a node in backward without it, none with it; the ring inside the node
    carries 2 W 7/8 per GPU instead of 2 W 15/16."""
    plain, hpz = sent({}), sent(HPZ)
    assert between(plain, "backward", kind="all_gather") == pytest.approx(2 * WEIGHTS * 15 / 16)
    assert between(hpz, "backward", kind="all_gather") == 0
    assert inside(hpz, "backward", "all_gather") == pytest.approx(2 * WEIGHTS * 7 / 8)
    assert between(hpz, "forward") == between(plain, "forward") == pytest.approx(2 * WEIGHTS * 15 / 16)
    assert between(hpz, "backward") == pytest.approx(2 * (WEIGHTS + NORMS) * 15 / 16)


def test_all_three_cut_three_model_volumes_to_three_quarters() -> None:
    """ZeRO++, table 1: 3M to 0.75M between nodes. 32 nodes, M = 2 bytes per element: (M + M + M) 255/256
    without; M/2 255/256 of weights, nothing in backward, M/4 31/32 of gradients with, and the scales."""
    volume = 2 * WEIGHTS
    plain, three = sent({}, 32), sent({**HPZ, **QWZ, **QGZ}, 32)
    assert between(plain, "forward", "backward") / volume == pytest.approx(3 * 255 / 256, rel=1e-4)
    quantised = between(three, "forward", "backward") / volume
    assert quantised == pytest.approx(255 / 256 / 2 + 31 / 32 / 4, rel=2e-3)
    assert quantised < 0.75


def test_each_switch_takes_what_the_paper_says_off_the_network() -> None:
    """qwZ half of either all-gather, hpZ the second one, qgZ three quarters of the gradients and more,
    because only one of two pieces leaves a node: M/4 1/2 instead of M 15/16."""
    volume = 2 * WEIGHTS
    plain = between(sent({}), "forward", "backward")
    assert plain / volume == pytest.approx(3 * 15 / 16, rel=1e-4)
    saved = {name: plain - between(sent(zero), "forward", "backward") for name, zero in SWITCHES.items()}
    assert saved["qwZ"] / volume == pytest.approx(15 / 16, rel=1e-3)
    assert saved["hpZ"] / volume == pytest.approx(15 / 16, rel=1e-4)
    assert saved["qgZ"] / volume == pytest.approx(15 / 16 - 1 / 8, rel=1e-3)


SWITCHES = {"hpZ": HPZ, "qwZ": QWZ, "qgZ": QGZ}


def test_gradients_are_exact_to_the_byte() -> None:
    """Inside: the int4 and its scales over 8 GPUs; between 2 nodes: an eighth of both. Norms go over 16."""
    rows = {(row.kind, row.group): row for row in sent(QGZ) if row.phase == "backward"}
    local, across = rows["all_to_all", "local"], rows["all_to_all", "global"]
    assert local.intra_node_bytes_per_gpu == pytest.approx((WEIGHTS / 2 + SCALES) * 7 / 8, rel=1e-12)
    assert local.inter_node_bytes_per_gpu == across.intra_node_bytes_per_gpu == 0
    assert across.inter_node_bytes_per_gpu == pytest.approx((WEIGHTS / 2 + SCALES) / 8 / 2, rel=1e-12)
    norms = rows["reduce_scatter", "world"]
    assert norms.inter_node_bytes_per_gpu == pytest.approx(2 * NORMS * 15 / 16 / 8, rel=1e-12)


def test_mics_leaves_only_the_all_reduce_between_nodes() -> None:
    """4 nodes, groups of one: 2 T / 8 bytes per GPU, all-reduced among 4: twice 3/4 of them. All three of
    ZeRO's volumes stay on NVLink."""
    rows = sent({"mics_shard_size": 8}, 4, version="0.19.2")
    assert between(rows, "forward") == 0
    assert between(rows, "backward") == pytest.approx(2 * (WEIGHTS + NORMS) * 2 * 3 / 4)
    assert {row.kind for row in rows if row.inter_node_bytes_per_gpu > 100} == {"all_reduce"}


def test_hierarchical_gathers_cross_once_per_node() -> None:
    """Groups of two nodes: a ring over 16 GPUs lets 15/16 of M out of a node, the first stage an eighth of M
    per GPU, half of it from the other node: M/2 per node."""
    flat, staged = (
        sent({"mics_shard_size": 16, "mics_hierarchical_params_gather": flag}, 4, version="0.19.2")
        for flag in (False, True)
    )
    assert between(flat, "forward") == pytest.approx(2 * WEIGHTS * 15 / 16)
    assert between(staged, "forward") == pytest.approx(2 * WEIGHTS / 2)


def test_secondary_shards_serve_later_micro_batches() -> None:
    """Of three micro-batches' six passes only the first leaves the node."""
    rows = sent(HPZ, steps=3)
    gathers = between(rows, "forward", "backward", kind="all_gather")
    assert gathers == pytest.approx(2 * WEIGHTS * 15 / 16)
    assert inside(rows, "backward", "all_gather") == pytest.approx(3 * 2 * WEIGHTS * 7 / 8)
