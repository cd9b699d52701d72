"""The time of a step by cause, as seen from the compute stream of one rank.

Every instant of the step belongs to one of `compute`, `exposed_communication`, `offload_stall`, `optimizer`,
`allocator` and `host_bound`, so their sum is the step.

# [Note: why the compute stream stands still]
A gap ends when the next op starts. Until the host had issued that op, the gap is attributed to the host: to
torch's allocator where it had run short and waited or called the driver, else to the op that the host was
blocked on, else it is host-bound. After that the op waited for other streams. The spans for which it waited
are determined backwards from the end of the gap: the op waited for the span that ended last, before that span
began for the span that ended before it, and so on to the start of the gap.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Floats, Ints, factorize
from zsim.report.views.meanings import BREAKDOWN, COMPUTE_KINDS, waiting_cause
from zsim.trace.trace import SpanInfos, Trace

CAUSES = tuple(BREAKDOWN)
INDEX_OF_CAUSE = {cause: index for index, cause in enumerate(CAUSES)}
HOST = -1  # in place of an information's index: a wait for the host


class Wait(NamedTuple):
    """An interval in which the compute stream did not compute."""

    start_seconds: float
    end_seconds: float
    cause: str
    info: int | None
    """The index of the span information that it waited for. None where it waited for the host."""
    phase: str

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Waits:
    """Waits in the order in which they begin, as columns with one entry per wait.

    `causes` are indices in `CAUSES`. `infos` are indices of span information (`HOST`: a wait for the host).
    """

    def __init__(
        self, starts: Floats, ends: Floats, causes: Ints, infos: Ints, phases: Ints, names: Sequence[str]
    ) -> None:
        """`phases` are indices in `names`."""
        self.seconds: Floats = ends - starts
        self.causes, self.infos = causes, infos
        self.starts, self.ends, self._phases, self._names = starts, ends, phases, names

    def repeat(self, begin: float, end: float, count: float) -> Waits:
        """The waits, with those that begin from `begin` to before `end` `count` times more. These are as many
        times longer instead.
        """
        repeated = Waits(self.starts, self.ends, self.causes, self.infos, self._phases, self._names)
        repeated.seconds = self.seconds * (1.0 + count * ((self.starts >= begin) & (self.starts < end)))
        return repeated

    @staticmethod
    def of(waits: Iterable[Wait]) -> Waits:
        """The waits as columns."""
        starts, ends, causes, infos, phases = [*zip(*waits, strict=True)] or [()] * len(Wait._fields)
        names, phase_of = factorize(phases)
        return Waits(
            np.array(starts, np.float64),
            np.array(ends, np.float64),
            np.array([INDEX_OF_CAUSE[cause] for cause in causes], np.int64),
            np.array([HOST if info is None else info for info in infos], np.int64),
            phase_of,
            names,
        )

    def select_cause(self, cause: str) -> tuple[Ints, Floats]:
        """The infos that waits with this cause were for, and the seconds of each."""
        chosen = (self.causes == INDEX_OF_CAUSE.get(cause, HOST)) & (self.infos != HOST)
        return self.infos[chosen], self.seconds[chosen]

    def __len__(self) -> int:
        return len(self.seconds)

    def __iter__(self) -> Iterator[Wait]:
        starts, ends = self.starts.tolist(), self.ends.tolist()
        causes, infos, phases = self.causes.tolist(), self.infos.tolist(), self._phases.tolist()
        for start, end, cause, info, phase in zip(starts, ends, causes, infos, phases, strict=True):
            yield Wait(start, end, CAUSES[cause], None if info == HOST else info, self._names[phase])


NO_WAITS = Waits.of(())


_SAME_INSTANT = 1e-9  # relative: ends closer than this part of the step are the same instant
_HOST_BOUND, _ALLOCATOR = INDEX_OF_CAUSE["host_bound"], INDEX_OF_CAUSE["allocator"]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one step by cause (and by phase of the program), and every wait with its cause."""

    seconds: dict[str, float]
    by_phase: dict[str, dict[str, float]]
    waits: Waits


