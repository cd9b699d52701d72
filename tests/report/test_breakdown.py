"""The step breakdown on traces small enough to do by hand; times are whole seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.expect import there
from zsim.report.breakdown import NO_WAITS, Wait, Waits, compute_stream, step_breakdown
from zsim.report.traffic import bus_factor, collective_rows, overlap_fraction
from zsim.trace.trace import SpanInfo, SpanInfos, Trace


def gather(start: float, end: float, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "all_gather",
        "stream": "all_gather",
        "name": "gather",
        "group": "shard",
        "group_size": 8,
        "bytes": 1000,
        "dtype": "bf16",
        "start": start,
        "end": end,
        **fields,
    }


def kernel(start: float, end: float, issue: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "issue": issue, "name": "kernel", "phase": "forward", **fields}


def seconds(trace: Trace, rank: int | None = None) -> dict[str, float]:
    return {name: value for name, value in step_breakdown(trace, rank).seconds.items() if value}


def test_a_gap_that_ends_when_a_collective_ends_is_exposed_communication(
    make_trace: Callable[..., Trace],
) -> None:
    """Compute 0-2, all-gather 1-5, compute 5-6: 3 s computing, 3 s waiting."""
    trace = make_trace([kernel(0, 2), gather(1, 5), kernel(5, 6)])
    assert seconds(trace) == {"compute": 3.0, "exposed_communication": 3.0}


def test_a_gap_before_the_host_issued_the_op_is_host_bound(make_trace: Callable[..., Trace]) -> None:
    """Compute ends at 2, the next op is issued at 3 and waits for a collective until 5."""
    trace = make_trace([kernel(0, 2), gather(1, 5), kernel(5, 6, issue=3)])
    assert seconds(trace) == {"compute": 3.0, "host_bound": 1.0, "exposed_communication": 2.0}


def test_a_host_blocked_on_a_collective_is_exposed_communication(make_trace: Callable[..., Trace]) -> None:
    """The op is issued at 5; the host stood in a synchronize for the all-gather from 1 to 4."""
    spans = [kernel(0, 2), gather(1, 4), kernel(5, 6, issue=5)]
    trace = make_trace(spans, host_blocks=[(0, 1.0, 4.0, "gather")])
    assert seconds(trace) == {"compute": 3.0, "exposed_communication": 2.0, "host_bound": 1.0}


def test_a_host_in_an_allocator_that_is_short_is_the_allocators_whatever_it_waits_for(
    make_trace: Callable[..., Trace],
) -> None:
    """The op is issued at 9: the allocator waits for the all-gather from 1 to 4 and asks the driver until 7,
    then the host is busy; compute stands still from 2 on."""
    spans = [kernel(0, 2), gather(1, 4), kernel(9, 10, issue=9)]
    blocks, asking = [(0, 1.0, 4.0, "gather")], [(0, 1.0, 4.0), (0, 4.0, 7.0), (1, 7.0, 9.0)]
    trace = make_trace(spans, host_blocks=blocks, allocator_blocks=asking)
    assert seconds(trace) == {"compute": 3.0, "allocator": 5.0, "host_bound": 2.0}


def test_an_allocator_that_the_gpu_does_not_wait_for_costs_nothing(make_trace: Callable[..., Trace]) -> None:
    """The host asks while the first kernel runs, and issues the second before that ends."""
    trace = make_trace([kernel(0, 4), kernel(4, 6, issue=3)], allocator_blocks=[(0, 1.0, 3.0)])
    assert seconds(trace) == {"compute": 6.0}


def test_a_host_blocked_on_a_kernel_is_host_bound(make_trace: Callable[..., Trace]) -> None:
    """A synchronize with the compute stream itself leaves a gap that is the host's doing."""
    spans = [kernel(0, 2), kernel(3, 4, issue=3)]
    trace = make_trace(spans, host_blocks=[(0, 1.0, 2.5, "kernel")])
    assert seconds(trace) == {"compute": 3.0, "host_bound": 1.0}


@pytest.mark.parametrize("kind", ["h2d", "d2h", "cpu", "nvme_read", "nvme_write"])
def test_waiting_for_a_copy_or_the_cpu_is_an_offload_stall(
    make_trace: Callable[..., Trace], kind: str
) -> None:
    trace = make_trace([kernel(0, 2), kernel(1, 5, kind=kind, stream=kind, name=kind), kernel(5, 6)])
    assert seconds(trace) == {"compute": 3.0, "offload_stall": 3.0}


def test_a_chain_of_waits_is_split_where_one_hands_over_to_the_next(make_trace: Callable[..., Trace]) -> None:
    """Compute ends at 1; the weights come from the host until 3, are gathered until 7."""
    copy = kernel(0, 3, kind="h2d", stream="h2d", name="load")
    trace = make_trace([kernel(0, 1), copy, gather(3, 7), kernel(7, 8)])
    assert seconds(trace) == {"compute": 2.0, "offload_stall": 2.0, "exposed_communication": 4.0}


