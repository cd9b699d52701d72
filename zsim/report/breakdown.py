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
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Floats, Ints, numbered
from zsim.dataclass import dataclass
from zsim.report.views.meanings import COMPUTE_KINDS, waiting_cause
from zsim.report.waits import CAUSES, HOST, PLACE_OF_CAUSE, Waits
from zsim.trace.trace import SpanInfos, Trace

_ENDED_TOGETHER = 1e-9  # relative: ends closer than this part of the step are the same instant
_HOST_BOUND, _ALLOCATOR = PLACE_OF_CAUSE["host_bound"], PLACE_OF_CAUSE["allocator"]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one step by cause (and by phase of the program), and every wait with its cause."""

    seconds: dict[str, float]
    by_phase: dict[str, dict[str, float]]
    waits: Waits


class _Ops(NamedTuple):
    """The distinct ops of a trace as they are seen from the compute stream."""

    are_on_it: Bools
    """Whether they are on the compute stream."""
    are_elsewhere: Bools
    """Whether they are on another stream."""
    meanings: Ints
    """The cause of their seconds on the compute stream, by its index in `CAUSES`."""
    causes: list[int]
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

    before: Floats
    """The starts of the gaps before the spans."""
    starts: Floats
    ends: Floats
    issues: Floats
    """When the host issued the spans."""
    phases: Ints
    infos: Ints
    """The indices of the spans' information."""


class _Parts(NamedTuple):
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
class _Scene:
    """Everything that the compute stream can wait for: the spans of all other streams sorted by end, the
    intervals in which the host was blocked, and those in which it was in torch's allocator."""

    ops: SpanInfos
    causes: list[int]  # of a wait for each of `ops`
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
    parts = _parts(rows, ops, scene)
    cells = parts.phases * len(CAUSES) + parts.causes
    totals = np.bincount(cells, parts.ends - parts.starts, len(ops.phase_names) * len(CAUSES))
    tables = totals.reshape(-1, len(CAUSES)).tolist()
    by_phase = {
        ops.phase_names[phase]: dict(zip(CAUSES, tables[phase], strict=True))
        for phase in dict.fromkeys(rows.phases.tolist())
    }
    seconds = {name: math.fsum(table[name] for table in by_phase.values()) for name in CAUSES}
    return Breakdown(seconds, by_phase, parts.waits(ops.phase_names))


def _parts(rows: _Rows, ops: _Ops, scene: _Scene) -> _Parts:
    """The step in intervals: those of each gap, and then the span that ends the gap."""
    gaps = np.flatnonzero(rows.starts > rows.before)
    before, until, issues = (column[gaps].tolist() for column in (rows.before, rows.starts, rows.issues))
    found = [_gap(*gap, scene) for gap in zip(before, until, issues, strict=True)]
    width = 4  # of a stretch
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(found)), np.float64).reshape(-1, width)
    starts, ends, causes, infos = numbers.T
    of_rows = np.repeat(gaps, np.fromiter(map(len, found), np.int64, len(found)))
    spans = np.arange(len(rows.infos))
    order = np.argsort(np.append(2 * of_rows, 2 * spans + 1), kind="stable")
    return _Parts(
        np.append(starts, rows.starts[spans])[order],
        np.append(ends, rows.ends[spans])[order],
        np.append(causes.astype(np.int64), ops.meanings[rows.infos])[order],
        np.append(infos.astype(np.int64), rows.infos)[order],
        np.append(rows.phases[of_rows], rows.phases[spans])[order],
        np.append(np.ones(len(of_rows), np.bool_), ops.are_waits[rows.infos])[order],
    )


def _ops_seen_from(infos: SpanInfos, stream: str) -> _Ops:
    """The distinct ops as seen from `stream`, to be cached with the infos."""
    alike, of_ops = numbered([(info.stream, info.kind, info.phase) for info in infos])
    phase_names, phases = numbered(["forward", *(phase for _, _, phase in alike)])
    are_on_it = np.array([of == stream for of, _, _ in alike], np.bool_)
    are_on_host = np.array([kind == "host" for _, kind, _ in alike], np.bool_)
    meanings = [PLACE_OF_CAUSE[_meaning_on_compute_stream(kind, phase)] for _, kind, phase in alike]
    causes = [PLACE_OF_CAUSE[waiting_cause(kind)] for _, kind, _ in alike]
    return _Ops(
        are_on_it=(are_on_it & ~are_on_host)[of_ops],
        are_elsewhere=(~are_on_it & ~are_on_host)[of_ops],
        meanings=np.array(meanings, np.int64)[of_ops],
        causes=np.array(causes, np.int64)[of_ops].tolist(),
        are_waits=np.array([kind not in COMPUTE_KINDS for _, kind, _ in alike], np.bool_)[of_ops],
        phases=phases[1:][of_ops],
        phase_names=phase_names,
    )


