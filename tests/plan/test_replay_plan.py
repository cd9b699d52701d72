"""What a recorded op waited for, told from a few spans typed in by hand; times are seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zsim.plan.ops import RecordedWork
from zsim.plan.passes.repeated_step import program_is_drained, repeat_program
from zsim.plan.recorded.infer import recorded_ranks
from zsim.plan.recorded.rank import isolate_kernels, payload_of
from zsim.trace.trace import Trace

GATHER = {"kind": "all_gather", "stream": "all_gather", "bytes": 8, "group": "world", "group_size": 8}
REDUCE = {"kind": "reduce_scatter", "stream": "reduce", "bytes": 8, "group": "world", "group_size": 8}


def kernel(name: str, issue: float, start: float, end: float, **fields: Any) -> dict[str, Any]:
    return {"name": name, "issue": issue, "start": start, "end": end, **fields}


def ops_of(trace: Trace) -> dict[str, RecordedWork]:
    return {op.name: payload_of(op) for op in recorded_ranks(trace)[0].program.ops}


def calls_before(trace: Trace, name: str) -> list[tuple[float, int | None, float]]:
    """The host's calls before it issues an op: its work, the op that it waits for, the call's own seconds."""
    op = next(op for op in recorded_ranks(trace)[0].program.ops if op.name == name)
    waits, calls = iter(op.host_waits), payload_of(op).calls
    return [(call.seconds, next(waits) if call.waits else None, call.overhead_seconds) for call in calls]


def waits_of(trace: Trace) -> dict[str, list[str]]:
    """What each op waits for on other streams, by name."""
    ops = recorded_ranks(trace)[0].program.ops
    return {op.name: [ops[other].name for other in op.after] for op in ops}


def test_an_op_that_begins_as_another_ends_waited_for_it(make_trace: Callable[..., Trace]) -> None:
    """The kernel could have begun at 3; it begins at 10, when the copy on another stream ends."""
    trace = make_trace([
        kernel("before", 0, 0, 3),
        kernel("copy in", 1, 1, 10, kind="copy", stream="side"),
        kernel("after", 2, 10, 12),
    ])  # fmt: skip
    assert waits_of(trace)["after"] == ["copy in"]
    assert ops_of(trace)["after"].lag_seconds == 0


def test_a_wait_that_was_over_in_time_is_known_by_the_units_name(make_trace: Callable[..., Trace]) -> None:
    """The gather of layer 1 is over at 4; layer 0 computes until 9. Only layer 1's kernel needs it."""
    trace = make_trace([
        kernel("layer 0", 0, 0, 9, module="layers.0"),
        kernel("gather 1", 1, 1, 4, module="layers.1", **GATHER),
        kernel("norm", 2, 9, 10, module="head"),
        kernel("layer 1", 3, 10, 20, module="layers.1.mlp"),
    ])  # fmt: skip
    waits = waits_of(trace)
    assert waits["norm"] == []
    assert waits["layer 1"] == ["gather 1"]


def test_a_kernel_that_began_before_a_gather_ended_did_not_wait_for_it(
    make_trace: Callable[..., Trace],
) -> None:
    trace = make_trace([
        kernel("gather 1", 0, 0, 8, module="layers.1", **GATHER),
        kernel("layer 1", 1, 5, 20, module="layers.1"),
    ])  # fmt: skip
    assert waits_of(trace)["layer 1"] == []


def test_a_reduction_waits_for_the_gradients_and_the_optimizer_for_it(
    make_trace: Callable[..., Trace],
) -> None:
    """The reduction begins long after `backward 1`, for its stream was busy until 10: nothing shows."""
    trace = make_trace([
        kernel("backward 2", 0, 0, 3, phase="backward"),
        kernel("reduce 2", 1, 3, 10, phase="backward", **REDUCE),
        kernel("backward 1", 2, 3, 6, phase="backward"),
        kernel("reduce 1", 3, 10, 12, phase="backward", **REDUCE),
        kernel("backward 0", 4, 6, 30, phase="backward"),
        kernel("update", 5, 30, 40, kind="optimizer", phase="optimizer"),
    ])  # fmt: skip
    waits = waits_of(trace)
    assert waits["reduce 1"] == ["backward 1"]
    assert waits["backward 0"] == []
    assert waits["update"] == ["reduce 1"]  # the last on its stream stands for both


