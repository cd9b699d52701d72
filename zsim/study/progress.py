"""Progress of long work.

On a terminal (stderr) and in a notebook it is a bar or a line. A notebook that cannot draw prints an
occasional line, and a pipe gets nothing.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

_MAX_LINES = 10  # at most, in a notebook that cannot draw


def is_watched() -> bool:
    """Whether a bar can be drawn: on a terminal, or in a notebook with ipywidgets, by which rich draws."""
    return sys.stderr.isatty() or (_is_notebook() and find_spec("ipywidgets") is not None)


def _is_notebook() -> bool:
    """Whether this is a kernel of Jupyter. IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class _TaskDisplay:
    """The progress of one task on rich's bar, with a text next to it. It is visible from `_start` until the
    context ends.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start(self, *columns: ProgressColumn, total: int | None = None, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import TextColumn

        text_column = TextColumn("{task.fields[said]}")
        self._bar = Bar(
            *columns,
            text_column,
            console=Console(stderr=not _is_notebook()),
            expand=total is not None,
            transient=total is None,
        )
        self._bar.add_task("", total=total, completed=done, said="")
        self._bar.start()

    def _show(self, text: str, done: int = 0) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, said=text)


class Progress(_TaskDisplay):
    """The progress of a number of points, with their rate and the time left. `done` of the `total` points had
    results from the start.
    """

    def __init__(self, total: int, done: int, *, is_quiet: bool = False) -> None:
        super().__init__()
        self.total, self.done, self.failed = total, done, 0
        self._initial_done, self._start_seconds = done, time.monotonic()
        self._is_quiet, self._last_tenth = is_quiet, done * _MAX_LINES // max(total, 1)

    def __enter__(self) -> Self:
        if not self._is_quiet and self.done < self.total and is_watched():
            from rich.progress import BarColumn, MofNCompleteColumn

            self._start(BarColumn(bar_width=None), MofNCompleteColumn(), total=self.total, done=self.done)
        return self

    def advance(self, *, is_ok: bool) -> None:
        """Count one more finished point."""
        self.done += 1
        self.failed += not is_ok
        is_due = self.done == self.total or self.done * _MAX_LINES // self.total > self._last_tenth
        if self._bar is not None:
            self._show(self._status(), self.done)
        elif not self._is_quiet and is_due and _is_notebook():
            self._last_tenth = self.done * _MAX_LINES // self.total
            print(f"{self.done}/{self.total} points, {self._status()}", file=sys.stderr, flush=True)

    def _status(self) -> str:
        """E.g. "3.2 points/s, 1 min 40 s left, 2 failed"."""
        seconds = time.monotonic() - self._start_seconds
        rate = (self.done - self._initial_done) / seconds if seconds > 0 else 0.0
        status = [f"{rate:.3g} points/s"]
        if self.done < self.total and rate > 0:
            status.append(f"{format_duration((self.total - self.done) / rate)} left")
        if self.failed:
            status.append(f"{self.failed} failed")
        return ", ".join(status)


class Counts(_TaskDisplay):
    """Progress of an unknown amount of work: the count of each kind and the seconds so far. Only terminals
    show it.
    """

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self._counts = dict.fromkeys(kinds, 0)

    def __enter__(self) -> Self:
        if is_watched():
            from rich.progress import TimeElapsedColumn

            self._start(TimeElapsedColumn())
        return self

    def update(self, kind: str, count: int) -> None:
        """Set how many pieces of work of this kind are done."""
        self._counts[kind] = count
        self._show(", ".join(f"{done} {name}" for name, done in self._counts.items()))


def format_duration(seconds: float) -> str:
    """Seconds as a rounded duration: 8 s, 1 min 40 s, 3 h 5 min."""
    rounded_seconds = round(seconds)
    if rounded_seconds < 60:
        return f"{rounded_seconds} s"
    if rounded_seconds < 3600:
        return f"{rounded_seconds // 60} min {rounded_seconds % 60} s"
    return f"{rounded_seconds // 3600} h {rounded_seconds % 3600 // 60} min"