def test_what_ended_last_is_the_cause_not_what_still_runs(make_trace: Callable[..., Trace]) -> None:
    """A long prefetch 0-9 is under way; the op at 4 waited for the copy that ended at 4."""
    copy = kernel(1, 4, kind="h2d", stream="h2d", name="load")
    trace = make_trace([kernel(0, 2), gather(0, 9), copy, kernel(4, 9)])
    assert seconds(trace) == {"compute": 7.0, "offload_stall": 2.0}


def test_an_idle_stretch_before_a_collective_is_the_hosts_until_it_was_issued(
    make_trace: Callable[..., Trace],
) -> None:
    """Compute ends at 1, the all-gather is issued at 3, waits for its peers until 4, ends at 6."""
    trace = make_trace([kernel(0, 1), gather(4, 6, issue=3), kernel(6, 7, issue=1)])
    assert seconds(trace) == {"compute": 2.0, "host_bound": 2.0, "exposed_communication": 3.0}


def test_a_collective_on_the_compute_stream_is_exposed(make_trace: Callable[..., Trace]) -> None:
    """DeepSpeed without overlap: the all-gather runs on the compute stream, 2 s of it."""
    trace = make_trace([kernel(0, 2), gather(2, 4, stream="compute"), kernel(4, 5)])
    assert seconds(trace) == {"compute": 3.0, "exposed_communication": 2.0}
    assert [trace.infos[there(wait.info)].name for wait in step_breakdown(trace).waits] == ["gather"]


def test_kernels_of_the_optimizer_phase_are_optimizer(make_trace: Callable[..., Trace]) -> None:
    """1 s of a copy in the optimizer phase and 2 s of the update; its all-gather is communication."""
    trace = make_trace(
        [
            kernel(0, 3),
            kernel(3, 4, kind="copy", phase="optimizer", name="cast"),
            kernel(4, 6, kind="optimizer", phase="optimizer", name="adam"),
            gather(6, 7, stream="compute", phase="optimizer"),
        ]
    )
    assert seconds(trace) == {"compute": 3.0, "optimizer": 3.0, "exposed_communication": 1.0}


def test_the_tail_of_the_step_belongs_to_what_still_runs(make_trace: Callable[..., Trace]) -> None:
    """Compute ends at 2, a reduce-scatter at 5, the host returns at 6."""
    trace = make_trace([kernel(0, 2), gather(1, 5, kind="reduce_scatter")], step_seconds=6.0)
    assert seconds(trace) == {"compute": 2.0, "exposed_communication": 3.0, "host_bound": 1.0}


def test_the_start_of_the_step_is_a_gap_too(make_trace: Callable[..., Trace]) -> None:
    """The first kernel starts at 4: issued at 1, after the first all-gather (0.5 to 4)."""
    trace = make_trace([gather(0.5, 4, issue=0.5), kernel(4, 5, issue=1)])
    assert seconds(trace) == {"host_bound": 1.0, "exposed_communication": 3.0, "compute": 1.0}


def test_without_issue_times_every_explained_gap_is_a_wait(make_trace: Callable[..., Trace]) -> None:
    """A recorded trace may not know when ops were issued; an unexplained gap is the host's."""
    nan = math.nan
    spans = [
        kernel(0, 1, issue=nan),
        gather(1, 3, issue=nan),
        kernel(3, 4, issue=nan),
        kernel(5, 6, issue=nan),
    ]
    assert seconds(make_trace(spans)) == {"compute": 3.0, "exposed_communication": 2.0, "host_bound": 1.0}


def test_one_rank_is_broken_down_and_others_do_not_disturb(make_trace: Callable[..., Trace]) -> None:
    """Rank 1 computes 0-3; rank 0 waits from 1 on for its own all-gather."""
    spans = [kernel(0, 1), gather(0, 3), kernel(3, 4), kernel(0, 4, rank=1)]
    assert seconds(make_trace(spans)) == {"compute": 2.0, "exposed_communication": 2.0}
    assert seconds(make_trace(spans), rank=1) == {"compute": 4.0}


def test_the_parts_are_the_step_and_the_phases_are_the_parts(make_trace: Callable[..., Trace]) -> None:
    """3 s forward (1 of them waiting), 4 s backward; a gap counts to the phase of the op that ends it."""
    trace = make_trace([kernel(0, 2), gather(0, 3), kernel(3, 7, phase="backward")])
    breakdown = step_breakdown(trace)
    assert sum(breakdown.seconds.values()) == 7.0
    assert breakdown.by_phase["forward"]["compute"] == 2.0
    assert breakdown.by_phase["backward"]["exposed_communication"] == 1.0
    assert breakdown.by_phase["backward"]["compute"] == 4.0


