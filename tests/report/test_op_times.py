"""Transfer told from waiting, so that a late rank is not a slow link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import about
from zsim.comparison.compare import compare
from zsim.comparison.op_classes import add_transfers, match_transfers, op_seconds, waiting_seconds
from zsim.trace.trace import Trace

GATHER = {"kind": "all_gather", "stream": "comm", "bytes": 10**6, "group_size": 2, "dtype": "bf16"}


@pytest.fixture
def on_time(make_trace: Callable[..., Trace]) -> Trace:
    """One rank of two: a gather of 1 ms, computing of 9 ms beside it."""
    return make_trace([{"start": 0, "end": 1e-3, **GATHER}, {"start": 0, "end": 9e-3}], world_size=2)


@pytest.fixture
def late(on_time: Trace) -> Trace:
    """The same recorded, but the other rank came 2 ms later: 3 ms, of which 1 is transfer."""
    return replace(
        on_time,
        source="recorded",
        end_seconds=np.array([3e-3, 9e-3]),
        transfer_seconds=np.array([1e-3, np.nan]),
    )


def test_a_late_rank_is_waiting_and_no_slow_link(on_time: Trace, late: Trace) -> None:
    comparison = compare(on_time, late)
    (gathers, *_) = comparison.clock.classes
    assert (gathers.metric.verdict, gathers.metric.recorded) == ("pass", about(1e-3))
    waits = [metric for metric in comparison.metrics if metric.name == "waiting for other ranks"]
    assert [(metric.simulated, metric.recorded) for metric in waits] == [(0.0, about(2e-3))]
    assert waits[0].verdict == "fail"


def test_a_transfer_that_is_only_a_bound_is_not_used(on_time: Trace, late: Trace) -> None:
    """One rank of two: 1 ms is the shortest of its repeats, no more. Whole spans are compared."""
    bounded = replace(late, metadata={"transfers_bounded": 1})
    comparison = compare(on_time, bounded)
    (gathers, *_) = comparison.clock.classes
    assert gathers.metric.recorded == pytest.approx(3e-3)
    assert "too few ranks to tell waiting from transfer" in comparison.notes[0]
    assert waiting_seconds(add_transfers(bounded)) is None


def test_both_sides_give_transfers_or_neither_does(on_time: Trace, late: Trace) -> None:
    unknown = replace(late, transfer_seconds=None)
    for trace in (*match_transfers(on_time, unknown), *match_transfers(late, unknown)):
        assert op_seconds(trace).tolist() == (trace.end_seconds - trace.start_seconds).tolist()


def test_of_simulated_ranks_the_last_one_waits_for_nobody(make_trace: Callable[..., Trace]) -> None:
    """Rank 1 arrives after 2 ms; both leave at 3: rank 0 waited 2 of its 3 ms."""
    trace = make_trace(
        [{"rank": 0, "start": 0, "end": 3e-3, **GATHER}, {"rank": 1, "start": 2e-3, "end": 3e-3, **GATHER}],
        world_size=2,
    )
    known = add_transfers(trace)
    assert op_seconds(known).tolist() == pytest.approx([1e-3, 1e-3])
    assert waiting_seconds(known.select_rank(0)) == pytest.approx(2e-3)
    assert waiting_seconds(known.select_rank(1)) == 0


def test_an_op_that_a_rank_runs_again_and_again_has_no_known_transfer(
    make_trace: Callable[..., Trace],
) -> None:
    """Three spans of one info on one rank: their shortest is not the others' transfer."""
    spans = [{"start": k, "end": k + 1 + k / 10, **GATHER} for k in range(3)]
    known = add_transfers(make_trace(spans, world_size=2))
    assert op_seconds(known).tolist() == pytest.approx([1.0, 1.1, 1.2])
