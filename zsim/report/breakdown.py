"""Where the time of a step goes, seen from the compute stream of one rank.

Every instant of the step belongs to one of `compute`, `exposed_communication`, `offload_stall`, `optimizer`,
`allocator` and `host_bound`, so their sum is the step.

# [Note: why the compute stream stands still]
A gap ends when the next op starts. Until the host had issued that op, the gap is the host's: torch's
allocator where that had run short and waited or asked the driver, else what the host itself was blocked on,
else host-bound. After that the op waited for other streams. Which of them is read
backwards from the end of the gap: the span that ended last is what the op waited for, before that span
began it was the one that ended before it, and so on to the start of the gap.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from zsim.report.views.meanings import BREAKDOWN, COMPUTE_KINDS, waiting_cause
from zsim.trace.trace import SpanInfo, Trace

_ENDED_TOGETHER = 1e-9  # relative: ends closer than this part of the step are the same instant


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which the compute stream did not compute; `info` is the index of what it waited for."""

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
    """Seconds of one step by meaning (and by phase of the program), and every wait with its cause."""

    seconds: dict[str, float]
    by_phase: dict[str, dict[str, float]]
    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """One span on the compute stream, and the gap before it; -1 as info: the end of the step."""

    gap_start: float
    start: float
    end: float
    issue: float
    info: int


@dataclass(frozen=True, slots=True)
class _Scene:
    """What can be waited for: the spans of all other streams sorted by end, the host's blocks, and when it
    was in torch's allocator."""

    kinds: list[str]
    starts: list[float]
    ends: list[float]
    issues: list[float]
    infos: list[int]
    block_ends: list[float]
    blocks: list[tuple[float, float, int]]
    allocator: list[tuple[float, float]]


def compute_stream(trace: Trace) -> str:
    """`compute`, or the stream that computes longest where none is called so (a recorded trace)."""
    if any(info.stream == "compute" for info in trace.infos):
        return "compute"
    seconds: dict[str, float] = {}
    for _, info, start, end in trace.rows():
        if info.kind in ("compute", "optimizer"):
            seconds[info.stream] = seconds.get(info.stream, 0.0) + end - start
    return max(sorted(seconds), key=lambda stream: seconds[stream], default="compute")


def step_breakdown(trace: Trace, rank: int | None = None) -> Breakdown:
    """The breakdown of `trace.step_seconds`, on `rank` or else the first rank of the trace."""
    if rank is None and len(trace):
        rank = int(trace.ranks[0])
    own = trace if rank is None else trace.of_rank(rank)
    rows, scene = _rows_and_scene(own)
    meanings = [_meaning_on_compute_stream(info) for info in own.infos]
    by_phase: dict[str, dict[str, float]] = {}
    waits: list[Wait] = []
    phase = "forward"
    for row in rows:
        phase = own.infos[row.info].phase if row.info >= 0 else phase
        table = by_phase.setdefault(phase, dict.fromkeys(BREAKDOWN, 0.0))
        if row.start > row.gap_start:
            for start, end, cause, info in _gap(row, scene):
                table[cause] += end - start
                waits.append(Wait(start, end, cause, info, phase))
        if row.info < 0:
            continue
        meaning = meanings[row.info]
        table[meaning] += row.end - row.start
        if meaning in ("exposed_communication", "offload_stall"):
            waits.append(Wait(row.start, row.end, meaning, row.info, phase))
    seconds = {name: math.fsum(table[name] for table in by_phase.values()) for name in BREAKDOWN}
    return Breakdown(seconds, by_phase, tuple(waits))


def _meaning_on_compute_stream(info: SpanInfo) -> str:
    if info.kind in COMPUTE_KINDS:
        return "optimizer" if info.kind == "optimizer" or info.phase == "optimizer" else "compute"
    return waiting_cause(info.kind)


