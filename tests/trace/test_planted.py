"""Faults planted on purpose: each changes what it says, and nothing else."""

from __future__ import annotations

import pytest

from zsim.trace import planted


@pytest.fixture
def step(make_sharded_step):
    return make_sharded_step()


def calls(trace) -> list[str]:
    infos = [trace.infos[index] for index in trace.info_indices.tolist()]
    return [f"{info.name} {info.bytes // 10**9}" for info in infos if info.group]


def test_a_call_is_dropped_doubled_or_swapped_with_the_next(step) -> None:
    before = calls(step)
    assert calls(planted.drop_call(step, 3)) == before[:3] + before[4:]
    assert calls(planted.double_message(step, 3)) == [*before[:3], "all_gather blocks.3 2", *before[4:]]
    assert calls(planted.swap_calls(step, 1)) == [before[0], before[2], before[1], *before[3:]]


def test_a_slow_link_lengthens_calls_and_puts_off_what_follows(make_trace) -> None:
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


def test_a_leak_is_the_largest_block_that_is_freed(step) -> None:
    """All freed activations are 3 GB; the first to be freed is the last block's."""
    lost = planted.leak(step, "activations").memory
    assert len(lost.deltas) == len(step.memory.deltas) - 1
    assert int(lost.deltas.sum() - step.memory.deltas.sum()) == 3 * 10**9


def test_what_cannot_be_planted_is_refused(step, make_trace) -> None:
    with pytest.raises(ValueError, match="no memory events"):
        planted.leak(make_trace([{"start": 0, "end": 1}]))
    with pytest.raises(ValueError, match="nothing of parameters is freed on gpu"):
        planted.leak(step, "parameters")
    with pytest.raises(IndexError):
        planted.drop_call(step, 99)
