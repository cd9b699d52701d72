"""How far a study is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_LINES = 10  # where there is no terminal


class Progress:
    """Counts points, says their rate and the time left, on stderr. `done` of `total` were there before."""

    def __init__(self, total: int, done: int, *, is_quiet: bool = False) -> None:
        self.total, self.done, self.failed = total, done, 0
        self._before, self._began = done, time.monotonic()
        self._is_quiet, self._said = is_quiet, done * _LINES // max(total, 1)
        self._bar: tuple[Bar, TaskID] | None = None

    def __enter__(self) -> Self:
        if not self._is_quiet and self.done < self.total and sys.stderr.isatty():
            self._bar = self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def advance(self, *, is_ok: bool) -> None:
        """One more point is done."""
        self.done += 1
        self.failed += not is_ok
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.done, said=self._words())
        elif not self._is_quiet and (
            self.done == self.total or self.done * _LINES // self.total > self._said
        ):
            self._said = self.done * _LINES // self.total
            print(f"{self.done}/{self.total} points, {self._words()}", file=sys.stderr, flush=True)

    def _words(self) -> str:
        """E.g. "3.2 points/s, 1 min 40 s left, 2 failed"."""
        seconds = time.monotonic() - self._began
        rate = (self.done - self._before) / seconds if seconds > 0 else 0.0
        words = [f"{rate:.3g} points/s"]
        if self.done < self.total and rate > 0:
            words.append(f"{duration((self.total - self.done) / rate)} left")
        if self.failed:
            words.append(f"{self.failed} failed")
        return ", ".join(words)

    def _start_bar(self) -> tuple[Bar, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[said]}")
        bar = Bar(*columns, console=Console(stderr=True), expand=True)
        bar.start()
        return bar, bar.add_task("", total=self.total, completed=self.done, said="")


def duration(seconds: float) -> str:
    """Seconds for people who wait: 8 s, 1 min 40 s, 3 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
