from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.conftest import KinetoBuilder
from tests.expect import there

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def two_ranks(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    clocks: tuple[int, ...] = (0, 0),
    calls: Sequence[str] = ("_allgather_base",) * 2,
) -> Path:
    """A file per rank with one step and collectives from `starts` to `ends` (microseconds)."""
    for rank in (0, 1):
        file = kineto(rank=rank, base=clocks[rank] * 1000)
        file.step(1, 0, 1000)
        file.launch("gemm", 1, 2, 5)
        for number, (start, end) in enumerate(zip(starts[rank], ends[rank], strict=True)):
            args = metadata(calls[rank], 1000, 2000, [0, 1], seq=number)
            file.launch(ALL_GATHER, start - 5, start, end - start, stream=20, **args)
        file.write(tmp_path / f"rank{rank}.json.gz")
    return tmp_path


def test_waiting_for_the_other_rank_is_not_transfer(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 0 is there at 100 us, rank 1 at 160; both are done at 172: the transfer took 12 us, not 72."""
    folder = two_ranks(kineto, metadata, tmp_path, starts=([100], [160]), ends=([172], [172]))
    trace = zsim.read_trace(folder)
    is_collective = [bool(info.group) for _, info, _, _ in trace.rows()]
    transfers = there(trace.transfer_seconds)[is_collective]
    assert transfers.tolist() == pytest.approx([12e-6, 12e-6])
    assert trace.metadata["transfers_bounded"] == 0


def test_the_transfer_is_no_longer_than_the_shortest_kernel(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 0's clock reads 3 us more than rank 1's, too little to tell: 15 us of one end to another start."""
    folder = two_ranks(kineto, metadata, tmp_path, starts=([103], [160]), ends=([175], [172]))
    trace = zsim.read_trace(folder)
    assert there(trace.transfer_seconds)[-1] == pytest.approx(12e-6)
    assert trace.metadata["clock_offsets_seconds"] == (0.0, 0.0)


def test_one_rank_alone_takes_the_shortest_of_its_repeats(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The same all-gather took 72, 12 and 40 us on rank 0; 12 us is the most that its transfer can take."""
    file = kineto(rank=0)
    file.step(1, 0, 1000)
    for seq, (start, length) in enumerate(((100, 72), (200, 12), (300, 40))):
        args = metadata("_allgather_base", 1000, 2000, [0, 1], seq=seq)
        file.launch(ALL_GATHER, start - 5, start, length, stream=20, **args)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert there(trace.transfer_seconds).tolist() == pytest.approx([12e-6] * 3)
    assert trace.metadata["transfers_bounded"] == 3
    assert any("1 of 2 ranks" in note for note in trace.metadata["notes"])


def test_clocks_are_set_by_the_collectives_ends(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 1's clock is 5,000 us ahead: its collectives end 5,000 us later, and never overlap rank 0's."""
    folder = two_ranks(
        kineto, metadata, tmp_path, ([100, 200], [160, 210]), ([172, 231], [172, 231]), clocks=(0, 5000)
    )
    trace = zsim.read_trace(folder)
    assert trace.metadata["clock_offsets_seconds"] == (0.0, -0.005)
    ends = [end for _, info, _, end in trace.rows() if info.group]
    assert ends == pytest.approx([172e-6, 231e-6] * 2)
    assert len(trace.steps) == 1
    assert trace.step_seconds == pytest.approx(1e-3)


def test_ranks_that_did_different_things_are_refused(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    calls = ("_allgather_base", "_reduce_scatter_base")
    folder = two_ranks(kineto, metadata, tmp_path, ([100], [160]), ([172], [172]), calls=calls)
    with pytest.raises(zsim.InputError, match=r"collective 1 of step 1.*reduce_scatter.*all_gather"):
        zsim.read_trace(folder)


def test_a_collective_that_one_rank_lacks_is_named(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = two_ranks(kineto, metadata, tmp_path, ([100, 200], [160]), ([172, 231], [172]))
    with pytest.raises(zsim.InputError, match=r"rank 1 has 1 collectives.*rank 0 has 2: number 2"):
        zsim.read_trace(folder)


@pytest.mark.parametrize(
    ("ranks", "worlds", "steps", "message"),
    [
        ((0, 0), (2, 2), (1, 1), "is of rank 0, and so is"),
        ((0, 1), (2, 4), (1, 1), "with 4 ranks, but"),
        ((0, 1), (2, 2), (1, 2), "no step in common"),
        ((0, 3), (2, 2), (1, 1), "says it is rank 3 of 2"),
    ],
)
def test_ranks_that_do_not_belong_together_are_refused(
    kineto: Callable[..., KinetoBuilder],
    tmp_path: Path,
    ranks: tuple[int, ...],
    worlds: tuple[int, ...],
    steps: tuple[int, ...],
    message: str,
) -> None:
    for place in (0, 1):
        file = kineto(rank=ranks[place], world_size=worlds[place])
        file.step(steps[place], 0, 100)
        file.launch("gemm", 1, 5, 20)
        file.write(tmp_path / f"file{place}.json")
    with pytest.raises(zsim.InputError, match=message):
        zsim.read_trace(tmp_path)


def test_a_recording_without_steps_is_refused_unless_it_is_one(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    file = kineto()
    file.launch("gemm", 1, 5, 20)
    path = file.write(tmp_path / "rank0.json")
    with pytest.raises(zsim.InputError, match="has no steps: no ProfilerStep"):
        zsim.read_trace(path)
    whole = zsim.read_trace(path, whole=True)
    assert whole.step_seconds == pytest.approx(22e-6)
