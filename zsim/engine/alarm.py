"""An event of simpy that happens again and again."""

from __future__ import annotations

from collections.abc import Callable

import simpy


class Alarm(simpy.Event):
    """An event that calls back at every time for which it is scheduled: simpy empties the `callbacks` of an
    event that it has processed, but not of this one."""

    def __init__(self, env: simpy.Environment, call: Callable[[simpy.Event], None]) -> None:
        self._calls = [call]
        super().__init__(env)
        self._ok, self._value = True, None

    @property
    def callbacks(self) -> list[Callable[[simpy.Event], None]]:
        return self._calls

    @callbacks.setter
    def callbacks(self, _emptied: object) -> None:
        pass
