"""An event of simpy that happens again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

import simpy

Owner = TypeVar("Owner")


class Timer(simpy.Event, Generic[Owner]):
    """An event that calls `call(owner)` at every time for which it is scheduled. It does not keep its owner
    alive: the owner holds the timer.
    """

    def __init__(self, env: simpy.Environment, owner: Owner, call: Callable[[Owner], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._owner, self._call = ref(owner), call
        self.callbacks = _CALLS

    def fire(self) -> None:
        self.callbacks = _CALLS  # simpy takes those of an event that it processes
        owner = self._owner()
        if owner is not None:
            self._call(owner)


_CALLS: list[Callable[[Timer[Any]], None]] = [Timer.fire]