def test_what_nothing_explains_is_a_delay_and_counted(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([kernel("a", 0, 0, 1), kernel("b", 0.5, 4, 5)])
    rank = recorded_ranks(trace)[0]
    assert [work.lag_seconds for work in rank.payloads] == [0, 3, 0]  # and the end of the step
    assert rank.unexplained_seconds == 3


def test_the_host_works_waits_and_works_again(make_trace: Callable[..., Trace]) -> None:
    """Issues at 1 and 9; blocked from 3 to 8 on the kernel: 2 s of work before, 1 s after."""
    trace = make_trace(
        [kernel("a", 1, 1, 8), kernel("b", 9, 9, 10)], step_seconds=10, host_blocks=[(0, 3.0, 8.0, "a")]
    )
    assert calls_before(trace, "b") == [(2.0, 0, 0.0)]
    assert ops_of(trace)["b"].host_seconds == 1.0


def test_what_a_blocked_call_lasts_beyond_the_op_is_its_own(make_trace: Callable[..., Trace]) -> None:
    """Blocked from 3 to 8 on a kernel that is over at 6; then from 8.5 to 9 on one that is over already."""
    trace = make_trace(
        [kernel("a", 1, 1, 6), kernel("b", 9, 9, 10)],
        step_seconds=10,
        host_blocks=[(0, 3.0, 8.0, "a"), (0, 8.5, 9.0, "a")],
    )
    assert calls_before(trace, "b") == [(2.0, 0, 2.0), (0.5, 0, 0.5)]
    assert ops_of(trace)["b"].host_seconds == 0.0


def test_a_call_that_blocks_and_issues_a_copy_waits_for_it_from_then_on(
    make_trace: Callable[..., Trace],
) -> None:
    """A copy from pageable memory, from 2 to 9, whose copy is issued at 5: 3 s of its own, then the copy."""
    copy = kernel("copy", 5, 5, 8, kind="h2d", stream="h2d")
    trace = make_trace(
        [kernel("a", 1, 1, 2), copy, kernel("b", 10, 10, 11)],
        step_seconds=11,
        host_blocks=[(0, 2.0, 9.0, "copy")],
    )
    assert calls_before(trace, "copy") == [(1.0, None, 3.0)]
    assert calls_before(trace, "b") == [(0.0, 1, 1.0)]
    assert ops_of(trace)["b"].host_seconds == 1.0


def test_a_stream_that_is_free_late_delays_nothing_twice(make_trace: Callable[..., Trace]) -> None:
    """Issued 3 s before the step: the op starts at 0.5 because its stream is free at 0, then waits 0.5."""
    (rank,) = recorded_ranks(make_trace([kernel("a", -3, 0.5, 1)])).values()
    assert rank.payloads[0].lag_seconds == 0.5


def test_a_block_that_begins_when_an_op_is_issued_comes_after_it(make_trace: Callable[..., Trace]) -> None:
    """The host issues b at 4 and waits for it at once."""
    trace = make_trace(
        [kernel("a", 1, 1, 2), kernel("b", 4, 4, 8), kernel("c", 9, 9, 10)],
        host_blocks=[(0, 4.0, 8.0, "b")],
    )
    assert calls_before(trace, "b") == []
    assert calls_before(trace, "c") == [(0.0, 1, 0.0)]


def test_a_cpu_run_computes_on_the_host_and_issues_in_between(make_trace: Callable[..., Trace]) -> None:
    """Computing from 0 to 6 on the host, a gather issued at 2: 2 s, the gather, 4 s."""
    trace = make_trace(
        [{"start": 0, "end": 6}, kernel("gather", 2, 2, 5, **{**GATHER, "stream": ""})],
        metadata={"computes_on": "cpu"},
    )
    assert [(work.kind, work.seconds, work.is_on_host) for work in recorded_ranks(trace)[0].payloads] == [
        ("compute", 2, True),
        ("all_gather", 3, False),
        ("compute", 4, True),
        ("", 0, True),  # the end of the step
    ]


def test_spans_that_overlap_on_one_stream_are_several(make_trace: Callable[..., Trace]) -> None:
    """Two reads of files at once, and one after the first: two queues."""
    trace = make_trace([
        kernel("r1", 0, 0, 4, kind="nvme_read", stream="nvme"),
        kernel("r2", 1, 1, 9, kind="nvme_read", stream="nvme"),
        kernel("r3", 5, 5, 6, kind="nvme_read", stream="nvme"),
    ])  # fmt: skip
    *ops, _ = recorded_ranks(trace)[0].program.ops
    assert [op.stream for op in ops] == ["nvme", "nvme (2)", "nvme"]


def test_work_alone_is_time_without_what_it_shared(make_trace: Callable[..., Trace]) -> None:
    """A kernel from 0 to 10 under a collective from 4 to 10 that makes it 1.2 times slower: 4 + 6 / 1.2 = 9.
    Another runs beside it from 6 to 10, at half speed each: 4 + 2 / 1.2 + 4 / 2.4, and 4 / 2.4."""
    one = [kernel("a", 0, 0, 10), kernel("gather", 0, 4, 10, **GATHER)]
    (rank,) = recorded_ranks(make_trace(one)).values()
    assert isolate_kernels(rank, 1.2).payloads[0].seconds == pytest.approx(9.0)
    both = [*one, kernel("b", 0, 6, 10, stream="side")]
    (rank,) = recorded_ranks(make_trace(both)).values()
    alone = {op.name: payload_of(op).seconds for op in isolate_kernels(rank, 1.2).program.ops}
    assert alone["a"] == pytest.approx(4 + 2 / 1.2 + 4 / 2.4)
    assert alone["b"] == pytest.approx(4 / 2.4)
    assert alone["gather"] == 6


def test_twice_the_second_step_follows_the_first(make_trace: Callable[..., Trace]) -> None:
    """The gather of the second step waits for the first step's last kernel; the end of the first step, which
    is the host's, comes between."""
    trace = make_trace([kernel("gather", 0, 0, 2, **GATHER), kernel("a", 1, 2, 5), kernel("b", 2, 5, 6)])
    (rank,) = recorded_ranks(trace).values()
    double = repeat_program(rank.program)
    assert [op.name for op in double.ops] == ["gather", "a", "b", "end of step"] * 2
    assert double.ops[4].after == (2,)
    assert [payload_of(op).meets for op in double.ops] == [True, False, False, False] * 2
    assert not program_is_drained(rank.program)


def test_a_host_that_waits_before_the_update_is_drained(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(
        [kernel("a", 0, 0, 5), kernel("u", 6, 6, 7, kind="optimizer", phase="optimizer")],
        host_blocks=[(0, 1.0, 5.0, "a")],
    )
    assert program_is_drained(recorded_ranks(trace)[0].program)


def test_a_host_that_is_not_recorded_is_late_only_where_the_gpu_pauses(
    make_trace: Callable[..., Trace],
) -> None:
    """Two kernels in a row: issued in time. After the pause from 5 to 6 the host had waited for b and worked
    for 1 s. d follows a pause too: the host goes on at its own pace, 3 s after c. The step ends as d does."""
    unknown = float("nan")
    trace = make_trace([
        kernel("a", unknown, 0, 3),
        kernel("b", unknown, 3, 5),
        kernel("c", unknown, 6, 8),
        kernel("d", unknown, 9, 10),
    ])  # fmt: skip
    works = ops_of(trace)
    assert [works[name].host_seconds for name in "abcd"] == [0, 0, 1, 3]
    assert [calls_before(trace, name) for name in "abcd"] == [[], [], [(0, 1, 0)], []]
    assert all(work.lag_seconds == 0 for work in works.values())
    assert recorded_ranks(trace)[0].program.ops[-1].host_waits == (3,)


def test_a_host_that_is_not_recorded_may_be_taken_to_issue_each_op_as_it_starts(
    make_trace: Callable[..., Trace],
) -> None:
    trace = make_trace([kernel("a", float("nan"), 0, 3), kernel("b", float("nan"), 3, 5)])
    ops = recorded_ranks(trace, is_host_in_time=False)[0].program.ops
    assert [payload_of(op).host_seconds for op in ops] == [0, 3, 0]