class _OpRoles(NamedTuple):
    """The distinct ops of a trace as they are seen from the compute stream."""

    are_on_stream: Bools
    """Whether they are on the compute stream."""
    are_elsewhere: Bools
    """Whether they are on another stream."""
    causes_on_stream: Ints
    """The cause of their seconds on the compute stream, by its index in `CAUSES`."""
    causes_elsewhere: list[int]
    """The cause of waits for them elsewhere, by its index in `CAUSES`."""
    are_waits: Bools
    """Whether their seconds on the compute stream are waits."""
    phases: Ints
    """Their phases, as indices in `phase_names`."""
    phase_names: list[str]


class _Rows(NamedTuple):
    """The spans of the compute stream in order, each with the gap before it. The last row is the end of the
    step, without an information and in the phase before it.
    """

    gap_starts: Floats
    """The starts of the gaps before the spans."""
    starts: Floats
    ends: Floats
    issues: Floats
    """When the host issued the spans."""
    phases: Ints
    infos: Ints
    """The indices of the spans' information."""


class _Intervals(NamedTuple):
    """The intervals of the step in order: times, the cause, the index of the information (`HOST`: none), the
    phase.
    """

    starts: Floats
    ends: Floats
    causes: Ints
    infos: Ints
    phases: Ints
    are_waits: Bools

    def waits(self, phase_names: Sequence[str]) -> Waits:
        """The intervals that are waits."""
        return Waits(
            self.starts[self.are_waits],
            self.ends[self.are_waits],
            self.causes[self.are_waits],
            self.infos[self.are_waits],
            self.phases[self.are_waits],
            phase_names,
        )


@dataclass(frozen=True, slots=True)
class _WaitSources:
    """Everything that the compute stream can wait for: the spans of all other streams sorted by end, the
    intervals in which the host was blocked, and those in which it was in torch's allocator."""

    ops: SpanInfos
    causes: list[int]  # of a wait for each of `ops`
    starts: list[float]
    ends: list[float]
    issues: list[float]
    infos: list[int]
    stall_ends: list[float]
    stalls: list[tuple[float, float, int]]
    allocator: list[tuple[float, float]]


def compute_stream(trace: Trace) -> str:
    """Name of the compute stream: `compute`, or the stream that computes longest where none has that name
    (in a recorded trace)."""
    if trace.infos.memoize(_has_compute_stream):
        return "compute"
    seconds: dict[str, float] = {}
    for _, info, start, end in trace.rows():
        if info.kind in ("compute", "optimizer"):
            seconds[info.stream] = seconds.get(info.stream, 0.0) + end - start
    return max(sorted(seconds), key=lambda stream: seconds[stream], default="compute")


def _has_compute_stream(infos: SpanInfos) -> bool:
    return any(info.stream == "compute" for info in infos)


def step_breakdown(trace: Trace, rank: int | None = None) -> Breakdown:
    """The breakdown of `trace.step_seconds` on `rank`, by default the first rank of the trace."""
    if rank is None and len(trace):
        rank = int(trace.ranks[0])
    rank_trace = trace if rank is None else trace.select_rank(rank)
    ops = rank_trace.infos.memoize(_op_roles, compute_stream(rank_trace))
    rows, sources = _rows_and_sources(rank_trace, ops)
    intervals = _split_step(rows, ops, sources)
    cells = intervals.phases * len(CAUSES) + intervals.causes
    totals = np.bincount(cells, intervals.ends - intervals.starts, len(ops.phase_names) * len(CAUSES))
    tables = totals.reshape(-1, len(CAUSES)).tolist()
    by_phase = {
        ops.phase_names[phase]: dict(zip(CAUSES, tables[phase], strict=True))
        for phase in dict.fromkeys(rows.phases.tolist())
    }
    seconds = {name: math.fsum(table[name] for table in by_phase.values()) for name in CAUSES}
    return Breakdown(seconds, by_phase, intervals.waits(ops.phase_names))


def _split_step(rows: _Rows, ops: _OpRoles, sources: _WaitSources) -> _Intervals:
    """The step in intervals: those of each gap, and then the span that ends the gap."""
    gaps = np.flatnonzero(rows.starts > rows.gap_starts)
    gap_starts, gap_ends, issues = (
        column[gaps].tolist() for column in (rows.gap_starts, rows.starts, rows.issues)
    )
    gap_intervals = [_split_gap(*gap, sources) for gap in zip(gap_starts, gap_ends, issues, strict=True)]
    width = 4  # of a stretch
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(gap_intervals)), np.float64).reshape(
        -1, width
    )
    starts, ends, causes, infos = numbers.T
    interval_rows = np.repeat(gaps, np.fromiter(map(len, gap_intervals), np.int64, len(gap_intervals)))
    spans = np.arange(len(rows.infos))
    order = np.argsort(np.append(2 * interval_rows, 2 * spans + 1), kind="stable")
    return _Intervals(
        np.append(starts, rows.starts[spans])[order],
        np.append(ends, rows.ends[spans])[order],
        np.append(causes.astype(np.int64), ops.causes_on_stream[rows.infos])[order],
        np.append(infos.astype(np.int64), rows.infos)[order],
        np.append(rows.phases[interval_rows], rows.phases[spans])[order],
        np.append(np.ones(len(interval_rows), np.bool_), ops.are_waits[rows.infos])[order],
    )


