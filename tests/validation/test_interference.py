"""Slow-downs both ways, planted in made recordings and found again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from validation.interference import IntervalUnion, collective_pairs, kernel_pairs, slowdown
from zsim.trace.readers.content import JsonStream
from zsim.trace.readers.kineto.file import load

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GRID: dict[str, Any] = {"grid": [512, 1, 1], "block": [128, 1, 1]}


def pairs_of(path: Path) -> Any:
    return kernel_pairs(load(path, JsonStream(path)).device_events)


def test_a_kernel_is_compared_with_itself_at_the_same_launch(kineto: Any, tmp_path: Path) -> None:
    """A product of 100 us takes 130 beside a collective, twice each way; the same name with another grid
    takes 300 beside it and is never alone; one is half covered and tells nothing."""
    file = kineto()
    file.step(1, 0, 10)
    file.launch("gemm", 0, 0, 100, **GRID)
    file.launch("gemm", 1, 100, 100, **GRID)
    file.launch(GATHER, 2, 200, 610, stream=20)
    file.launch("gemm", 3, 200, 130, **GRID)
    file.launch("gemm", 4, 330, 130, **GRID)
    file.launch("gemm", 5, 460, 300, grid=[64, 1, 1], block=[128, 1, 1])
    file.launch("gemm", 6, 760, 115, **GRID)
    (pair,) = pairs_of(file.write(tmp_path / "rank0.json"))
    assert (pair.name, pair.num_isolated, pair.num_overlapped) == ("gemm", 2, 2)
    assert pair.ratio == pytest.approx(1.3)
    assert "[512, 1, 1]" in pair.shape


def test_kernels_beside_kernels_and_kernels_too_short_for_the_clock_are_left_out(
    kineto: Any, tmp_path: Path
) -> None:
    """Both would say 2: one shares the GPU with another stream's, one takes 4 us and then 8."""
    file = kineto()
    file.step(1, 0, 10)
    file.launch("gemm", 0, 0, 100, **GRID)
    file.launch("tiny", 1, 100, 4, **GRID)
    file.launch(GATHER, 2, 200, 600, stream=20)
    file.launch("gemm", 3, 200, 200, **GRID)
    file.launch("other", 4, 300, 200, stream=9)
    file.launch("tiny", 5, 600, 8, **GRID)
    assert pairs_of(file.write(tmp_path / "rank0.json")) == []


def gathers(kineto: Any, metadata: Any, folder: Path, ranks: tuple[int, ...]) -> zsim.Trace:
    """Two gatherings of two ranks. The first takes 40 us alone, for which rank 0 waited 100; the second 60 us
    beside a kernel of rank 1."""
    for rank in ranks:
        file = kineto(rank=rank)
        file.step(1, 0, 1000)
        for number, start, wait, length in ((0, 10, 100, 40), (1, 300, 0, 60)):
            begin = start if rank == 0 else start + wait
            args = metadata("_allgather_base", 1_000_000, 2_000_000, [0, 1], number)
            file.launch(GATHER, number, begin, start + wait + length - begin, stream=20, **args)
        if rank == 1:
            file.launch("gemm", 5, 290, 100)
        file.write(folder / f"rank{rank}.json")
    return zsim.read_trace(folder)


def test_a_collectives_transfer_counts_and_not_its_wait_for_the_last(
    kineto: Any, metadata: Any, tmp_path: Path
) -> None:
    (pair,) = collective_pairs(gathers(kineto, metadata, tmp_path, (0, 1)))
    assert (pair.num_isolated, pair.num_overlapped) == (2, 2)
    assert (pair.isolated_seconds, pair.overlapped_seconds) == pytest.approx((40e-6, 60e-6))
    assert slowdown([pair]) == pytest.approx(1.5)


def test_of_one_recorded_rank_the_shortest_call_counts_whatever_it_waited(
    kineto: Any, metadata: Any, tmp_path: Path
) -> None:
    """Rank 1 came last, so it knows; rank 0 saw no kernel of its own."""
    (pair,) = collective_pairs(gathers(kineto, metadata, tmp_path, (1,)))
    assert (pair.isolated_seconds, pair.overlapped_seconds) == pytest.approx((40e-6, 60e-6))
    (tmp_path / "rank1.json").unlink()
    assert collective_pairs(gathers(kineto, metadata, tmp_path, (0,))) == []


@given(
    intervals=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12),
    start=st.integers(0, 80),
    length=st.integers(1, 40),
)
def test_a_share_is_what_counting_every_moment_finds(
    intervals: list[tuple[int, int]], start: int, length: int
) -> None:
    covered = IntervalUnion((begin, begin + size) for begin, size in intervals)
    moments = range(start, start + length)
    inside = [any(begin <= moment < begin + size for begin, size in intervals) for moment in moments]
    assert covered.share(start, start + length) == pytest.approx(sum(inside) / length)


EXTERNAL = os.environ.get("ZSIM_EXTERNAL_TRACES")
RESNET = Path(EXTERNAL or "") / "resnet50_ddp_2xA100_rank0_nccl_data.json.gz"


@pytest.mark.skipif(not EXTERNAL, reason="needs other people's traces: set ZSIM_EXTERNAL_TRACES")
def test_the_recorded_a100_runs_its_kernels_a_twentieth_slower_beside_nccl() -> None:
    """34 kinds of kernels, 5.83 ms of them alone: 8 blocks of NCCL on 108 SMs."""
    found = pairs_of(RESNET)
    assert len(found) == 34
    assert slowdown(found) == pytest.approx(1.046, abs=0.001)
