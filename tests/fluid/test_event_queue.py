"""Event queue: entries of one instant happen together, in the place of the first among SimPy's events."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import simpy
from simpy.events import NORMAL, EventPriority

from zsim.fluid.pool import EventQueue, Timer

LATER = EventPriority(2)  # of a pool of links, at the end of an instant


class Job:
    """A job that logs its entries and events of SimPy, and calls `then(entry)` for each entry."""

    def __init__(self, env: simpy.Environment, then: Callable[[int], None] = lambda entry: None) -> None:
        self.env, self.log, self.then = env, list[tuple[float, Any]](), then
        self.queue: EventQueue[Job, int] = EventQueue(env, self, Job.dispatch)
        self.later = Timer(env, self, Job.end_instant)

    def dispatch(self, entries: list[int], now: float) -> None:
        assert now == self.env.now
        self.log.append((now, entries))
        for entry in entries:
            self.then(entry)

    def end_instant(self) -> None:
        self.log.append((self.env.now, "later"))

    def wait(self, delay: float, name: str) -> None:
        """Log `name` at an event of SimPy."""
        timeout = simpy.Timeout(self.env, delay)
        timeout.callbacks = [lambda _event: self.log.append((self.env.now, name))]


def test_entries_of_one_instant_happen_together_in_their_order() -> None:
    job = Job(simpy.Environment())
    for delay, entry in ((2.0, 1), (1.0, 2), (2.0, 3), (0.0, 4)):
        job.queue.schedule(delay, entry)
    job.env.run()
    assert job.log == [(0.0, [4]), (1.0, [2]), (2.0, [1, 3])]


def test_entries_happen_in_the_place_of_the_first_of_them() -> None:
    """The second entry was scheduled after SimPy's event, and happens before it."""
    job = Job(simpy.Environment())
    job.wait(1.0, "before")
    job.queue.schedule(1.0, 1)
    job.wait(1.0, "after")
    job.queue.schedule(1.0, 2)
    job.env.run()
    assert job.log == [(1.0, "before"), (1.0, [1, 2]), (1.0, "after")]


def test_an_entry_for_the_same_instant_waits_for_the_events_that_are_due() -> None:
    """Entry 1 schedules entry 2 without a delay: after the event that is due already, and before those of the
    instant's end."""
    env = simpy.Environment()

    def then(entry: int) -> None:
        if entry == 1:
            job.queue.schedule(0.0, 2)

    job = Job(env, then)
    job.env.schedule(job.later, LATER, 1.0)
    job.queue.schedule(1.0, 1)
    job.wait(1.0, "due")
    env.run()
    assert job.log == [(1.0, [1]), (1.0, "due"), (1.0, [2]), (1.0, "later")]


def test_a_delay_meets_that_of_simpy_to_the_last_digit() -> None:
    """0.1 + 0.2 is 0.30000000000000004; the delay that a subtraction finds for 0.3 is 0.19999999999999998."""
    env = simpy.Environment()

    def then(entry: int) -> None:
        if entry == 1:
            job.queue.schedule(0.2, 2)
            job.wait(0.2, "waited")

    job = Job(env, then)
    job.queue.schedule(0.1, 1)
    env.run()
    assert job.log == [(0.1, [1]), (0.1 + 0.2, [2]), (0.1 + 0.2, "waited")]


def test_a_queue_goes_on_where_its_clock_was_stopped() -> None:
    env = simpy.Environment()

    def then(entry: int) -> None:
        if entry < 4:
            job.queue.schedule(1.0, entry + 1)

    job = Job(env, then)
    job.queue.schedule(1.0, 1)
    env.run(until=2.0)  # before the events of that instant
    assert job.log == [(1.0, [1])]
    env.run()
    assert job.log == [(1.0, [1]), (2.0, [2]), (3.0, [3]), (4.0, [4])]


@pytest.mark.parametrize("seed", range(20))
def test_no_entry_is_lost_or_late(seed: int) -> None:
    """Entries at random, most at times that meet others': each happens once, at its time."""
    random, expected = Random(seed), dict[int, float]()
    env = simpy.Environment()

    def more(_entry: int) -> None:
        for _ in range(random.choice([1, 1, 2, 3])):
            if len(expected) < 300:
                delay = random.choice([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, random.random()])
                number = len(expected)
                expected[number] = env.now + delay
                job.queue.schedule(delay, number)
                simpy.Timeout(env, random.choice([0.0, 1.0, 0.5]))
                env.schedule(job.later, random.choice([NORMAL, LATER]), delay)

    job = Job(env, more)
    more(0)
    env.run()
    logged = [(now, entry) for now, entries in job.log if entries != "later" for entry in entries]
    assert sorted((entry, now) for now, entry in logged) == sorted(expected.items())
    assert [now for now, _ in logged] == sorted(now for now, _ in logged)