def _op_roles(infos: SpanInfos, stream: str) -> _OpRoles:
    """The distinct ops as seen from `stream`, to be cached with the infos."""
    unique_ops, op_index = factorize([(info.stream, info.kind, info.phase) for info in infos])
    phase_names, phases = factorize(["forward", *(phase for _, _, phase in unique_ops)])
    are_on_stream = np.array([op_stream == stream for op_stream, _, _ in unique_ops], np.bool_)
    are_on_host = np.array([kind == "host" for _, kind, _ in unique_ops], np.bool_)
    causes_on_stream = [INDEX_OF_CAUSE[_compute_stream_cause(kind, phase)] for _, kind, phase in unique_ops]
    causes_elsewhere = [INDEX_OF_CAUSE[waiting_cause(kind)] for _, kind, _ in unique_ops]
    return _OpRoles(
        are_on_stream=(are_on_stream & ~are_on_host)[op_index],
        are_elsewhere=(~are_on_stream & ~are_on_host)[op_index],
        causes_on_stream=np.array(causes_on_stream, np.int64)[op_index],
        causes_elsewhere=np.array(causes_elsewhere, np.int64)[op_index].tolist(),
        are_waits=np.array([kind not in COMPUTE_KINDS for _, kind, _ in unique_ops], np.bool_)[op_index],
        phases=phases[1:][op_index],
        phase_names=phase_names,
    )


def _compute_stream_cause(kind: str, phase: str) -> str:
    if kind in COMPUTE_KINDS:
        return "optimizer" if kind == "optimizer" or phase == "optimizer" else "compute"
    return waiting_cause(kind)


def _rows_and_sources(rank_trace: Trace, ops: _OpRoles) -> tuple[_Rows, _WaitSources]:
    """The spans of the compute stream with the gaps before them, clipped to the step, and everything that
    they can wait for.
    """
    has_length = rank_trace.end_seconds > rank_trace.start_seconds
    spans_on_stream = np.flatnonzero(ops.are_on_stream[rank_trace.info_indices] & has_length)
    spans_elsewhere = np.flatnonzero(ops.are_elsewhere[rank_trace.info_indices] & has_length)

    order = spans_on_stream[np.argsort(rank_trace.start_seconds[spans_on_stream], kind="stable")]
    ends = np.minimum(rank_trace.end_seconds[order], rank_trace.step_seconds)
    gap_starts = np.append(0.0, np.maximum.accumulate(np.maximum(ends, 0.0)))
    starts = np.minimum(np.maximum(rank_trace.start_seconds[order], gap_starts[:-1]), rank_trace.step_seconds)
    ends = np.maximum(ends, starts)
    infos = rank_trace.info_indices[order]
    phases = ops.phases[infos]
    rows = _Rows(
        gap_starts,
        np.append(starts, rank_trace.step_seconds),
        np.append(ends, rank_trace.step_seconds),
        np.append(rank_trace.issue_seconds[order], math.nan),
        np.append(phases, phases[-1] if len(phases) else 0),
        infos,
    )
    order = spans_elsewhere[
        np.lexsort((rank_trace.start_seconds[spans_elsewhere], rank_trace.end_seconds[spans_elsewhere]))
    ]
    stalls = _serialize_stalls(rank_trace)
    return rows, _WaitSources(
        ops=rank_trace.infos,
        causes=ops.causes_elsewhere,
        starts=rank_trace.start_seconds[order].tolist(),
        ends=rank_trace.end_seconds[order].tolist(),
        issues=rank_trace.issue_seconds[order].tolist(),
        infos=rank_trace.info_indices[order].tolist(),
        stall_ends=[end for _, end, _ in stalls],
        stalls=stalls,
        allocator=sorted((start, end) for _, start, end in rank_trace.allocator_blocks if end > start),
    )


