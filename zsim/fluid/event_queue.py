"""Event queue of a clock: one event of SimPy for everything that happens at one instant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

import simpy

Owner = TypeVar("Owner")
Entry = TypeVar("Entry")
_MAX_TRIES = 4


def exact_delay(now: float, time: float) -> float | None:
    """The delay that added to `now` is `time` without a rounding. None where there is none. See [Note:
    delays, not times].
    """
    delay = time - now
    for _ in range(_MAX_TRIES):
        if now + delay == time:
            return delay
        delay = math.nextafter(delay, math.inf if now + delay < time else 0.0)
    return None


class EventQueue(Generic[Owner, Entry]):
    """Entries by the time for which they are scheduled.

    `dispatch(owner, entries, now)` is called with the entries of one instant, in the order in which they were
    scheduled. It happens in the place that the first of them has among SimPy's events of that instant. Like a
    `Timer`, the queue does not keep its owner alive.

    # [Note: delays, not times]
    Entries are scheduled by the delay from now, as SimPy does it, and both add the delay to the same present
    time. A time minus the present would be rounded, and the sum of both would then miss the time.
    """

    def __init__(
        self, env: simpy.Environment, owner: Owner, dispatch: Callable[[Owner, list[Entry], float], None]
    ) -> None:
        self._env = env
        self._owner, self._dispatch = ref(owner), dispatch
        self._due: dict[float, list[Entry]] = {}

    def schedule(self, delay: float, entry: Entry) -> None:
        """Schedule `entry` for `delay` seconds from now."""
        env = self._env
        time = env.now + delay
        entries = self._due.get(time)
        if entries is not None:
            entries.append(entry)
            return
        self._due[time] = [entry]
        timeout = simpy.Timeout(env, delay)
        timeout.callbacks = [self._dispatch_due]

    def _dispatch_due(self, _event: simpy.Event) -> None:
        """Dispatch the entries of this instant."""
        owner, now = self._owner(), self._env.now
        assert owner is not None
        self._dispatch(owner, self._due.pop(now), now)
