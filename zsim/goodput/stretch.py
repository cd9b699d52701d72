"""Training between two events: steps and saves in a fixed order, so that any moment is known at once.

# [Note: the cycle of saves]
Let k steps of s seconds lie between two saves. A local save blocks for c, and is durable P after it began;
a remote one, at every m-th, blocks for C and is durable after Q. What runs in the background makes the steps
after a save longer by o and O. The next save waits for the last one, so the overhead of an interval and of a
cycle of m intervals are

    o' = max(o, P - c - k s)        B = o' + k s + c
    O' = max(O, Q - C - m B)        T = O' + m B + C

The overhead is counted at the beginning of its interval, which leaves every save where it is. At time x the
number of finished cycles is x // T, and the rest follows by division: a stretch of months costs what one of
minutes does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zsim.goodput.checkpoint import Checkpoint
from zsim.goodput.scenario import Saves

_NEVER = 10**12  # intervals between remote saves where there are none
_ROUNDING = 1e-9
_FREE = Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)


class StretchMoment(NamedTuple):
    """A time in a stretch. `steps`: done since its start, with the part of the step under way. `local` and
    `remote`: steps, counted likewise, in the last save that is durable; None if none of this stretch is.
    `intervals`, `since`: since the last remote save, and steps since the last save."""

    steps: float
    local: int | None
    remote: int | None
    intervals: int
    since: float


class TrainingStretch:
    """Steps of `seconds` each up to `goal` steps, begun `intervals` saves after a remote one and `since`
    steps after a save. A save that training waits for ends it."""

    def __init__(
        self, saves: Saves, seconds: float, goal: float, intervals: int = 0, since: float = 0.0
    ) -> None:
        self.saves, self.seconds, self.goal = saves, seconds, goal
        every = saves.every
        local, remote = saves.local or _FREE, saves.remote or _FREE
        self.local, self.remote = local, remote
        self.per_cycle = saves.remote_every if saves.remote is not None else _NEVER
        work = every * seconds
        self.overhead = max(
            local.slowdown_seconds, local.durable_seconds - local.blocking_seconds - work, 0.0
        )
        self.interval = self.overhead + work + local.blocking_seconds
        inner = self.per_cycle * self.interval
        self.cycle_overhead = max(
            remote.slowdown_seconds, remote.durable_seconds - remote.blocking_seconds - inner, 0.0
        )
        self.cycle = self.cycle_overhead + inner + remote.blocking_seconds
        self.begun_at = self.cycle_overhead + intervals * self.interval + self.overhead + since * seconds
        self.begun_steps = intervals * every + since
        self.works = self._when(self.begun_steps + goal) - self.begun_at

    @property
    def last_save(self) -> Checkpoint:
        return self.remote if self.saves.remote is not None else self.local

    @property
    def total_seconds(self) -> float:
        """Until the goal is reached and saved."""
        return self.works + self.last_save.durable_seconds

    def _when(self, steps: float) -> float:
        """The time, in the cycle's count, at which so many steps are done."""
        every = self.saves.every
        whole = max(math.ceil(steps / every - _ROUNDING) - 1, 0)
        cycles, interval = divmod(whole, self.per_cycle)
        begin = cycles * self.cycle + self.cycle_overhead + interval * self.interval + self.overhead
        return begin + (steps - whole * every) * self.seconds

    def at(self, elapsed: float) -> StretchMoment:
        """The moment `elapsed` seconds after the start."""
        every, time = self.saves.every, self.begun_at + min(elapsed, self.works)
        cycles, rest = divmod(time, self.cycle)
        rest -= self.cycle_overhead
        interval = min(max(int(rest // self.interval), 0), self.per_cycle - 1)
        inside = rest - interval * self.interval - self.overhead
        since = min(max(inside / self.seconds, 0.0), float(every))
        steps = (cycles * self.per_cycle + interval) * every + since
        local = self._saved(self.begun_at + elapsed - self.local.durable_seconds, is_local=True)
        remote = self._saved(self.begun_at + elapsed - self.remote.durable_seconds, is_local=False)
        if elapsed >= self.works:
            steps = self.begun_steps + self.goal
        return StretchMoment(steps - self.begun_steps, local, remote, interval, since)

    def begun(self, elapsed: float) -> tuple[int | None, int | None]:
        """Steps since the start in the last local and in the last remote save that have begun."""
        time = self.begun_at + elapsed
        return self._saved(time, is_local=True), self._saved(time, is_local=False)

    def _saved(self, time: float, *, is_local: bool) -> int | None:
        """Steps since the start in the last save that began in this stretch, until `time`."""
        if (self.saves.local if is_local else self.saves.remote) is None or time < self.begun_at:
            return None
        every = self.saves.every
        cycles, rest = divmod(time + _ROUNDING * max(time, 1.0), self.cycle)
        rest -= self.cycle_overhead
        if is_local:
            work = self.overhead + every * self.seconds
            inside = min(max(int((rest - work) // self.interval) + 1, 0), self.per_cycle)
        else:
            inside = self.per_cycle if rest >= self.per_cycle * self.interval else 0
        before_goal = math.ceil((self.begun_steps + self.goal) / every - _ROUNDING) - 1
        intervals = min(int(cycles) * self.per_cycle + inside, before_goal)
        if not is_local:
            intervals -= intervals % self.per_cycle
        steps = intervals * every - self.begun_steps
        return int(steps) if steps > 0 else None
