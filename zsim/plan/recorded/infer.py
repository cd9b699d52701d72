"""Inference of a program to run again from a recorded step: per rank the ops that its host issued, and the
ops that each op waited for.

These are the only plans with seconds in them: a recorded kernel takes its recorded time. Dependencies, which
a recording does not hold, are inferred from its times, the order of its streams and the ranges that torch
writes.

# [Note: what an op waited for]
Kineto does not say which event a stream waited for. An op starts when the host has issued it, its stream is
free, and the ops that it waits for on other streams have ended. So:
- an op that starts later than its issue and its stream explain waited for the op that ended last before it
  on another stream.
- a reduction (and any collective of the optimizer's phase) waits for the last op that the host issued to the
  compute stream before it: torch makes NCCL's stream wait for the current stream.
- a gather waits for the copy of the same unit just before it (FSDP2's copy-in), a reduction for the
  reduction of the same unit in another group (HSDP).
- a gather's result is awaited by the first later op of the same unit on another stream. Without units it is
  the first op before which the host made a stream wait, and without such an op the first op that starts
  after the gather's end.
- a reduction's result is awaited by the optimizer, and without phases by the first op that follows a wait.
None of these may contradict the recording: an op that started before another ended did not wait for it. Waits
that were already satisfied do not show in the recording and matter only when times change.
A delay that remains unexplained stays with the op (`lag_seconds`), and is counted.

# [Note: the host of a replay]
The host issues an op as long after the previous op as recorded, and first waits for the ops that its calls
were blocked on (zsim.plan.recorded.infer). In a CPU run the host computes: such ops run in line.

The recorded host between the ops it issued: its work, and the calls that blocked it.

# [Note: a call that blocks]
A recorded wait of the host (`cudaStreamSynchronize`, a copy from pageable memory, a collective of gloo) is a
call: it lasts until the op that it waits for has ended, plus the call's own overhead. Both are kept: the op,
and the seconds of overhead after it, which are the whole call if the op had ended before or is not known. A
call during which another op is issued (the copy itself, or an op of another thread) is cut there. The rest of
the call waits before the next op. If several threads wait at once, the first wait counts.

# [Note: a recording without a host]
A recording may show the GPU alone: no op's launch and no call that blocked. When the host issued an op is not
known then, only that it had done so when the op started. Where the GPU went on without a pause the host was
ahead: such an op is issued in time. After a pause the host was what the GPU had waited for. If the op before
had waited for it too, the host had nothing ahead and goes on at its own pace, from one start to the next,
however fast kernels are. Else it is taken to have waited for the op that ended last (it read a number, or
drained the queue) and then to have worked for as long as the pause. A host that was slow once behind a full
queue looks the same, and a faster GPU would wait longer for it: so the replay is the lower end of what the
step takes, and its upper end each op issued when it started.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zsim.plan.ops import HostCall, Op, Phase, Program, RecordedWork
from zsim.plan.recorded.rank import RecordedRank
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace

_TOLERANCE = 2e-6  # seconds: the accuracy of launches and clocks
_MAX_ISSUE_DISTANCE = 8  # ops: the ops of one collective are issued at most this far apart
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce", "reduce"})
_ON_HOST = frozenset({"compute", "optimizer", "copy"})  # ops that a CPU run computes in line
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})


def recorded_ranks(step: Trace, *, is_host_in_time: bool = True) -> dict[int, RecordedRank]:
    """The program of each rank of one recorded step (`Trace.typical_step()`), or of a simulated step.

    With `is_host_in_time`, a host that is not recorded issues as in [Note: a recording without a host], else
    it issues each op when the op starts.
    """
    ranks = np.unique(step.ranks).tolist()
    return {rank: _Reader(step, rank, is_host_in_time).recorded_rank() for rank in ranks}


def shows_host(step: Trace, rank: int) -> bool:
    """Whether a rank's recording says anything about its host (see zsim.plan.recorded.infer)."""
    is_launched = bool((~np.isnan(step.issue_seconds[step.ranks == rank])).any())
    blocks = (*step.host_blocks, *step.allocator_blocks)
    return is_launched or step.metadata.get("computes_on") == "cpu" or any(row[0] == rank for row in blocks)


class _SpanRow(NamedTuple):
    """One span of a recording."""

    info: SpanInfo
    issue: float
    start: float
    end: float
    seconds: float
    """The span's length, or the transfer time of a collective if that is known."""
    follows_wait: bool
    is_issue_known: bool


