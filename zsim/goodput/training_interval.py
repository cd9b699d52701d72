"""Training between two events: steps and saves in a fixed order, so that any moment is known at once.

# [Note: the cycle of saves]
Let k steps of s seconds lie between two saves. A local save blocks for c, and is durable P after it began. A
remote one, at every m-th, blocks for C and is durable after Q. What runs in the background makes the steps
after a save longer by o and O. The next save waits for the last one, so the overhead of an interval and of a
cycle of m intervals are

    o' = max(o, P - c - k s)        B = o' + k s + c
    O' = max(O, Q - C - m B)        T = O' + m B + C

The overhead is counted at the beginning of its interval, which leaves every save where it is. At time x the
number of finished cycles is x // T, and the other numbers follow by division. So a training interval of
months costs what one of minutes does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zsim.goodput.checkpoint import Checkpoint
from zsim.goodput.scenario import Saves

_NEVER_INTERVALS = 10**12  # intervals between remote saves where there are none
_ROUNDING = 1e-9
_FREE_CHECKPOINT = Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)


class TrainingMoment(NamedTuple):
    """A time in a training interval."""

    steps: float
    """Steps done since its start, with the part of the step under way."""
    local: int | None
    """Steps, counted likewise, in the last local save that is durable. None if none of this interval is."""
    remote: int | None
    """The same of the last remote save."""
    intervals: int
    """Save intervals since the last remote save."""
    since: float
    """Steps since the last save."""


class SaveCycle:
    """Seconds of the cycle of saves with steps of `seconds` each."""

    def __init__(self, saves: Saves, seconds: float) -> None:
        self.saves, self.seconds, self.every = saves, seconds, saves.every
        every = saves.every
        local, remote = saves.local or _FREE_CHECKPOINT, saves.remote or _FREE_CHECKPOINT
        self.local, self.remote = local, remote
        self.per_cycle = saves.remote_every if saves.remote is not None else _NEVER_INTERVALS
        work = every * seconds
        self.overhead = max(
            local.slowdown_seconds, local.durable_seconds - local.blocking_seconds - work, 0.0
        )
        self.interval = self.overhead + work + local.blocking_seconds
        intervals_seconds = self.per_cycle * self.interval
        self.cycle_overhead = max(
            remote.slowdown_seconds, remote.durable_seconds - remote.blocking_seconds - intervals_seconds, 0.0
        )
        self.cycle_seconds = self.cycle_overhead + intervals_seconds + remote.blocking_seconds
        self.last_save = remote if saves.remote is not None else local

    def interval_start(self, cycles: int, intervals: int) -> float:
        """The time at which an interval's steps begin."""
        cycle_start = cycles * self.cycle_seconds + self.cycle_overhead
        return cycle_start + intervals * self.interval + self.overhead

    def time_of_steps(self, steps: float) -> float:
        """The time at which so many steps are done."""
        num_intervals = max(math.ceil(steps / self.every - _ROUNDING) - 1, 0)
        cycles, interval = divmod(num_intervals, self.per_cycle)
        return self.interval_start(cycles, interval) + (steps - num_intervals * self.every) * self.seconds

    def saves_at(self, time: float) -> tuple[int, int]:
        """Intervals whose local, and whose remote save has begun by `time`."""
        cycles, cycle_time = divmod(time + _ROUNDING * max(time, 1.0), self.cycle_seconds)
        cycle_time -= self.cycle_overhead
        remote = int(cycles) * self.per_cycle
        work = self.overhead + self.every * self.seconds
        num_local = min(max(int((cycle_time - work) // self.interval) + 1, 0), self.per_cycle)
        return remote + num_local, remote + (
            self.per_cycle if cycle_time >= self.per_cycle * self.interval else 0
        )


class TrainingInterval:
    """Steps up to `goal` steps, begun `intervals` saves after a remote one and `since` steps after a save.

    A save that training waits for ends it. Times are those of the cycle's clock.
    """

    def __init__(self, cycle: SaveCycle, goal: float, intervals: int = 0, since: float = 0.0) -> None:
        self.cycle, self.goal = cycle, goal
        self.start_time = cycle.interval_start(0, intervals) + since * cycle.seconds
        self.start_steps = intervals * cycle.every + since
        self.work_seconds = cycle.time_of_steps(self.start_steps + goal) - self.start_time

    @property
    def total_seconds(self) -> float:
        """Until the goal is reached and saved."""
        return self.work_seconds + self.cycle.last_save.durable_seconds

    def moment_at(self, elapsed: float) -> TrainingMoment:
        """The moment `elapsed` seconds after the start."""
        cycle, time = self.cycle, self.start_time + min(elapsed, self.work_seconds)
        save_interval = cycle.every
        cycles, cycle_time = divmod(time, cycle.cycle_seconds)
        cycle_time -= cycle.cycle_overhead
        interval = min(max(int(cycle_time // cycle.interval), 0), cycle.per_cycle - 1)
        interval_time = cycle_time - interval * cycle.interval - cycle.overhead
        since = min(max(interval_time / cycle.seconds, 0.0), float(save_interval))
        steps = (cycles * cycle.per_cycle + interval) * save_interval + since
        local = remote = None
        if cycle.saves.local is not None:
            local = self._saved_steps(elapsed - cycle.local.durable_seconds, is_local=True)
        if cycle.saves.remote is not None:
            remote = self._saved_steps(elapsed - cycle.remote.durable_seconds, is_local=False)
        if elapsed >= self.work_seconds:
            steps = self.start_steps + self.goal
        return TrainingMoment(steps - self.start_steps, local, remote, interval, since)

    def begun_saves(self, elapsed: float) -> tuple[int | None, int | None]:
        """Steps since the start in the last local and in the last remote save that have begun."""
        saves = self.cycle.saves
        local = None if saves.local is None else self._saved_steps(elapsed, is_local=True)
        return local, None if saves.remote is None else self._saved_steps(elapsed, is_local=False)

    def _saved_steps(self, elapsed: float, *, is_local: bool) -> int | None:
        """Steps since the start in the last save that began in this interval, until `elapsed`."""
        if elapsed < 0.0:
            return None
        cycle = self.cycle
        local, remote = cycle.saves_at(self.start_time + elapsed)
        before_goal = math.ceil((self.start_steps + self.goal) / cycle.every - _ROUNDING) - 1
        intervals = min(local if is_local else remote, before_goal)
        if not is_local:
            intervals -= intervals % cycle.per_cycle
        steps = intervals * cycle.every - self.start_steps
        return int(steps) if steps > 0 else None
