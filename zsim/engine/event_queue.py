"""Event queue of a clock: one event of simpy for everything that happens at one instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any, Generic, TypeVar
from weakref import ref

import simpy
from simpy.events import NORMAL, EventPriority

Owner = TypeVar("Owner")
Entry = TypeVar("Entry")


class EventQueue(simpy.Event, Generic[Owner, Entry]):
    """Entries by the time for which they are scheduled.

    `dispatch(owner, entries, now)` is called with the entries of one instant, in the order in which they were
    scheduled. Like a `Timer`, the queue does not keep its owner alive.

    # [Note: what comes next]
    The entry that an instant schedules is the end of the kernel that it started. Most often this is also the
    next thing that happens on the whole clock. So it is kept out of simpy's queue until the instant is over
    (`_next`), with the position in the order of events that it would have there. If nothing in the queue
    comes before it, the clock goes on to it at once. simpy would do the same after it had put the event into
    its queue and taken it out again.
    """

    def __init__(
        self, env: simpy.Environment, owner: Owner, dispatch: Callable[[Owner, list[Entry], float], None]
    ) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._owner, self._dispatch = ref(owner), dispatch
        self.callbacks = _CALLS
        self._due: dict[float, list[Entry]] = {}
        self._is_dispatching = False
        self._next: tuple[float, EventPriority, int, simpy.Event] | None = None

    def schedule(self, time: float, entry: Entry) -> None:
        """Schedule `entry` for `time`."""
        entries = self._due.get(time)
        if entries is not None:
            entries.append(entry)
            return
        self._due[time] = [entry]
        event: tuple[float, EventPriority, int, simpy.Event] = (time, NORMAL, next(self.env._eid), self)
        if self._is_dispatching:
            first = self._next
            if first is None:
                self._next = event
                return
            if event < first:
                event, self._next = first, event
        heappush(self.env._queue, event)

    def dispatch_due(self) -> None:
        """Dispatch what is due, and what follows it before anything in simpy's queue."""
        self.callbacks = _CALLS  # simpy takes those of an event that it processes
        env, owner, dispatch, due = self.env, self._owner(), self._dispatch, self._due
        assert owner is not None
        queue, now = env._queue, env._now
        self._is_dispatching = True
        while True:
            dispatch(owner, due.pop(now), now)
            event = self._next
            if event is None:
                break
            self._next = None
            if queue and queue[0] < event:
                heappush(queue, event)
                break
            env._now = now = event[0]
        self._is_dispatching = False


_CALLS: list[Callable[[EventQueue[Any, Any]], None]] = [EventQueue.dispatch_due]