def _rows(step: Trace, rank: int) -> list[_SpanRow]:
    """The spans of a rank. A span without an issue time counts as issued at its start."""
    indices = np.flatnonzero(step.ranks == rank)
    start, end, issue = step.start_seconds[indices], step.end_seconds[indices], step.issue_seconds[indices]
    is_known = ~np.isnan(issue)
    issue = np.where(is_known, issue, start)
    seconds = end - start
    if step.transfer_seconds is not None:
        transfers = step.transfer_seconds[indices]
        seconds = np.where(np.isnan(transfers), seconds, transfers)
    waits = (
        np.zeros(len(indices), dtype=np.bool_) if step.follows_wait is None else step.follows_wait[indices]
    )
    infos = [step.infos[index] for index in step.info_indices[indices].tolist()]
    columns = [column.tolist() for column in (issue, start, end, seconds, waits, is_known)]
    return [_SpanRow(info, *row) for info, *row in zip(infos, *columns, strict=True)]


def _split_at_issues(rows: list[_SpanRow]) -> list[_SpanRow]:
    """The rows, with each span of the host's computation split where the host issues another op inside it."""
    times = sorted({row.issue for row in rows if row.info.kind not in _ON_HOST})
    split_rows = []
    for row in rows:
        if row.info.kind not in _ON_HOST:
            split_rows.append(row)
            continue
        inner_times = times[bisect_right(times, row.start) : bisect_left(times, row.end)]
        for start, end in pairwise([row.start, *inner_times, row.end]):
            split_rows.append(row._replace(issue=start, start=start, end=end, seconds=end - start))
    return split_rows


