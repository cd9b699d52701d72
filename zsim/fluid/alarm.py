"""An event of simpy that happens again and again."""

from __future__ import annotations

from collections.abc import Callable

import simpy


class Alarm(simpy.Event):
    """An event that calls back at every time for which it is scheduled, as long as each call sets it again:
    simpy empties the `callbacks` of an event that it has processed."""

    def __init__(self, env: simpy.Environment, call: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        self._calls: list[Callable[[simpy.Event], None]] = [call]
        self.set_again()

    def set_again(self) -> None:
        self.callbacks = self._calls
