"""How far `zsim tune` is, on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_EVERY_SECONDS = 0.2


class TuneProgress:
    """One line on stderr that is written over: configurations checked, steps simulated, seconds."""

    def __init__(self) -> None:
        self._counts = {"checked": 0, "simulated": 0}
        self._began = self._last = time.monotonic()
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)

    def update(self, what: str, count: int) -> None:
        """`count` pieces of work of this kind are done."""
        self._counts[what] = count
        now = time.monotonic()
        if self._is_shown and now - self._last >= _EVERY_SECONDS:
            self._last = now
            seconds = now - self._began
            said = (
                f"{self._counts['checked']} checked, {self._counts['simulated']} simulated, {seconds:.0f} s"
            )
            print(f"\r{said:<79}", end="", file=sys.stderr, flush=True)