class _Reader:
    """One rank's spans of a step, in the order in which its host issued them."""

    def __init__(self, step: Trace, rank: int, is_host_in_time: bool) -> None:
        self.step, self.rank = step, rank
        self.is_cpu = step.metadata.get("computes_on") == "cpu"
        rows = _rows(step, rank)
        if self.is_cpu:
            rows = _split_at_issues(rows)
        rows.sort(key=lambda row: (row.issue, row.start, self.is_cpu and row.info.kind in _ON_HOST))
        self.infos = [row.info for row in rows]
        self.is_on_host = [self.is_cpu and info.kind in _ON_HOST for info in self.infos]
        self.issue = [row.issue for row in rows]
        self.start = [row.start for row in rows]
        self.end = [row.end for row in rows]
        self.seconds = [row.seconds for row in rows]
        self.follows_wait = [row.follows_wait for row in rows]
        self.is_issue_known = [row.is_issue_known for row in rows]
        self.reads_host = shows_host(step, rank) or not is_host_in_time
        self.streams = self._streams()
        self.previous_op = self._previous_on_stream()
        self.compute = self._compute_stream()

    def recorded_rank(self) -> RecordedRank:
        begin, host_begin, end, host_end = self._bounds()
        if not self.reads_host:  # in time, unless the op says otherwise
            self.issue = [min(begin, start) for start in self.start]
        allocator = self._allocator_spans(host_begin)
        after = [self._latest_per_stream(predecessors) for predecessors in self._infer_waits()]
        stream_begins = self._stream_begins(begin)
        lag_seconds = self._lags(after, stream_begins)
        if self.reads_host:
            host = HostReader(self.issue, self.end, self._blocks())
            *host_parts_per_op, tail = host.read_parts(self.infos, self.is_on_host, host_begin, host_end)
        else:
            *host_parts_per_op, tail = host_parts(lag_seconds, self.start, self.end, begin, end)
            lag_seconds = [0.0 if lag > MAX_QUEUED_GAP_SECONDS else lag for lag in lag_seconds]
        ops = [
            self._op(number, part, after[number], lag_seconds[number], tuple(allocator.get(number, ())))
            for number, part in enumerate(host_parts_per_op)
        ]
        last = RecordedWork(None, 0.0, host_seconds=tail.seconds, calls=tail.calls, is_on_host=True)
        ops.append(Op("end of step", "host", last, (), tail.awaited_ops, phase="optimizer"))
        return RecordedRank(
            rank=self.rank,
            program=Program("", tuple(ops)),
            begin=begin,
            host_begin=host_begin,
            stream_begins=stream_begins,
            recorded_seconds=end - begin,
            host_ahead=self.step.metadata.get("host_ahead_seconds", {}).get(self.rank, 0.0),
            unexplained_seconds=sum(lag for lag in lag_seconds if lag > MAX_LAG_SECONDS),
        )

    def _op(
        self,
        number: int,
        host: HostPart,
        after: tuple[int, ...],
        lag: float,
        in_allocator: tuple[tuple[float, float], ...],
    ) -> Op:
        info = self.infos[number]
        work = RecordedWork(
            info,
            self.seconds[number],
            (self.start[number], self.end[number]),
            bool(info.messages) if info.kind in POINT_TO_POINT else info.kind in COLLECTIVES,
            lag,
            host.seconds,
            host.calls,
            in_allocator,
            self.is_on_host[number],
            self.is_issue_known[number],
        )
        phase: Phase = "optimizer" if info.phase == "optimizer" else "forward"
        return Op(
            info.name, self.streams[number], work, after, host.awaited_ops, phase=phase, module=info.module
        )

    # -- streams, bounds and blocks -----------------------------------------------------------------

    def _streams(self) -> list[str]:
        """The in-order stream of each op. A recorded stream whose ops overlap (files, gloo's threads) is
        split into several."""
        ends_of_stream: dict[str, list[float]] = {}
        streams = []
        for info, start, end in zip(self.infos, self.start, self.end, strict=True):
            name = info.stream or info.group
            substream_ends = ends_of_stream.setdefault(name, [])
            substream = next(
                (index for index, end_time in enumerate(substream_ends) if end_time <= start + _TOLERANCE),
                len(substream_ends),
            )
            substream_ends[substream : substream + 1] = [end]
            streams.append(f"{name} ({substream + 1})" if substream else name)
        return streams

    def _previous_on_stream(self) -> list[int]:
        """Per op, the previous op on its stream, -1 for the first."""
        last: dict[str, int] = {}
        previous = []
        for number, stream in enumerate(self.streams):
            previous.append(last.get(stream, -1))
            last[stream] = number
        return previous

    def _compute_stream(self) -> str:
        """The stream with the most kernel time."""
        busy_seconds: dict[str, float] = {}
        for info, stream, seconds in zip(self.infos, self.streams, self.seconds, strict=True):
            if info.kind in _ON_HOST:
                busy_seconds[stream] = busy_seconds.get(stream, 0.0) + seconds
        return max(busy_seconds, key=lambda stream: busy_seconds[stream], default="compute")

    def _bounds(self) -> tuple[float, float, float, float]:
        """(start, host's start, end, host's end) of the step on this rank."""
        if self.step.steps and self.rank in self.step.steps[0].bounds:
            start, end, host_start, host_end = self.step.steps[0].bounds[self.rank]
            return start, host_start, end, host_end
        begin = self.step.begins.get(self.rank, 0.0)
        end = begin + self.step.step_seconds
        block_ends = (block[2] for block in self.step.host_blocks if block[0] == self.rank)
        return begin, begin, end, min(end, max([begin, *self.issue, *block_ends]))

    def _blocks(self) -> deque[tuple[float, float, SpanInfo]]:
        """The host's waits in order, each with the info of the op that it waited for."""
        rows = sorted(block[1:] for block in self.step.host_blocks if block[0] == self.rank)
        return deque((start, end, self.step.infos[info]) for start, end, info in rows)

    def _allocator_spans(self, begin: float) -> dict[int, list[tuple[float, float]]]:
        """The host's spans in torch's allocator before each op: (seconds from the previous issue to the
        span's start, seconds from the span's end to the op's issue).
        """
        spans: dict[int, list[tuple[float, float]]] = {}
        for rank, start, end in self.step.allocator_blocks:
            number = bisect_right(self.issue, start)
            if rank == self.rank and number < len(self.issue):
                start_offset = start - (self.issue[number - 1] if number else begin)
                spans.setdefault(number, []).append((start_offset, self.issue[number] - end))
        return spans

    def _stream_begins(self, begin: float) -> dict[str, float]:
        """The time at which each stream is free: the step's start, or the start of its first op if
        earlier."""
        begins: dict[str, float] = {}
        for stream, start in zip(self.streams, self.start, strict=True):
            begins.setdefault(stream, min(start, begin))
        return begins

    # -- the streams --------------------------------------------------------------------------------

    def _infer_waits(self) -> list[set[int]]:
        """Per op, the earlier ops on other streams that it waits for. See [Note: what an op waited for]."""
        waits: list[set[int]] = [set() for _ in self.infos]
        ops_by_end = sorted(range(len(self.infos)), key=lambda number: self.end[number])
        ends = [self.end[number] for number in ops_by_end]
        for number in range(len(self.infos)):
            if self.is_on_host[number]:
                continue
            releasing_op = self._op_that_released(number, ops_by_end, ends)
            if releasing_op is not None:
                waits[number].add(releasing_op)
            if self.infos[number].kind not in COLLECTIVES:
                continue
            waits[number] |= self._sources(number)
            consumer = self._consumer(number)
            if consumer is not None:
                waits[consumer].add(number)
        return waits

    def _ready_time(self, number: int) -> float:
        """The time at which the host had issued an op and its stream was free."""
        previous = self.previous_op[number]
        return max(self.issue[number], self.end[previous]) if previous >= 0 else self.issue[number]

    def _op_that_released(self, number: int, ops_by_end: list[int], ends: list[float]) -> int | None:
        """The op on another stream at whose end op `number` started, later than its issue and stream
        explain."""
        start, ready_time = self.start[number], self._ready_time(number)
        if start <= ready_time + _TOLERANCE:
            return None
        index = bisect_right(ends, start + _TOLERANCE) - 1
        while index >= 0 and ends[index] > ready_time and start - ends[index] <= MAX_LAG_SECONDS:
            candidate = ops_by_end[index]
            is_on_other_stream = (
                self.streams[candidate] != self.streams[number] and not self.is_on_host[candidate]
            )
            if candidate < number and is_on_other_stream:
                return candidate
            index -= 1
        return None

    def _sources(self, number: int) -> set[int]:
        """The ops that produce a collective's input."""
        info, start = self.infos[number], self.start[number] + _TOLERANCE
        is_reduction = info.kind in _REDUCTIONS or info.phase == "optimizer"
        producers: set[int] = set()
        has_unit = not info.module
        for candidate in range(number - 1, -1, -1):
            if self.streams[candidate] == self.streams[number] or self.is_on_host[candidate]:
                continue
            candidate_info = self.infos[candidate]
            has_ended = self.end[candidate] <= start
            if (
                not has_unit
                and candidate >= number - _MAX_ISSUE_DISTANCE
                and candidate_info.module == info.module
            ):
                if candidate_info.kind not in COLLECTIVES or (
                    is_reduction and candidate_info.kind in _REDUCTIONS
                ):
                    producers |= {candidate} if has_ended else set()
                    has_unit = True
            elif is_reduction and has_ended and self.streams[candidate] == self.compute:
                if candidate_info.kind not in COLLECTIVES:
                    return producers | {candidate}
            elif not is_reduction and candidate < number - _MAX_ISSUE_DISTANCE:
                break
        return producers

    def _consumer(self, number: int) -> int | None:
        """The first op that needs a collective's result."""
        info, end, stream = self.infos[number], self.end[number] - _TOLERANCE, self.streams[number]
        first, first_waiting = None, None
        for candidate in range(number + 1, len(self.infos)):
            candidate_info = self.infos[candidate]
            if (
                self.streams[candidate] == stream
                or candidate_info.kind in COLLECTIVES
                or self.is_on_host[candidate]
            ):
                continue
            is_after = self.start[candidate] >= end
            if info.kind in _REDUCTIONS:
                is_consumer = candidate_info.phase == "optimizer" != info.phase
            else:
                is_consumer = _is_same_unit(info, candidate_info)
            if is_consumer:
                return candidate if is_after else None
            if is_after and first is None:
                first = candidate
            if is_after and first_waiting is None and self.follows_wait[candidate]:
                first_waiting = candidate
        return first_waiting if first_waiting is not None or info.kind in _REDUCTIONS else first

    def _latest_per_stream(self, ops: set[int]) -> tuple[int, ...]:
        latest: dict[str, int] = {}
        for op in ops:
            stream = self.streams[op]
            latest[stream] = max(op, latest.get(stream, op))
        return tuple(sorted(latest.values()))

    def _lags(self, after: list[tuple[int, ...]], stream_begins: dict[str, float]) -> list[float]:
        """Seconds from the end of everything that each op waited for to its start, at least -`_TOLERANCE`."""
        free_times, lags = dict(stream_begins), [0.0] * len(self.infos)
        for number, stream in enumerate(self.streams):
            if self.is_on_host[number]:
                continue
            ready_time = max(
                self.issue[number],
                free_times[stream],
                *(self.end[predecessor] for predecessor in after[number]),
            )
            lags[number] = max(self.start[number] - ready_time, -_TOLERANCE)
            free_times[stream] = self.end[number]
        return lags


