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

from zsim.plan.recorded.replay_ops import HostWait, ReplayPlan
from zsim.trace.trace import SpanInfo

LONGEST_LAG = 50e-6  # seconds: an op that ended longer ago than this did not make the other wait
_INSTANT = 1e-9  # times are whole nanoseconds
Block = tuple[float, float, SpanInfo]  # start, end, and what the host waited for


@dataclass
class HostReader:
    """The host of one rank: when each op was issued and over, and the blocks, in order."""

    issue: Sequence[float]
    end: Sequence[float]
    blocks: deque[Block]
    _numbers: dict[SpanInfo, list[int]] = field(default_factory=dict)

    def add_to(self, plan: ReplayPlan, begin: float, end: float) -> None:
        """The host's work and waits from `begin` to `end`, in the plan."""
        time = begin
        for number, op in enumerate(plan.ops):
            op.host_waits, time = self._blocked(self.issue[number], time)
            op.host_seconds = max(self.issue[number] - time, 0.0)
            time = max(time, self.end[number] if op.is_on_host else self.issue[number])
            self._numbers.setdefault(op.info, []).append(number)
        plan.tail_waits, time = self._blocked(end, time)
        plan.tail_seconds = max(end - time, 0.0)

    def _blocked(self, until: float, time: float) -> tuple[tuple[HostWait, ...], float]:
        """What the host was blocked on from `time` to `until`, and when it was free again."""
        waits: list[HostWait] = []
        while self.blocks and self.blocks[0][0] < until - _INSTANT:
            start, end, info = self.blocks.popleft()
            if end <= time:
                continue
            start, free = max(start, time), min(end, until)
            if end > until + _INSTANT:
                self.blocks.appendleft((until, end, info))
            awaited = self._awaited(info, free)
            over = start if awaited is None else max(start, self.end[awaited])
            waits.append(HostWait(start - time, awaited, free - over, info))
            time = free
        return tuple(waits), time

    def _awaited(self, info: SpanInfo, end: float) -> int | None:
        """The op that a block of the host was for: the last one issued like it that is over by then."""
        numbers = reversed(self._numbers.get(info, ()))
        return next((number for number in numbers if self.end[number] <= end + LONGEST_LAG), None)
