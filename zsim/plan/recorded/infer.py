"""A recorded step as a program to run again: per rank, what its host issued, and what each op waited for.

The only plans with seconds in them: a recorded kernel takes what it took. What a recording does not hold is
read out of its times, the streams' order and the ranges that torch writes.

# [Note: what an op waited for]
Kineto does not say which event a stream waited for. An op starts when the host has issued it, its stream is
free, and what it waits for on other streams is over. So:
- an op that starts later than the host and its own stream explain waited for the op that ended last before
  it on another stream;
- a reduction (and any collective of the optimizer's phase) waits for the last op that the host issued to the
  computing stream before it: torch makes NCCL's stream wait for the current one;
- a gather waits for the copy of the same unit just before it (FSDP2's copy-in), a reduction for the
  reduction of the same unit in another group (HSDP);
- a gather's result is awaited by the first later op of the same unit on another stream; without units by the
  first op before which the host made a stream wait; without that by the first that starts after its end;
- a reduction's result is awaited by the optimizer; without phases by the first op that follows a wait.
None of these may contradict the recording: what started before an op ended did not wait for it. Those that
were satisfied in time show nothing in the recording and matter only when times change.
What remains unexplained stays as a delay of the op (`lag_seconds`), and is counted.

# [Note: the host of a replay]
The host issues an op some time after the one before (what it did in between, as recorded), and first waits
for what it was blocked on (zsim.plan.recorded.host). On a CPU run it is the host that computes: such ops are
done in line.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zsim.plan.recorded.host import LONGEST_LAG, HostReader
from zsim.plan.recorded.replay_ops import ReplayOp, ReplayPlan
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace

_TOLERANCE = 2e-6  # seconds: launches and clocks are no better
_NEAR = 8  # ops: what belongs to one collective is issued together
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce", "reduce"})
_ON_HOST = frozenset({"compute", "optimizer", "copy"})  # what a CPU run computes in line
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})  # they meet nobody here: they take what they took


def replay_plans(step: Trace) -> dict[int, ReplayPlan]:
    """The program of each rank of one recorded step (`Trace.typical_step()`), or of a simulated one."""
    ranks = np.unique(step.ranks).tolist()
    return {rank: _Reader(step, rank).plan() for rank in ranks}


class _Row(NamedTuple):
    """One span; `seconds` is its length, of a collective its transfer."""

    info: SpanInfo
    issue: float
    start: float
    end: float
    seconds: float
    follows_wait: bool
    is_issue_known: bool


def _rows(step: Trace, rank: int) -> list[_Row]:
    """The spans of a rank; what has no time of issue was issued when it began."""
    mine = np.flatnonzero(step.ranks == rank)
    start, end, issue = step.start_seconds[mine], step.end_seconds[mine], step.issue_seconds[mine]
    is_known = ~np.isnan(issue)
    issue = np.where(is_known, issue, start)
    seconds = end - start
    if step.transfer_seconds is not None:
        transfers = step.transfer_seconds[mine]
        seconds = np.where(np.isnan(transfers), seconds, transfers)
    waits = np.zeros(len(mine), dtype=np.bool_) if step.follows_wait is None else step.follows_wait[mine]
    infos = [step.infos[index] for index in step.info_indices[mine].tolist()]
    columns = [column.tolist() for column in (issue, start, end, seconds, waits, is_known)]
    return [_Row(info, *row) for info, *row in zip(infos, *columns, strict=True)]


def _cut_where_the_host_issues(rows: list[_Row]) -> list[_Row]:
    """What the host computes, cut where it issues something else in between."""
    times = sorted({row.issue for row in rows if row.info.kind not in _ON_HOST})
    found = []
    for row in rows:
        if row.info.kind not in _ON_HOST:
            found.append(row)
            continue
        inside = times[bisect_right(times, row.start) : bisect_left(times, row.end)]
        for start, end in pairwise([row.start, *inside, row.end]):
            found.append(row._replace(issue=start, start=start, end=end, seconds=end - start))
    return found


class _Reader:
    """One rank's spans of a step, in the order in which its host issued them."""

    def __init__(self, step: Trace, rank: int) -> None:
        self.step, self.rank = step, rank
        self.is_cpu = step.metadata.get("computes_on") == "cpu"
        rows = _rows(step, rank)
        if self.is_cpu:
            rows = _cut_where_the_host_issues(rows)
        rows.sort(key=lambda row: (row.issue, row.start, self.is_cpu and row.info.kind in _ON_HOST))
        self.infos = [row.info for row in rows]
        self.issue = [row.issue for row in rows]
        self.start = [row.start for row in rows]
        self.end = [row.end for row in rows]
        self.seconds = [row.seconds for row in rows]
        self.follows_wait = [row.follows_wait for row in rows]
        self.is_issue_known = [row.is_issue_known for row in rows]
        self.streams = self._streams()
        self.before = self._before_on_stream()
        self.compute = self._compute_stream()

    def plan(self) -> ReplayPlan:
        times = zip(self.start, self.end, strict=True)
        columns = zip(self.infos, self.streams, self.seconds, times, strict=True)
        ops = [ReplayOp(*column) for column in columns]
        for op, is_known in zip(ops, self.is_issue_known, strict=True):
            op.is_issue_known = is_known
        self._number_meetings(ops)
        begin, host_begin, end, host_end = self._bounds()
        plan = ReplayPlan(self.rank, ops, begin, host_begin, self._stream_begins(begin))
        plan.recorded_seconds = end - begin
        for op in ops:
            op.is_on_host = self.is_cpu and op.info.kind in _ON_HOST
        HostReader(self.issue, self.end, self._blocks()).add_to(plan, host_begin, host_end)
        self._add_allocator(ops, host_begin)
        waits = self._explain(ops)
        for number, others in enumerate(waits):
            ops[number].after = self._last_of_each_stream(others)
        self._add_lags(plan)
        plan.unexplained_seconds = sum(op.lag_seconds for op in ops if op.lag_seconds > LONGEST_LAG)
        return plan

    # -- what is where ------------------------------------------------------------------------------

    def _streams(self) -> list[str]:
        """The in-order stream of each op. What a recording calls one stream but ran at once (files, gloo's
        threads) is several."""
        free: dict[str, list[float]] = {}
        streams = []
        for info, start, end in zip(self.infos, self.start, self.end, strict=True):
            name = info.stream or info.group
            lanes = free.setdefault(name, [])
            lane = next(
                (place for place, until in enumerate(lanes) if until <= start + _TOLERANCE), len(lanes)
            )
            lanes[lane : lane + 1] = [end]
            streams.append(f"{name} ({lane + 1})" if lane else name)
        return streams

    def _before_on_stream(self) -> list[int]:
        """The op before each on its stream; -1 without one."""
        last: dict[str, int] = {}
        before = []
        for number, stream in enumerate(self.streams):
            before.append(last.get(stream, -1))
            last[stream] = number
        return before

    def _compute_stream(self) -> str:
        """The stream with most kernel time."""
        busy: dict[str, float] = {}
        for info, stream, seconds in zip(self.infos, self.streams, self.seconds, strict=True):
            if info.kind in _ON_HOST:
                busy[stream] = busy.get(stream, 0.0) + seconds
        return max(busy, key=lambda stream: busy[stream], default="compute")

    def _bounds(self) -> tuple[float, float, float, float]:
        """(start, host's start, end, host's end) of the step on this rank."""
        if self.step.steps and self.rank in self.step.steps[0].bounds:
            start, end, host_start, host_end = self.step.steps[0].bounds[self.rank]
            return start, host_start, end, host_end
        end = self.step.step_seconds
        blocked = (block[2] for block in self.step.host_blocks if block[0] == self.rank)
        return 0.0, 0.0, end, min(end, max([0.0, *self.issue, *blocked]))

    def _blocks(self) -> deque[tuple[float, float, SpanInfo]]:
        """The host's waits in order, and what each was for."""
        rows = sorted(block[1:] for block in self.step.host_blocks if block[0] == self.rank)
        return deque((start, end, self.step.infos[info]) for start, end, info in rows)

    def _add_allocator(self, ops: list[ReplayOp], begin: float) -> None:
        """When the host was in torch's allocator, between the issue of two ops."""
        for rank, start, end in self.step.allocator_blocks:
            number = bisect_right(self.issue, start)
            if rank == self.rank and number < len(ops):
                since = start - (self.issue[number - 1] if number else begin)
                ops[number].in_allocator += ((since, self.issue[number] - end),)

    def _stream_begins(self, begin: float) -> dict[str, float]:
        """When each stream is free: at the step's start, or before where it was already at work then."""
        begins: dict[str, float] = {}
        for stream, start in zip(self.streams, self.start, strict=True):
            begins.setdefault(stream, min(start, begin))
        return begins

    def _number_meetings(self, ops: list[ReplayOp]) -> None:
        counts: dict[str, int] = {}
        for op in ops:
            if op.info.kind in COLLECTIVES and op.info.kind not in POINT_TO_POINT:
                number = counts.get(op.info.group, 0)
                op.meeting, counts[op.info.group] = (op.info.group, number), number + 1

    # -- the streams --------------------------------------------------------------------------------

    def _explain(self, ops: list[ReplayOp]) -> list[set[int]]:
        """The earlier ops on other streams that each op waits for; see [Note: what an op waited for]."""
        waits: list[set[int]] = [set() for _ in ops]
        by_end = sorted(range(len(ops)), key=lambda number: self.end[number])
        ends = [self.end[number] for number in by_end]
        for number in range(len(ops)):
            if ops[number].is_on_host:
                continue
            seen = self._seen(number, by_end, ends, ops)
            if seen is not None:
                waits[number].add(seen)
            if self.infos[number].kind not in COLLECTIVES:
                continue
            waits[number] |= self._sources(number, ops)
            consumer = self._consumer(number, ops)
            if consumer is not None:
                waits[consumer].add(number)
        return waits

    def _ready(self, number: int) -> float:
        """When the host had issued an op and its stream was free."""
        before = self.before[number]
        return max(self.issue[number], self.end[before]) if before >= 0 else self.issue[number]

    def _seen(self, number: int, by_end: list[int], ends: list[float], ops: list[ReplayOp]) -> int | None:
        """The op that this one visibly waited for: it began as that one, on another stream, ended."""
        start, ready = self.start[number], self._ready(number)
        if start <= ready + _TOLERANCE:
            return None
        place = bisect_right(ends, start + _TOLERANCE) - 1
        while place >= 0 and ends[place] > ready and start - ends[place] <= LONGEST_LAG:
            other = by_end[place]
            is_other = self.streams[other] != self.streams[number] and not ops[other].is_on_host
            if other < number and is_other:
                return other
            place -= 1
        return None

    def _sources(self, number: int, ops: list[ReplayOp]) -> set[int]:
        """What a collective's input comes from."""
        info, start = self.infos[number], self.start[number] + _TOLERANCE
        is_reduction = info.kind in _REDUCTIONS or info.phase == "optimizer"
        found: set[int] = set()
        has_unit = not info.module
        for other in range(number - 1, -1, -1):
            if self.streams[other] == self.streams[number] or ops[other].is_on_host:
                continue
            theirs = self.infos[other]
            is_over = self.end[other] <= start
            if not has_unit and other >= number - _NEAR and theirs.module == info.module:
                if theirs.kind not in COLLECTIVES or (is_reduction and theirs.kind in _REDUCTIONS):
                    found |= {other} if is_over else set()
                    has_unit = True
            elif is_reduction and is_over and self.streams[other] == self.compute:
                if theirs.kind not in COLLECTIVES:
                    return found | {other}
            elif not is_reduction and other < number - _NEAR:
                break
        return found

    def _consumer(self, number: int, ops: list[ReplayOp]) -> int | None:
        """The first op that needs what a collective brought."""
        info, end, stream = self.infos[number], self.end[number] - _TOLERANCE, self.streams[number]
        first, waiting = None, None
        for other in range(number + 1, len(ops)):
            theirs = self.infos[other]
            if self.streams[other] == stream or theirs.kind in COLLECTIVES or ops[other].is_on_host:
                continue
            is_after = self.start[other] >= end
            if info.kind in _REDUCTIONS:
                is_named = theirs.phase == "optimizer" != info.phase
            else:
                is_named = _same_unit(info, theirs)
            if is_named:
                return other if is_after else None
            if is_after and first is None:
                first = other
            if is_after and waiting is None and self.follows_wait[other]:
                waiting = other
        return waiting if waiting is not None or info.kind in _REDUCTIONS else first

    def _last_of_each_stream(self, others: set[int]) -> tuple[int, ...]:
        last: dict[str, int] = {}
        for other in others:
            stream = self.streams[other]
            last[stream] = max(other, last.get(stream, other))
        return tuple(sorted(last.values()))

    def _add_lags(self, plan: ReplayPlan) -> None:
        """What an op started later than everything it waited for (or before it, by less than clocks tell)."""
        free = dict(plan.stream_begins)
        for number, op in enumerate(plan.ops):
            if op.is_on_host:
                continue
            ready = max(self.issue[number], free[op.stream], *(self.end[other] for other in op.after))
            op.lag_seconds = max(self.start[number] - ready, -_TOLERANCE)
            free[op.stream] = self.end[number]


def _same_unit(gathered: SpanInfo, other: SpanInfo) -> bool:
    """Whether an op is of the module whose parameters were gathered, or inside it, or around it."""
    one, two = gathered.module, other.module
    return bool(one and two) and (one == two or one.startswith(f"{two}.") or two.startswith(f"{one}."))
