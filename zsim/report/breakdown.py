"""The time of a step by cause, as seen from the compute stream of one rank.

Every instant of the step belongs to one of `compute`, `exposed_communication`, `offload_stall`, `optimizer`,
`allocator` and `host_bound`, so their sum is the step.

# [Note: why the compute stream stands still]
A gap ends when the next op starts. Until the host had issued that op, the gap is put down to the host:
torch's allocator where it had run short and waited or called the driver, else the op that the host was
blocked on, else host-bound. After that the op waited for other streams. Which of them is found backwards from
the end of the gap: the op waited for the span that ended last, before that span began for the span that ended
before it, and so on to the start of the gap.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools
from zsim.dataclass import dataclass
from zsim.report.views.meanings import BREAKDOWN, COMPUTE_KINDS, waiting_cause
from zsim.trace.trace import SpanInfo, SpanInfos, Trace, are_of_kinds

_ENDED_TOGETHER = 1e-9  # relative: ends closer than this part of the step are the same instant


class Wait(NamedTuple):
    """An interval in which the compute stream did not compute; `info` is the index of the span information
    that it waited for, None where it waited for the host."""

    start_seconds: float
    end_seconds: float
    cause: str
    info: int | None
    phase: str

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one step by cause (and by phase of the program), and every wait with its cause."""

    seconds: dict[str, float]
    by_phase: dict[str, dict[str, float]]
    waits: tuple[Wait, ...]


# A span on the compute stream, with the gap before it: the gap's start, the span's start and end, when the
# host issued it, and the index of its information (-1: the end of the step).
_Row = tuple[float, float, float, float, int]


class _Ops(NamedTuple):
    """The distinct ops of a trace as they are seen from the compute stream: whether they are on it, or on any
    other; the breakdown's name for their seconds on it, and for waits for them elsewhere."""

    are_on_it: Bools
    are_elsewhere: Bools
    meanings: list[str]
    causes: list[str]


@dataclass(frozen=True, slots=True)
class _Scene:
    """Everything that the compute stream can wait for: the spans of all other streams sorted by end, the
    intervals in which the host was blocked, and those in which it was in torch's allocator."""

    ops: SpanInfos
    causes: list[str]  # of a wait for each of `ops`
    starts: list[float]
    ends: list[float]
    issues: list[float]
    infos: list[int]
    block_ends: list[float]
    blocks: list[tuple[float, float, int]]
    allocator: list[tuple[float, float]]


def compute_stream(trace: Trace) -> str:
    """Name of the compute stream: `compute`, or the stream that computes longest where none has that name
    (in a recorded trace)."""
    if trace.infos.once(_has_compute_stream):
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
    own = trace if rank is None else trace.of_rank(rank)
    ops = own.infos.once(_ops_seen_from, compute_stream(own))
    rows, scene = _rows_and_scene(own, ops)
    by_phase: dict[str, dict[str, float]] = {}
    waits: list[Wait] = []
    phase = "forward"
    for before, began, ended, issue, number in rows:
        if number >= 0:
            phase = own.infos[number].phase
        table = by_phase.get(phase)
        if table is None:
            table = by_phase[phase] = dict.fromkeys(BREAKDOWN, 0.0)
        if began > before:
            for start, end, cause, info in _gap(before, began, issue, scene):
                table[cause] += end - start
                waits.append(Wait(start, end, cause, info, phase))
        if number < 0:
            continue
        meaning = ops.meanings[number]
        table[meaning] += ended - began
        if meaning in ("exposed_communication", "offload_stall"):
            waits.append(Wait(began, ended, meaning, number, phase))
    seconds = {name: math.fsum(table[name] for table in by_phase.values()) for name in BREAKDOWN}
    return Breakdown(seconds, by_phase, tuple(waits))


def _ops_seen_from(infos: SpanInfos, stream: str) -> _Ops:
    """The distinct ops as seen from `stream`, for `SpanInfos.once`."""
    are_on_host = infos.once(are_of_kinds, frozenset({"host"}))
    are_on_it = np.array([info.stream == stream for info in infos], dtype=bool) & ~are_on_host
    kinds = [info.kind for info in infos]
    cause_of = {kind: waiting_cause(kind) for kind in dict.fromkeys(kinds)}
    meanings = [_meaning_on_compute_stream(info) for info in infos]
    return _Ops(are_on_it, ~are_on_it & ~are_on_host, meanings, list(map(cause_of.__getitem__, kinds)))


def _meaning_on_compute_stream(info: SpanInfo) -> str:
    if info.kind in COMPUTE_KINDS:
        return "optimizer" if info.kind == "optimizer" or info.phase == "optimizer" else "compute"
    return waiting_cause(info.kind)