def test_waits_name_what_was_waited_for(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([kernel(0, 1), gather(0, 3), kernel(3, 4)])
    (wait,) = step_breakdown(trace).waits
    assert (wait.start_seconds, wait.end_seconds, trace.infos[there(wait.info)].name) == (1.0, 3.0, "gather")


def test_spans_that_last_nothing_and_host_marks_are_no_time(make_trace: Callable[..., Trace]) -> None:
    """A collective over one rank and a host-only op inside a gap are no reason to wait."""
    spans = [
        kernel(0, 1),
        gather(2, 2, issue=1),
        kernel(1, 3, kind="host", name="hook"),
        kernel(3, 4, issue=1),
    ]
    assert seconds(make_trace(spans)) == {"compute": 2.0, "host_bound": 2.0}


def test_an_empty_trace_is_a_host_bound_step(make_trace: Callable[..., Trace]) -> None:
    assert seconds(make_trace([], step_seconds=2.0)) == {"host_bound": 2.0}


def test_the_busiest_stream_is_the_compute_stream_of_a_recording(make_trace: Callable[..., Trace]) -> None:
    spans = [kernel(0, 5, stream="stream 7"), kernel(0, 1, stream="stream 20")]
    assert compute_stream(make_trace(spans)) == "stream 7"


def raw_trace(
    spans: Sequence[dict[str, Any]],
    step_seconds: float,
    blocks: Iterable[tuple[float, float, str]],
    asking: Iterable[tuple[float, float]] = (),
) -> Trace:
    columns = {key: np.array([span[key] for span in spans], dtype=float) for key in ("issue", "start", "end")}
    names = [span["name"] for span in spans]
    return Trace(
        source="simulated",
        infos=SpanInfos(SpanInfo(span["name"], span["kind"], span["stream"]) for span in spans),
        ranks=np.zeros(len(spans), dtype=np.int64),
        info_indices=np.arange(len(spans), dtype=np.int64),
        issue_seconds=columns["issue"],
        start_seconds=columns["start"],
        end_seconds=columns["end"],
        world_size=1,
        step_seconds=step_seconds,
        host_blocks=tuple((0, start, end, names.index(name)) for start, end, name in blocks),
        allocator_blocks=tuple((0, start, end) for start, end in asking),
    )


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Streams of back-to-back spans with gaps, issued at some time before they start; and host blocks."""
    spans, infos = [], []
    for stream, kind in (("compute", "compute"), ("gather", "all_gather"), ("load", "h2d"), ("side", "copy")):
        at = 0.0
        for number in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
            end = at + draw(st.sampled_from([0.0, 0.25, 1.0, 2.0]))
            issue = at * draw(st.sampled_from([0.0, 0.5, 1.0, math.nan]))
            name = f"{stream} {number}"
            infos.append(name)
            spans.append(
                {"name": name, "kind": kind, "stream": stream, "start": at, "end": end, "issue": issue}
            )
            at = end
    blocks, at = [], 0.0
    for _ in range(draw(st.integers(0, 3)) if infos else 0):
        start = at + draw(st.sampled_from([0.0, 1.0]))
        at = start + draw(st.sampled_from([0.5, 2.0]))
        blocks.append((start, at, draw(st.sampled_from(infos))))
    asking, at = [], 0.0
    for _ in range(draw(st.integers(0, 3))):
        start = at + draw(st.sampled_from([0.0, 1.0]))
        at = start + draw(st.sampled_from([0.5, 2.0]))
        asking.append((start, at))
    return raw_trace(spans, draw(st.sampled_from([1.0, 7.5, 40.0])), blocks, asking)


@given(steps())
def test_the_parts_are_never_negative_and_always_the_step(trace: Trace) -> None:
    """The law: every instant of the step belongs to one part, and each wait lies within the step."""
    breakdown = step_breakdown(trace)
    assert min(breakdown.seconds.values()) >= 0
    assert sum(breakdown.seconds.values()) == pytest.approx(trace.step_seconds, rel=1e-12)
    for wait in breakdown.waits:
        assert 0 <= wait.start_seconds <= wait.end_seconds <= trace.step_seconds


# -- Waits as columns: the same waits again, and what those with one cause were for ------------------------


WAITS = (
    Wait(0.0, 1.0, "exposed_communication", 7, "forward"),
    Wait(1.5, 2.0, "host_bound", None, "forward"),
    Wait(3.0, 3.25, "exposed_communication", 4, "backward"),
    Wait(4.0, 8.0, "exposed_communication", None, "backward"),
)


def test_waits_are_the_same_when_they_are_read_again() -> None:
    assert tuple(Waits.of(WAITS)) == WAITS
    assert len(Waits.of(WAITS)) == 4
    assert (tuple(NO_WAITS), len(NO_WAITS)) == ((), 0)


def test_waits_with_a_cause_are_for_spans_and_not_for_the_host() -> None:
    infos, seconds = Waits.of(WAITS).select_cause("exposed_communication")
    assert (infos.tolist(), seconds.tolist()) == ([7, 4], [1.0, 0.25])
    assert not len(Waits.of(WAITS).select_cause("data_loading")[0])


# -- The collectives table and the overlap, from spans typed in by hand ------------------------------------


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
