"""A process beside the page for what the page does not wait for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import field
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import ParamSpec, TypeVar

from zsim.dataclass import dataclass
from zsim.errors import NotSimulatedError

_TRIES = 2
_LEAST_URGENT = 19

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """A process of its own, started when it is first needed, that does one piece of work after the other.
    `what`: its work, for its errors."""

    what: str
    pools: list[ProcessPoolExecutor] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def result(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return or raise what `work` does there; NotSimulatedError where the process dies again."""
        for _ in range(_TRIES):
            try:
                return self._begun(work, *arguments, **named).result()
            except BrokenProcessPool:
                continue
        raise NotSimulatedError(
            f"the process that computes {self.what} died {_TRIES} times (killed, or out of memory?)"
        )

    def _begun(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        with self.lock:
            try:
                return self.pools[0].submit(work, *arguments, **named)
            except (IndexError, BrokenProcessPool):
                fresh = multiprocessing.get_context("spawn")
                self.pools[:] = [ProcessPoolExecutor(1, fresh, _beside_the_page)]
                return self.pools[0].submit(work, *arguments, **named)


def _beside_the_page() -> None:
    """Take only the processor time that the page and its browser leave. Ctrl-C reaches this process too, and
    ends it without a word; so does the end of the page's server, however it came."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_LEAST_URGENT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    page = multiprocessing.parent_process()
    assert page is not None
    threading.Thread(target=_end_after, args=(page,), daemon=True).start()


def _end_after(process: BaseProcess) -> None:
    process.join()
    os._exit(0)
