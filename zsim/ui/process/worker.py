"""A process of the page that does its work within bounds, and can be ended.

# [Note: the page's processes]
The page's server simulates nothing and reads no file itself. What a setting asks for is done by a `Backend`
in a separate process. One that is too slow or too large is ended with a sentence, and the next setting ends
what is under way for the one before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from zsim.errors import NotSimulatedError, ZsimError
from zsim.ui.form import Form

MAX_SECONDS = 120.0  # of one request; a busy machine may take so long for what takes 10 s alone
MAX_BYTES = 4 * 2**30
MAX_REQUESTS = 500  # of a process, which grows by some 40 kB with each, as freed memory falls into pieces
_TRIES = 2
_PRELOADED = ["zsim.ui.process.backend"]
REMEDY = "take experiment.toml along and `zsim run` it, which has no such bound"


class Superseded(ZsimError):
    """The work was ended because the page requested something else."""


class InternalError(Exception):
    """A mistake of zsim's in the process: the name of its type, and its traceback."""


class _ProcessDied(Exception):
    """The process ended before it answered."""


@dataclass
class _ProcessState:
    """The process, the server's end of its pipe, and how often it was ended on purpose."""

    process: BaseProcess | None = None
    pipe: Connection | None = None
    is_busy: bool = False
    ends: int = 0


@dataclass(frozen=True)
class Worker:
    """A process, started when it is first needed, that does one piece of work at a time on the object that
    `make` made there.
    """

    what: str
    """Its work, for its errors."""
    make: Callable[[], Any]
    niceness: int = 0
    """How much processor time it leaves to others."""
    max_seconds: float = MAX_SECONDS
    max_bytes: int = MAX_BYTES
    max_requests: int = MAX_REQUESTS
    turn: threading.Lock = field(default_factory=threading.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: _ProcessState = field(default_factory=_ProcessState)

    def result(self, work: Callable[..., Any] | str, *arguments: Any) -> Any:
        """Return or raise what `work` does there, a function of what `make` made or the name of its method.

        Raises NotSimulatedError where it takes longer or more memory than it may, or the process dies again,
        and Superseded where `end` was called meanwhile.
        """
        ends = self.running.ends
        with self.turn:
            for _ in range(_TRIES):
                try:
                    return self._run_request(ends, work, arguments)
                except _ProcessDied:
                    continue
        raise NotSimulatedError(
            f"the process that computes {self.what} died {_TRIES} times (killed, or out of memory?)"
        )

    def end(self) -> None:
        """End what is under way, and refuse what waits. State of the process is lost unless it is idle.

        The thread that waits on the pipe closes it. Closed here, another request may get its descriptor.
        """
        with self.lock:
            self.running.ends += 1
            if self.running.is_busy and self.running.process is not None:
                self.running.process.kill()

    def _run_request(self, ends: int, work: Callable[..., Any] | str, arguments: Any) -> Any:
        with self.lock:
            self._check_superseded(ends)
            pipe = self._ensure_started()
            self.running.is_busy = True
        try:
            pipe.send((work, arguments))
            if not pipe.poll(self.max_seconds):
                with self.lock:
                    self._check_superseded(ends)
                    self._kill()
                raise NotSimulatedError(
                    f"{self.what}: not done within the {self.max_seconds:g} s that a request of the page may "
                    f"take; {REMEDY}"
                )
            is_done, outcome = pipe.recv()
        except (EOFError, OSError):
            with self.lock:
                self._kill()
                self._check_superseded(ends)
            raise _ProcessDied from None
        finally:
            self.running.is_busy = False
        if is_done:
            return outcome
        raise outcome

    def _check_superseded(self, ends: int) -> None:
        if ends != self.running.ends:
            raise Superseded("another setting was asked for before this was done")

    def _ensure_started(self) -> Connection:
        running = self.running
        if running.process is None or running.pipe is None or not running.process.is_alive():
            context = _context()
            running.pipe, child_pipe = context.Pipe()
            arguments = (child_pipe, self.make, self.niceness, self.max_bytes, self.max_requests, self.what)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_pipe.close()
            running.process = process
        return running.pipe

    def _kill(self) -> None:
        running = self.running
        if running.process is not None:
            running.process.kill()
        if running.pipe is not None:
            running.pipe.close()
        running.process = running.pipe = None


def _context() -> Any:
    """Processes forked from one that has imported zsim, where that is possible, so that a new one starts at
    once.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _serve(
    pipe: Connection, make: Callable[[], Any], niceness: int, max_bytes: int, max_requests: int, label: str
) -> None:
    """The process: Ctrl-C ends it without a word, and so does the end of the page's server. After so many
    pieces of work it makes room for a fresh one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if niceness and hasattr(os, "nice"):  # not on Windows
        os.nice(niceness)
    page = multiprocessing.parent_process()
    assert page is not None
    threading.Thread(target=_exit_with_parent, args=(page,), daemon=True).start()
    max_bytes = _limit_memory(max_bytes)
    backend: Any = None
    for _ in range(max_requests):
        try:
            work, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            backend = backend or make()
            method = getattr(type(backend), work) if isinstance(work, str) else work
            answer = True, method(backend, *arguments)
        except ZsimError as error:
            answer = False, error
        except MemoryError:
            memory_message = (
                f"{label}: needs more than the {max_bytes / 1e9:.1f} GB that a request of the page may have"
            )
            pipe.send((False, NotSimulatedError(f"{memory_message}; {REMEDY}")))
            return  # the next process begins with all of its memory
        except (OverflowError, RecursionError) as error:
            message = f"the numbers are larger than zsim can hold ({type(error).__name__})"
            answer = False, NotSimulatedError(message)
        except Exception as error:
            answer = False, InternalError(type(error).__name__, traceback.format_exc())
        pipe.send(answer)


def _limit_memory(max_bytes: int) -> int:
    """Limit the process's memory where the system can, to half of the machine's if that is less. Returns the
    limit.
    """
    if not sys.platform.startswith("linux"):
        return max_bytes
    import resource

    max_bytes = min(max_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    return max_bytes


def _exit_with_parent(process: BaseProcess) -> None:
    process.join()
    os._exit(0)


# -- The page's processes: one that answers, one that searches remedies, one for the curve -----------------


_MAX_SECONDS_ASIDE = 600.0  # of what the page does not wait for
_NICENESS_OF_CURVE = 10  # it is asked for by nobody, and leaves processor time to who turns settings


class Backends:
    """A backend in each of three processes, for one form. `make` makes a backend there."""

    def __init__(self, form: Form, make: Callable[[], Any]) -> None:
        self.form = form
        self.answer_worker = Worker("the answer", make)
        self.remedy_worker = Worker("what would fit", make, max_seconds=_MAX_SECONDS_ASIDE)
        self.curve_worker = Worker(
            "the curve", make, niceness=_NICENESS_OF_CURVE, max_seconds=_MAX_SECONDS_ASIDE
        )

    def end(self) -> None:
        """End all that is under way: the page shows another setting."""
        for worker in (self.answer_worker, self.remedy_worker, self.curve_worker):
            worker.end()