def _is_same_unit(gather: SpanInfo, info: SpanInfo) -> bool:
    """Whether an op belongs to the module whose parameters were gathered, to a part of it, or to its
    parent."""
    gathered_module, module = gather.module, info.module
    return bool(gathered_module and module) and (
        gathered_module == module
        or gathered_module.startswith(f"{module}.")
        or module.startswith(f"{gathered_module}.")
    )


MAX_QUEUED_GAP_SECONDS = 10e-6
"""Seconds between two kernels of which the second was queued when the first ended. On one H100 they are 1 to
2 us apart, up to 6 us behind a memset or a small copy (traces/h100-80gb-hbm3/llama_llama-3-8b@8_*: three
steps without a longer pause).
"""

MAX_LAG_SECONDS = 50e-6  # seconds: an op that ended longer ago is not the one that was awaited
_TIME_RESOLUTION_SECONDS = 1e-9  # times are whole nanoseconds
Block = tuple[float, float, SpanInfo]  # start, end, info of the op that the host waited for


class HostPart(NamedTuple):
    """The host's time before it issued an op: blocking calls, the ops they waited for, and work after
    them."""

    calls: tuple[HostCall, ...]
    awaited_ops: tuple[int, ...]
    seconds: float


@dataclass
class HostReader:
    """The recorded host of one rank. All times are in seconds."""

    issue: Sequence[float]
    """The time at which each op was issued."""
    end: Sequence[float]
    """The time at which each op ended."""
    blocks: deque[Block]
    """The host's blocked intervals, in order."""
    _ops_of_info: dict[SpanInfo, list[int]] = field(default_factory=dict)

    def read_parts(
        self, infos: Sequence[SpanInfo], is_on_host: Sequence[bool], begin: float, end: float
    ) -> list[HostPart]:
        """The host's time from `begin` to `end`: one part before each op, and one after the last."""
        host_parts, time = [], begin
        for number, (info, is_host_op) in enumerate(zip(infos, is_on_host, strict=True)):
            calls, waits, time = self._consume_blocks(self.issue[number], time)
            host_parts.append(HostPart(calls, waits, max(self.issue[number] - time, 0.0)))
            time = max(time, self.end[number] if is_host_op else self.issue[number])
            self._ops_of_info.setdefault(info, []).append(number)
        calls, waits, time = self._consume_blocks(end, time)
        return [*host_parts, HostPart(calls, waits, max(end - time, 0.0))]

    def _consume_blocks(
        self, until: float, time: float
    ) -> tuple[tuple[HostCall, ...], tuple[int, ...], float]:
        """The host's blocking calls from `time` to `until`, the ops they waited for, and the time when the
        host was free again."""
        calls: list[HostCall] = []
        awaited_ops: list[int] = []
        while self.blocks and self.blocks[0][0] < until - _TIME_RESOLUTION_SECONDS:
            start, end, info = self.blocks.popleft()
            if end <= time:
                continue
            start, free_time = max(start, time), min(end, until)
            if end > until + _TIME_RESOLUTION_SECONDS:
                self.blocks.appendleft((until, end, info))
            awaited_op = self._find_awaited_op(info, free_time)
            blocked_until = start if awaited_op is None else max(start, self.end[awaited_op])
            calls.append(HostCall(start - time, awaited_op is not None, free_time - blocked_until, info))
            awaited_ops += [] if awaited_op is None else [awaited_op]
            time = free_time
        return tuple(calls), tuple(awaited_ops), time

    def _find_awaited_op(self, info: SpanInfo, end: float) -> int | None:
        """The op that a block waited for: the last issued op with the same info that had ended by `end`."""
        numbers = reversed(self._ops_of_info.get(info, ()))
        return next((number for number in numbers if self.end[number] <= end + MAX_LAG_SECONDS), None)


