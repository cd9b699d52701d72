"""The collectives table and the overlap, from spans typed in by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zsim.report.breakdown import step_breakdown
from zsim.report.traffic import bus_factor, collective_rows, overlap_fraction
from zsim.trace.trace import Trace


def call(
    kind: str, start: float, end: float, size: int, issue: float | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "kind": kind, "stream": kind, "name": "n", "start": start, "end": end, "bytes": size,
        "issue": start if issue is None else issue, "group": "shard", "group_size": 4, "dtype": "bf16",
        **fields,
    }  # fmt: skip


def test_calls_of_the_same_kind_group_dtype_and_bytes_are_one_row_in_order_of_first_call(
    make_trace: Callable[..., Trace],
) -> None:
    """Two gathers of 100 (1 s and 3 s), one of 60, one reduce-scatter of 100; the reduce-scatter is issued
    first though its span comes last."""
    trace = make_trace(
        [
            call("all_gather", 1, 2, 100, name="a"),
            call("all_gather", 2, 5, 100, name="b"),
            call("all_gather", 5, 6, 60),
            call("reduce_scatter", 7, 9, 100, issue=0.5),
        ]
    )
    rows = [(row.kind, row.count, row.bytes, row.busy_seconds) for row in collective_rows(trace)]
    assert rows == [("reduce_scatter", 1, 100, 2.0), ("all_gather", 2, 100, 4.0), ("all_gather", 1, 60, 1.0)]


def test_only_the_collectives_of_one_rank_are_counted(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([call("all_gather", 0, 1, 9), call("all_gather", 0, 1, 9, rank=1)])
    assert [row.count for row in collective_rows(trace)] == [1]


def test_a_wait_for_ranks_that_come_late_is_busy_too(make_trace: Callable[..., Trace]) -> None:
    """Computing until 2; the gather, issued at 0, begins at 4, when the last rank has come, and ends at 5: 3
    s exposed, of which 2 are the wait for that rank. The second, of 3 s, begins at once. So 3 s of 6 are
    exposed; the bandwidth is of the 4 s in which 200 bytes moved."""
    trace = make_trace(
        [
            {"start": 0, "end": 2, "issue": 0},
            call("all_gather", 4, 5, 100, issue=0),
            {"start": 5, "end": 10, "issue": 0},
            call("all_gather", 6, 9, 100, issue=6),
        ]
    )
    (row,) = collective_rows(trace, waits=step_breakdown(trace).waits)
    assert (row.exposed_seconds, row.busy_seconds, row.peers_seconds) == (3.0, 6.0, 2.0)
    assert row.algorithm_bytes_per_second == 50.0


def test_each_row_says_how_long_the_compute_stream_waited_for_it(make_trace: Callable[..., Trace]) -> None:
    """Computing until 2; the gather ends at 5 (3 s exposed), the reduce-scatter 5-7 is hidden."""
    trace = make_trace(
        [
            {"start": 0, "end": 2, "issue": 0},
            call("all_gather", 1, 5, 100, issue=0),
            {"start": 5, "end": 8, "issue": 0},
            call("reduce_scatter", 5, 7, 100),
        ]
    )
    rows = collective_rows(trace, waits=step_breakdown(trace).waits)
    assert [(row.kind, row.exposed_seconds) for row in rows] == [("all_gather", 3.0), ("reduce_scatter", 0.0)]


def test_without_any_wait_the_seconds_of_waiting_are_seconds_too(make_trace: Callable[..., Trace]) -> None:
    """Numpy counts no elements in integers, whatever they weigh: reports had 0 in place of 0.0."""
    (row,) = collective_rows(make_trace([call("all_reduce", 0, 2, 400)]))
    assert isinstance(row.exposed_seconds, float)


def test_bandwidths_are_those_of_nccl_tests(make_trace: Callable[..., Trace]) -> None:
    """400 bytes in 2 s: algbw 200; all-reduce on 4 ranks sends 2 x 3/4: busbw 300; all-gather 3/4: 150."""
    (row,) = collective_rows(make_trace([call("all_reduce", 0, 2, 400)]))
    assert (row.algorithm_bytes_per_second, row.bus_bytes_per_second) == (200.0, 300.0)
    (row,) = collective_rows(make_trace([call("all_gather", 0, 2, 400)]))
    assert row.bus_bytes_per_second == 150.0


def test_a_call_that_takes_no_time_has_no_bandwidth(make_trace: Callable[..., Trace]) -> None:
    (row,) = collective_rows(make_trace([call("all_gather", 1, 1, 400, group_size=1)]))
    assert (row.algorithm_bytes_per_second, row.bus_bytes_per_second) == (None, None)


@pytest.mark.parametrize(("kind", "factor"), [("broadcast", 1.0), ("send", 1.0), ("all_to_all", 0.75)])
def test_other_kinds_have_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    assert bus_factor(kind, 4) == factor


def test_overlap_is_the_part_of_communication_under_which_kernels_run(
    make_trace: Callable[..., Trace],
) -> None:
    """Communication 1-5 and 4-7 (6 s together), kernels 0-2 and 3-6: both run during 1-2 and 3-6: 4 of 6."""
    trace = make_trace(
        [
            {"start": 0, "end": 2},
            {"start": 3, "end": 6},
            call("all_gather", 1, 5, 1),
            call("reduce_scatter", 4, 7, 1),
        ]
    )
    assert overlap_fraction(trace) == pytest.approx(4 / 6)


def test_without_communication_there_is_no_overlap_to_speak_of(make_trace: Callable[..., Trace]) -> None:
    assert overlap_fraction(make_trace([{"start": 0, "end": 1}])) is None
