"""The process beside the page: its bounds, its end, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.ui.process.worker import Superseded, Worker
from zsim.ui.words import run_safely

posix = pytest.mark.skipif(os.name != "posix", reason="kills a process")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory where Linux can")
ENOUGH = 60.0  # seconds that a busy machine may take to start a process

PAGE = """
import os, time
from tests.ui.process.test_worker import Table, pid
from zsim.ui.process.worker import Worker
print(Worker("nothing", Table).result(pid), flush=True)
time.sleep(600)
"""


class Table:
    """What a process keeps."""

    def __init__(self) -> None:
        self.counted = 0

    def seen(self) -> int:
        """How often it was counted."""
        return self.counted


def count(table: Table) -> int:
    table.counted += 1
    return table.counted


def pid(table: Table) -> int:
    return os.getpid()


def sleep(table: Table, seconds: float = 600.0) -> None:
    time.sleep(seconds)


def die(table: Table) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def grow(table: Table) -> int:
    return len(bytearray(2**30))


def refuse(table: Table) -> None:
    raise InputError("found 8192")


def fail(table: Table) -> None:
    raise KeyError("missing")


def worker(**options: Any) -> Worker:
    return Worker("the answer", Table, **options)


def test_it_keeps_what_it_made_and_says_the_same_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    one = worker()
    assert [one.result(count), one.result(count)] == [1, 2]
    with pytest.raises(InputError, match="found 8192"):
        one.result(refuse)
    found, text = run_safely(lambda: one.result(fail))
    assert (found, text) == (None, "zsim made a mistake here (KeyError); the terminal has the details")
    assert "KeyError: 'missing'" in capsys.readouterr().err
    assert one.result(count) == 3
    assert one.result("seen") == 3


def test_what_takes_too_long_is_ended_and_the_next_is_done() -> None:
    one = worker(max_seconds=3.0)
    one.result(count)
    with pytest.raises(NotSimulatedError, match=r"the answer: not done within the 3 s .* `zsim run` it"):
        one.result(sleep)
    slow = worker()
    assert slow.result(count) == 1  # a process of its own


@linux
def test_what_needs_too_much_memory_is_ended_and_the_next_is_done() -> None:
    one = worker(max_bytes=2**29)
    with pytest.raises(
        NotSimulatedError, match=r"needs more than the 0\.5 GB that a request of the page may"
    ):
        one.result(grow)
    assert one.result(count) == 1


@posix
def test_the_pipe_is_closed_by_who_waits_on_it() -> None:
    """Not by who ends the work: what opens next would have the descriptor that is waited on."""
    one, waiters = worker(), list[int]()
    one.result(count)
    pipe = one.running.pipe
    assert pipe is not None
    close, closers = pipe.close, list[int]()

    def note_closer() -> None:
        closers.append(threading.get_ident())
        close()

    setattr(pipe, "close", note_closer)  # noqa: B010

    def work() -> None:
        with pytest.raises(Superseded):
            one.result(sleep)
        waiters.append(threading.get_ident())

    thread = threading.Thread(target=work)
    thread.start()
    while not one.running.is_busy:
        time.sleep(0.01)
    one.end()
    thread.join(ENOUGH)
    assert closers == waiters != []
    assert one.result(count) == 1


@posix
def test_end_ends_what_is_under_way_and_refuses_what_waits() -> None:
    """Of two that wait neither is done; nothing is said of them; what comes later is."""
    one, errors = worker(), []
    first = one.result(pid)

    def ask() -> None:
        try:
            one.result(sleep)
        except Superseded as error:
            errors.append(error)

    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while not one.running.is_busy:
        time.sleep(0.01)
    one.end()
    for thread in waiting:
        thread.join(ENOUGH)
    assert len(errors) == 2
    assert one.result(pid) != first
    assert run_safely(lambda: one.end()) == (None, "")


def test_end_leaves_one_that_does_nothing_with_what_it_keeps() -> None:
    one = worker()
    one.result(count)
    one.end()
    assert one.result(count) == 2


def test_after_some_work_a_fresh_process_takes_over() -> None:
    """Two pieces of work each."""
    one = worker(max_requests=2)
    assert [one.result(count) for _ in range(5)] == [1, 2, 1, 2, 1]


@posix
def test_one_that_was_killed_is_replaced_and_one_that_dies_again_is_said() -> None:
    one = worker()
    os.kill(one.result(pid), signal.SIGKILL)
    assert one.result(count) == 1
    with pytest.raises(NotSimulatedError, match="computes the answer died 2 times"):
        one.result(die)


@posix
def test_it_ends_when_the_server_is_killed() -> None:
    """It has the server's standard output, which ends when both have."""
    with subprocess.Popen([sys.executable, "-c", PAGE], stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert int(page.stdout.readline()) != page.pid
        page.kill()
        rest, _ = page.communicate(timeout=120)
    assert rest == ""