def _meaning_on_compute_stream(kind: str, phase: str) -> str:
    if kind in COMPUTE_KINDS:
        return "optimizer" if kind == "optimizer" or phase == "optimizer" else "compute"
    return waiting_cause(kind)


def _rows_and_scene(own: Trace, ops: _Ops) -> tuple[_Rows, _Scene]:
    """The spans of the compute stream with the gaps before them, clipped to the step, and everything that
    they can wait for.
    """
    lasts = own.end_seconds > own.start_seconds
    mine = np.flatnonzero(ops.are_on_it[own.info_indices] & lasts)
    theirs = np.flatnonzero(ops.are_elsewhere[own.info_indices] & lasts)

    order = mine[np.argsort(own.start_seconds[mine], kind="stable")]
    ends = np.minimum(own.end_seconds[order], own.step_seconds)
    before = np.append(0.0, np.maximum.accumulate(np.maximum(ends, 0.0)))
    starts = np.minimum(np.maximum(own.start_seconds[order], before[:-1]), own.step_seconds)
    ends = np.maximum(ends, starts)
    infos = own.info_indices[order]
    phases = ops.phases[infos]
    rows = _Rows(
        before,
        np.append(starts, own.step_seconds),
        np.append(ends, own.step_seconds),
        np.append(own.issue_seconds[order], math.nan),
        np.append(phases, phases[-1] if len(phases) else 0),
        infos,
    )
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
    """The host's stalls in order. Where stalls of two threads overlap, the first is kept, and of the second
    the part after it.
    """
    blocks: list[tuple[float, float, int]] = []
    free = -math.inf
    for start, end, info in sorted(block[1:] for block in own.host_blocks):
        if end > max(start, free):
            blocks.append((max(start, free), end, info))
            free = end
    return blocks


_Stretch = tuple[float, float, int, int]  # start, end, cause, info


def _gap(gap_start: float, start: float, issue: float, scene: _Scene) -> list[_Stretch]:
    """Split the gap before a span: see [Note: why the compute stream stands still]."""
    issued = gap_start if math.isnan(issue) else min(max(issue, gap_start), start)
    found = list(_host(gap_start, issued, scene)) if issued > gap_start else []
    found += _wait(start, issued, scene)
    return found


def _host(start: float, end: float, scene: _Scene) -> Iterator[_Stretch]:
    """Split an interval in which the host had not issued the next op: in torch's allocator, or
    outside of it.
    """
    for index in range(bisect_right(scene.allocator, start, key=itemgetter(1)), len(scene.allocator)):
        asked, answered = scene.allocator[index]
        if asked >= end:
            break
        if asked > start:
            yield from _elsewhere(start, asked, scene)
        yield max(start, asked), min(end, answered), _ALLOCATOR, HOST
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
            yield start, block_start, _HOST_BOUND, HOST
        yield max(start, block_start), min(end, block_end), scene.causes[info], info
        start = block_end
    if end > start:
        yield start, end, _HOST_BOUND, HOST


def _wait(until: float, issued: float, scene: _Scene) -> Iterator[_Stretch]:
    """Split the wait of an issued op by the chain of spans on other streams, backwards from the op's start,
    `until`."""
    starts, ends, infos, causes = scene.starts, scene.ends, scene.infos, scene.causes
    slack = _ENDED_TOGETHER * until
    at = until
    last = bisect_right(ends, at + slack) - 1
    follower: int | None = None  # the span after an idle interval: not yet issued, or waiting for its peers
    while at > issued:
        while last >= 0 and starts[last] >= at - slack:
            last -= 1
        is_explained = last >= 0 and ends[last] > issued
        ended = ends[last] if is_explained else issued
        if ended < at - slack or not is_explained:
            yield from _idle(ended, at, follower, scene)
            at = ended
        if not is_explained:
            return
        info, began = infos[last], starts[last]
        if began < issued:
            began = issued
        yield began, at, causes[info], info
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
