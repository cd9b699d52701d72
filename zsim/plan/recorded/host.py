"""What a recorded host did between the ops it issued: it worked, and it was blocked.

# [Note: a call that blocks]
A recorded wait of the host (`cudaStreamSynchronize`, a copy from pageable memory, a collective of gloo) is a
call: it lasts until the op that it waits for is over, and some time beyond, which is the call's own. Both are
kept: the op, and the call's own seconds after it, which are all of it where the op was over before or is not
known. A call during which another op is issued (the copy itself, or one by another thread) is cut there; what
is left of it then waits. Of waits of several threads at once the first counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.plan.recorded.work import HostCall
from zsim.trace.trace import SpanInfo

LONGEST_LAG = 50e-6  # seconds: an op that ended longer ago than this did not make the other wait
_INSTANT = 1e-9  # times are whole nanoseconds
Block = tuple[float, float, SpanInfo]  # start, end, and what the host waited for


class HostPart(NamedTuple):
    """What a host did before it issued an op: calls, the ops that these waited for, and work after them."""

    calls: tuple[HostCall, ...]
    waits: tuple[int, ...]
    seconds: float


@dataclass
class HostReader:
    """The host of one rank: when each op was issued and over, and the blocks, in order."""

    issue: Sequence[float]
    end: Sequence[float]
    blocks: deque[Block]
    _numbers: dict[SpanInfo, list[int]] = field(default_factory=dict)

    def parts(
        self, infos: Sequence[SpanInfo], is_on_host: Sequence[bool], begin: float, end: float
    ) -> list[HostPart]:
        """What the host did from `begin` to `end`: before each op, and after the last."""
        found, time = [], begin
        for number, (info, on_host) in enumerate(zip(infos, is_on_host, strict=True)):
            calls, waits, time = self._blocked(self.issue[number], time)
            found.append(HostPart(calls, waits, max(self.issue[number] - time, 0.0)))
            time = max(time, self.end[number] if on_host else self.issue[number])
            self._numbers.setdefault(info, []).append(number)
        calls, waits, time = self._blocked(end, time)
        return [*found, HostPart(calls, waits, max(end - time, 0.0))]

    def _blocked(self, until: float, time: float) -> tuple[tuple[HostCall, ...], tuple[int, ...], float]:
        """What the host was blocked on from `time` to `until`, the ops it waited for, and when it was free
        again."""
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
        """The op that a block of the host was for: the last one issued like it that is over by then."""
        numbers = reversed(self._numbers.get(info, ()))
        return next((number for number in numbers if self.end[number] <= end + LONGEST_LAG), None)
