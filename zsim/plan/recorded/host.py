"""The recorded host between the ops it issued: its work, and the calls that blocked it.

# [Note: a call that blocks]
A recorded wait of the host (`cudaStreamSynchronize`, a copy from pageable memory, a collective of gloo) is a
call: it lasts until the op that it waits for has ended, plus the call's own overhead. Both are kept: the op,
and the seconds of overhead after it, which are the whole call if the op had ended before or is not known. A
call during which another op is issued (the copy itself, or an op of another thread) is cut there. The rest of
the call waits before the next op. If several threads wait at once, the first wait counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

from zsim.dataclass import dataclass
from zsim.plan.recorded.work import HostCall
from zsim.trace.trace import SpanInfo

LONGEST_LAG = 50e-6  # seconds: an op that ended longer ago is not the one that was awaited
_INSTANT = 1e-9  # times are whole nanoseconds
Block = tuple[float, float, SpanInfo]  # start, end, info of the op that the host waited for


class HostPart(NamedTuple):
    """The host's time before it issued an op: blocking calls, the ops they waited for, and work after
    them."""

    calls: tuple[HostCall, ...]
    waits: tuple[int, ...]
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
    _numbers: dict[SpanInfo, list[int]] = field(default_factory=dict)

    def parts(
        self, infos: Sequence[SpanInfo], is_on_host: Sequence[bool], begin: float, end: float
    ) -> list[HostPart]:
        """The host's time from `begin` to `end`: one part before each op, and one after the last."""
        found, time = [], begin
        for number, (info, on_host) in enumerate(zip(infos, is_on_host, strict=True)):
            calls, waits, time = self._blocked(self.issue[number], time)
            found.append(HostPart(calls, waits, max(self.issue[number] - time, 0.0)))
            time = max(time, self.end[number] if on_host else self.issue[number])
            self._numbers.setdefault(info, []).append(number)
        calls, waits, time = self._blocked(end, time)
        return [*found, HostPart(calls, waits, max(end - time, 0.0))]

    def _blocked(self, until: float, time: float) -> tuple[tuple[HostCall, ...], tuple[int, ...], float]:
        """The host's blocking calls from `time` to `until`, the ops they waited for, and the time when the
        host was free again."""
        calls: list[HostCall] = []
        waits: list[int] = []
        while self.blocks and self.blocks[0][0] < until - _INSTANT:
            start, end, info = self.blocks.popleft()
            if end <= time:
                continue
            start, free = max(start, time), min(end, until)
            if end > until + _INSTANT:
                self.blocks.appendleft((until, end, info))
            awaited = self._awaited(info, free)
            over = start if awaited is None else max(start, self.end[awaited])
            calls.append(HostCall(start - time, awaited is not None, free - over, info))
            waits += [] if awaited is None else [awaited]
            time = free
        return tuple(calls), tuple(waits), time

    def _awaited(self, info: SpanInfo, end: float) -> int | None:
        """The op that a block waited for: the last issued op with the same info that had ended by `end`."""
        numbers = reversed(self._numbers.get(info, ()))
        return next((number for number in numbers if self.end[number] <= end + LONGEST_LAG), None)
