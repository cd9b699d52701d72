"""Faults planted on purpose: each changes what it says, and nothing else."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import there
from zsim.comparison import planted
from zsim.comparison.compare import compare
from zsim.study.check.check import run_check
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import Trace

RECORDED = Path(__file__).resolve().parents[2] / "traces" / "gloo" / "zero3-even-2ranks"


@pytest.fixture
def step(make_sharded_step: Callable[..., Trace]) -> Trace:
    return make_sharded_step()


def calls(trace: Trace) -> list[str]:
    infos = [trace.infos[index] for index in trace.info_indices.tolist()]
    return [f"{info.name} {info.bytes // 10**9}" for info in infos if info.group]


def test_a_call_is_dropped_doubled_or_swapped_with_the_next(step: Trace) -> None:
    before = calls(step)
    assert calls(planted.drop_call(step, 3)) == before[:3] + before[4:]
    assert calls(planted.double_message(step, 3)) == [*before[:3], "all_gather blocks.3 2", *before[4:]]
    assert calls(planted.swap_calls(step, 1)) == [before[0], before[2], before[1], *before[3:]]


def test_a_slow_link_lengthens_calls_and_puts_off_what_follows(make_trace: Callable[..., Trace]) -> None:
    """A call of 2 s becomes 3; what started at 2 starts at 3, what ran beside it stays; 1 s more in all."""
    trace = make_trace(
        [
            {"kind": "all_reduce", "stream": "comm", "start": 0, "end": 2, "group_size": 8},
            {"start": 0, "end": 2},
            {"start": 2, "end": 5},
        ]
    )
    slow = planted.slow_link(trace, 1.5)
    assert slow.start_seconds.tolist() == [0, 0, 3]
    assert slow.end_seconds.tolist() == [3, 2, 6]
    assert slow.step_seconds == 6
    assert planted.slow_link(trace, 1.5, group_size=4).end_seconds.tolist() == [2, 2, 5]


def test_a_leak_is_the_largest_block_that_is_freed(step: Trace) -> None:
    """All freed activations are 3 GB; the first to be freed is the last block's."""
    lost, held = there(planted.leak(step, "activations").memory), there(step.memory)
    assert len(lost.deltas) == len(held.deltas) - 1
    assert int(lost.deltas.sum() - held.deltas.sum()) == 3 * 10**9


def test_what_cannot_be_planted_is_refused(step: Trace, make_trace: Callable[..., Trace]) -> None:
    with pytest.raises(ValueError, match="no memory events"):
        planted.leak(make_trace([{"start": 0, "end": 1}]))
    with pytest.raises(ValueError, match="nothing of parameters is freed on gpu"):
        planted.leak(step, "parameters")
    with pytest.raises(IndexError):
        planted.drop_call(step, 99)


def without_a_free(folder: Path, rank: int, unit: str) -> None:
    """The rank's log without the first free of `unit` in each step."""
    log = folder / f"rank{rank}.jsonl.gz"
    seen: set[int] = set()
    kept = []
    for line in gzip.decompress(log.read_bytes()).decode().splitlines():
        event = json.loads(line)
        is_free = event.get("kind") == "mem" and event["bytes"] < 0 and event["unit"] == unit
        if is_free and event["step"] not in seen:
            seen.add(event["step"])
        else:
            kept.append(line)
    log.write_bytes(gzip.compress("\n".join(kept).encode()))


@pytest.mark.parametrize(
    ("ranks", "unit", "size", "where"),
    [
        ((0, 1), "root", "1.05 MB", "every rank"),
        ((1,), "root", "1.05 MB", "rank 1"),
        ((0,), "model.layers.2", "1.48 MB", "rank 0"),
    ],
)
def test_a_leak_in_a_recorded_run_fails_the_check_and_is_named(
    ranks: tuple[int, ...], unit: str, size: str, where: str, tmp_path: Path
) -> None:
    """Two steps of 524,800 or 738,304 bytes; the root's is the last free of a step, so that no peak grows in
    the first."""
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    for rank in ranks:
        without_a_free(folder, rank, unit)
    report = run_check([folder], tmp_path)
    (row,) = report.failed_rows
    assert (report.verdict, row.name) == ("fail", "gpu buffers after 2 steps")
    assert row.sentence == f"'{unit}' holds back {size} on {where}"
    comparison = compare(read_trace(RECORDED), read_trace(folder))
    reasons = {metric.name: metric.reason for metric in comparison.memory.metrics if metric.verdict == "fail"}
    assert reasons["gpu buffers, at the end"].startswith(f"'{unit}' holds back ")


def test_a_recorded_run_as_it_is_holds_nothing_back() -> None:
    rows = {row.name: row for row in run_check([RECORDED], RECORDED).rows}
    row = rows["gpu buffers after 2 steps"]
    assert (row.outcome, row.predicted, row.measured, row.sentence) == ("pass", 0, 0, "")


def test_a_leak_on_one_rank_alone_is_seen_where_no_peak_grows(make_trace: Callable[..., Trace]) -> None:
    """Rank 0 has the higher peak and frees all; rank 1 keeps 2 of its 3 bytes."""
    spans = [{"start": 0, "end": 3, "rank": rank} for rank in (0, 1)]
    good = [
        (0, 1.0, "gpu", "buffers", 4, "a"),
        (1, 1.0, "gpu", "buffers", 3, "a"),
        (0, 2.0, "gpu", "buffers", -4, "a"),
        (1, 2.0, "gpu", "buffers", -1, "a"),
        (1, 2.0, "gpu", "buffers", -2, "b"),
    ]
    failed = [
        metric
        for metric in compare(make_trace(spans, memory=good), make_trace(spans, memory=good[:-1])).metrics
        if metric.verdict == "fail"
    ]
    assert {metric.name for metric in failed} == {"gpu total, at the end", "gpu buffers, at the end"}