def _serialize_stalls(rank_trace: Trace) -> list[tuple[float, float, int]]:
    """The host's stalls in order. Where stalls of two threads overlap, the first is kept, and of the second
    the part after it.
    """
    stalls: list[tuple[float, float, int]] = []
    last_end = -math.inf
    for start, end, info in sorted(stall[1:] for stall in rank_trace.host_blocks):
        if end > max(start, last_end):
            stalls.append((max(start, last_end), end, info))
            last_end = end
    return stalls


_Interval = tuple[float, float, int, int]  # start, end, cause, info


def _split_gap(gap_start: float, start: float, issue: float, sources: _WaitSources) -> list[_Interval]:
    """Split the gap before a span: see [Note: why the compute stream stands still]."""
    issued = gap_start if math.isnan(issue) else min(max(issue, gap_start), start)
    intervals = list(_split_host_interval(gap_start, issued, sources)) if issued > gap_start else []
    intervals += _split_wait(start, issued, sources)
    return intervals


def _split_host_interval(start: float, end: float, sources: _WaitSources) -> Iterator[_Interval]:
    """Split an interval in which the host had not issued the next op: in torch's allocator, or
    outside of it.
    """
    for index in range(bisect_right(sources.allocator, start, key=itemgetter(1)), len(sources.allocator)):
        call_start, call_end = sources.allocator[index]
        if call_start >= end:
            break
        if call_start > start:
            yield from _split_around_allocator(start, call_start, sources)
        yield max(start, call_start), min(end, call_end), _ALLOCATOR, HOST
        start = min(end, call_end)
    if end > start:
        yield from _split_around_allocator(start, end, sources)


def _split_around_allocator(start: float, end: float, sources: _WaitSources) -> Iterator[_Interval]:
    """Split an interval of the host outside of the allocator: blocked on a span, or busy (host-bound)."""
    for index in range(bisect_right(sources.stall_ends, start), len(sources.stalls)):
        stall_start, stall_end, info = sources.stalls[index]
        if stall_start >= end:
            break
        kind = sources.ops[info].kind
        if kind in COMPUTE_KINDS or kind == "host":
            continue
        if stall_start > start:
            yield start, stall_start, _HOST_BOUND, HOST
        yield max(start, stall_start), min(end, stall_end), sources.causes[info], info
        start = stall_end
    if end > start:
        yield start, end, _HOST_BOUND, HOST


def _split_wait(until: float, issued: float, sources: _WaitSources) -> Iterator[_Interval]:
    """Split the wait of an issued op by the chain of spans on other streams, backwards from the op's start,
    `until`."""
    starts, ends, infos, causes = sources.starts, sources.ends, sources.infos, sources.causes
    slack = _SAME_INSTANT * until
    cursor = until
    last = bisect_right(ends, cursor + slack) - 1
    follower: int | None = None  # the span after an idle interval: not yet issued, or waiting for its peers
    while cursor > issued:
        while last >= 0 and starts[last] >= cursor - slack:
            last -= 1
        is_explained = last >= 0 and ends[last] > issued
        ended = ends[last] if is_explained else issued
        if ended < cursor - slack or not is_explained:
            yield from _split_idle_interval(ended, cursor, follower, sources)
            cursor = ended
        if not is_explained:
            return
        info, began = infos[last], starts[last]
        if began < issued:
            began = issued
        yield began, cursor, causes[info], info
        cursor, follower = began, last


def _split_idle_interval(
    start: float, end: float, follower: int | None, sources: _WaitSources
) -> Iterator[_Interval]:
    """Split an interval in which no stream worked: the host until it issued the follower, then the wait of
    the follower."""
    if follower is None:
        yield from _split_host_interval(start, end, sources)
        return
    issue, info = sources.issues[follower], sources.infos[follower]
    issued = start if math.isnan(issue) else min(max(issue, start), end)
    yield from _split_host_interval(start, issued, sources)
    if end > issued:
        yield issued, end, sources.causes[info], info


def weighted_sums(terms: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted sums of (weight, values by name), by name. Negative sums become 0."""
    total: dict[str, float] = {}
    for factor, values in terms:
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + factor * value
    return {name: max(value, 0.0) for name, value in total.items()}