def _rows_and_scene(own: Trace) -> tuple[list[_Row], _Scene]:
    """The spans of the compute stream with the gaps before them, clipped to the step; and all others."""
    stream = compute_stream(own)
    is_host = np.array([info.kind == "host" for info in own.infos], dtype=bool)
    is_compute = np.array([info.stream == stream for info in own.infos], dtype=bool) & ~is_host
    lasts = own.end_seconds > own.start_seconds
    mine = np.flatnonzero(is_compute[own.info_indices] & lasts)
    theirs = np.flatnonzero(~is_compute[own.info_indices] & ~is_host[own.info_indices] & lasts)

    order = mine[np.argsort(own.start_seconds[mine], kind="stable")]
    ends = np.minimum(own.end_seconds[order], own.step_seconds)
    before = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(ends, 0.0))])
    starts = np.minimum(np.maximum(own.start_seconds[order], before[:-1]), own.step_seconds)
    ends = np.maximum(ends, starts)
    rows = [
        _Row(gap_start, start, end, issue, info)
        for gap_start, start, end, issue, info in zip(
            before[:-1].tolist(),
            starts.tolist(),
            ends.tolist(),
            own.issue_seconds[order].tolist(),
            own.info_indices[order].tolist(),
            strict=True,
        )
    ]
    rows.append(_Row(float(before[-1]), own.step_seconds, own.step_seconds, math.nan, -1))

    order = theirs[np.lexsort((own.start_seconds[theirs], own.end_seconds[theirs]))]
    blocks = _one_at_a_time(own)
    return rows, _Scene(
        kinds=[info.kind for info in own.infos],
        starts=own.start_seconds[order].tolist(),
        ends=own.end_seconds[order].tolist(),
        issues=own.issue_seconds[order].tolist(),
        infos=own.info_indices[order].tolist(),
        block_ends=[end for _, end, _ in blocks],
        blocks=blocks,
        allocator=sorted((start, end) for _, start, end in own.allocator_blocks if end > start),
    )


def _one_at_a_time(own: Trace) -> list[tuple[float, float, int]]:
    """The host's blocks in order; of two threads' that overlap the first, and what the other has beyond."""
    blocks: list[tuple[float, float, int]] = []
    free = -math.inf
    for start, end, info in sorted(block[1:] for block in own.host_blocks):
        if end > max(start, free):
            blocks.append((max(start, free), end, info))
            free = end
    return blocks


_Stretch = tuple[float, float, str, int | None]


def _gap(row: _Row, scene: _Scene) -> Iterator[_Stretch]:
    """Split the gap before `row`: see [Note: why the compute stream stands still]."""
    issued = row.gap_start if math.isnan(row.issue) else min(max(row.issue, row.gap_start), row.start)
    yield from _host(row.gap_start, issued, scene)
    yield from _wait(row, issued, scene)


def _host(start: float, end: float, scene: _Scene) -> Iterator[_Stretch]:
    """The host had not issued the next op: it was in an allocator that is short, or elsewhere."""
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
    """The host was blocked on something, or it was busy."""
    for index in range(bisect_right(scene.block_ends, start), len(scene.blocks)):
        block_start, block_end, info = scene.blocks[index]
        if block_start >= end:
            break
        if scene.kinds[info] in COMPUTE_KINDS or scene.kinds[info] == "host":
            continue
        if block_start > start:
            yield start, block_start, "host_bound", None
        yield max(start, block_start), min(end, block_end), waiting_cause(scene.kinds[info]), info
        start = block_end
    if end > start:
        yield start, end, "host_bound", None


def _wait(row: _Row, issued: float, scene: _Scene) -> Iterator[_Stretch]:
    """The op was issued and waited: the chain of spans on other streams, read backwards from its start."""
    slack = _ENDED_TOGETHER * row.start
    at = row.start
    last = bisect_right(scene.ends, at + slack) - 1
    follower: int | None = None  # the span before which nothing ran: not issued yet, or waiting for its peers
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
        yield began, at, waiting_cause(scene.kinds[info]), info
        at, follower = began, last


def _idle(start: float, end: float, follower: int | None, scene: _Scene) -> Iterator[_Stretch]:
    """No stream worked. The host's, until it issued the follower; from then on the follower's own wait."""
    if follower is None:
        yield from _host(start, end, scene)
        return
    issue, info = scene.issues[follower], scene.infos[follower]
    issued = start if math.isnan(issue) else min(max(issue, start), end)
    yield from _host(start, issued, scene)
    if end > issued:
        yield issued, end, waiting_cause(scene.kinds[info]), info