def host_parts(
    lags: Sequence[float], start: Sequence[float], end: Sequence[float], begin: float, step_end: float
) -> list[HostPart]:
    """The host's part before each op in the order of their starts, and one after the last op until
    `step_end`. `lags` are the seconds that each op started later than its stream and other ops explain.
    """
    host_parts_per_op: list[HostPart] = []
    last = -1  # of the ops so far, the one that ends last
    was_late = False
    for number, lag in enumerate(lags):
        is_late = lag > MAX_QUEUED_GAP_SECONDS
        if not is_late:
            host_parts_per_op.append(HostPart((), (), 0.0))
        elif was_late or number == 0:
            host_parts_per_op.append(
                HostPart((), (), start[number] - (start[number - 1] if number else begin))
            )
        else:
            host_parts_per_op.append(_waiting_part(last, start[number] - end[last]))
        was_late = is_late
        if last < 0 or end[number] >= end[last]:
            last = number
    return [
        *host_parts_per_op,
        HostPart((), (), 0.0) if last < 0 else _waiting_part(last, max(step_end - end[last], 0.0)),
    ]


def _waiting_part(op: int, seconds: float) -> HostPart:
    """The host's part that waits for `op` and then works for `seconds`."""
    return HostPart((HostCall(0.0, True),), (op,), seconds)