def _rows_and_scene(own: Trace, ops: _Ops) -> tuple[list[_Row], _Scene]:
    """The spans of the compute stream with the gaps before them, clipped to the step; and the scene of all
    other spans."""
    lasts = own.end_seconds > own.start_seconds
    mine = np.flatnonzero(ops.are_on_it[own.info_indices] & lasts)
    theirs = np.flatnonzero(ops.are_elsewhere[own.info_indices] & lasts)

    order = mine[np.argsort(own.start_seconds[mine], kind="stable")]
    ends = np.minimum(own.end_seconds[order], own.step_seconds)
    before = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(ends, 0.0))])
    starts = np.minimum(np.maximum(own.start_seconds[order], before[:-1]), own.step_seconds)
    ends = np.maximum(ends, starts)
    columns = before[:-1], starts, ends, own.issue_seconds[order], own.info_indices[order]
    rows: list[_Row] = list(zip(*(column.tolist() for column in columns), strict=True))
    rows.append((float(before[-1]), own.step_seconds, own.step_seconds, math.nan, -1))

    order = theirs[np.lexsort((own.start_seconds[theirs], own.end_seconds[theirs]))]
    blocks = _one_at_a_time(own)
    return rows, _Scene(
        ops=own.infos,
        causes=ops.causes,
        starts=own.start_seconds[order].tolist(),
        ends=own.end_seconds[order].tolist(),
        issues=own.issue_seconds[order].tolist(),
        infos=own.info_indices[order].tolist(),
        block_ends=[end for _, end, _ in blocks],
        blocks=blocks,
        allocator=sorted((start, end) for _, start, end in own.allocator_blocks if end > start),
    )


def _one_at_a_time(own: Trace) -> list[tuple[float, float, int]]:
    """The host's blocks in order. Where blocks of two threads overlap, the first is kept whole, and of the
    second the part after it."""
    blocks: list[tuple[float, float, int]] = []
    free = -math.inf
    for start, end, info in sorted(block[1:] for block in own.host_blocks):
        if end > max(start, free):
            blocks.append((max(start, free), end, info))
            free = end
    return blocks


_Stretch = tuple[float, float, str, int | None]


def _gap(gap_start: float, start: float, issue: float, scene: _Scene) -> list[_Stretch]:
    """Split the gap before a span: see [Note: why the compute stream stands still]."""
    issued = gap_start if math.isnan(issue) else min(max(issue, gap_start), start)
    found = list(_host(gap_start, issued, scene)) if issued > gap_start else []
    found += _wait(start, issued, scene)
    return found


def _host(start: float, end: float, scene: _Scene) -> Iterator[_Stretch]:
    """Split an interval in which the host had not issued the next op: in torch's allocator, or elsewhere."""
    for index in range(bisect_right(scene.allocator, start, key=itemgetter(1)), len(scene.allocator)):
        asked, answered = scene.allocator[index]
        if asked >= end:
            break
        if asked > start:
            yield from _elsewhere(start, asked, scene)
        yield max(start, asked), min(end, answered), "allocator", None
        start = min(end, answered)
    if end > start:
        yield from _elsewhere(start, end, scene)


def _elsewhere(start: float, end: float, scene: _Scene) -> Iterator[_Stretch]:
    """Split an interval of the host outside of the allocator: blocked on a span, or busy (host-bound)."""
    for index in range(bisect_right(scene.block_ends, start), len(scene.blocks)):
        block_start, block_end, info = scene.blocks[index]
        if block_start >= end:
            break
        kind = scene.ops[info].kind
        if kind in COMPUTE_KINDS or kind == "host":
            continue
        if block_start > start:
            yield start, block_start, "host_bound", None
        yield max(start, block_start), min(end, block_end), scene.causes[info], info
        start = block_end
    if end > start:
        yield start, end, "host_bound", None


def _wait(until: float, issued: float, scene: _Scene) -> Iterator[_Stretch]:
    """Split the wait of an issued op by the chain of spans on other streams, backwards from the op's start,
    `until`."""
    slack = _ENDED_TOGETHER * until
    at = until
    last = bisect_right(scene.ends, at + slack) - 1
    follower: int | None = None  # the span after an idle interval: not yet issued, or waiting for its peers
    while at > issued:
        while last >= 0 and scene.starts[last] >= at - slack:
            last -= 1
        is_explained = last >= 0 and scene.ends[last] > issued
        ended = scene.ends[last] if is_explained else issued
        if ended < at - slack or not is_explained:
            yield from _idle(ended, at, follower, scene)
            at = ended
        if not is_explained:
            return
        info, began = scene.infos[last], max(issued, scene.starts[last])
        yield began, at, scene.causes[info], info
        at, follower = began, last


def _idle(start: float, end: float, follower: int | None, scene: _Scene) -> Iterator[_Stretch]:
    """Split an interval in which no stream worked: the host until it issued the follower, then the wait of
    the follower."""
    if follower is None:
        yield from _host(start, end, scene)
        return
    issue, info = scene.issues[follower], scene.infos[follower]
    issued = start if math.isnan(issue) else min(max(issue, start), end)
    yield from _host(start, issued, scene)
    if end > issued:
        yield issued, end, scene.causes[info], info
