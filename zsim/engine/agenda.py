"""Agenda of a clock: one event of simpy for all that happens at one instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any, Generic, TypeVar
from weakref import ref

import simpy
from simpy.events import NORMAL, EventPriority

Owner = TypeVar("Owner")
Entry = TypeVar("Entry")


class Agenda(simpy.Event, Generic[Owner, Entry]):
    """Entries by the time for which they were put down; `happen(owner, entries, now)` is called with those of
    one instant, in the order of `put`. Like an `Alarm` it does not keep its owner alive.

    # [Note: what comes next]
    Most often what an instant puts down, the end of the kernel that it started, is also what happens next on
    the whole clock. So it is held back from simpy's queue until the instant is over (`_next`), with the place
    in the order of events that it would have there. If nothing in the queue comes before it, the clock goes
    on to it at once, as simpy would after putting it into the queue and taking it out again.
    """

    def __init__(
        self, env: simpy.Environment, owner: Owner, happen: Callable[[Owner, list[Entry], float], None]
    ) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._owner, self._happen = ref(owner), happen
        self.callbacks = _CALLS
        self._due: dict[float, list[Entry]] = {}
        self._is_happening = False
        self._next: tuple[float, EventPriority, int, simpy.Event] | None = None

    def put(self, time: float, entry: Entry) -> None:
        """Put `entry` down for `time`."""
        entries = self._due.get(time)
        if entries is not None:
            entries.append(entry)
            return
        self._due[time] = [entry]
        event: tuple[float, EventPriority, int, simpy.Event] = (time, NORMAL, next(self.env._eid), self)
        if self._is_happening:
            first = self._next
            if first is None:
                self._next = event
                return
            if event < first:
                event, self._next = first, event
        heappush(self.env._queue, event)

    def go_on(self) -> None:
        """Let what is due happen, and what follows it before anything in simpy's queue."""
        self.callbacks = _CALLS  # simpy takes those of an event that it processes
        env, owner, happen, due = self.env, self._owner(), self._happen, self._due
        assert owner is not None
        queue, now = env._queue, env._now
        self._is_happening = True
        while True:
            happen(owner, due.pop(now), now)
            event = self._next
            if event is None:
                break
            self._next = None
            if queue and queue[0] < event:
                heappush(queue, event)
                break
            env._now = now = event[0]
        self._is_happening = False


_CALLS: list[Callable[[Agenda[Any, Any]], None]] = [Agenda.go_on]
