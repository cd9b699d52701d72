"""The recorded host between the ops it issued: its work, and the calls that blocked it.

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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.plan.recorded_work import HostCall
from zsim.trace.trace import SpanInfo

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
