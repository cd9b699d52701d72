"""An event of simpy that happens again and again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import simpy


class Alarm(simpy.Event):
    """An event that calls a method at every time for which it is scheduled. It does not keep the method's
    object alive, which may have the alarm."""

    def __init__(self, env: simpy.Environment, method: Callable[[], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._method = WeakMethod(method)
        self.callbacks = _CALLS

    def ring(self) -> None:
        self.callbacks = _CALLS  # simpy takes those of an event that it processes
        method = self._method()
        if method is not None:
            method()


_CALLS: list[Callable[[Alarm], None]] = [Alarm.ring]
