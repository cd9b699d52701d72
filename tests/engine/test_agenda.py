"""Agenda: what it holds back from simpy's queue happens in the order that simpy would give it."""

from __future__ import annotations

from heapq import heappush
from random import Random

import pytest
import simpy
from simpy.events import NORMAL, EventPriority

from zsim.engine.event_queue import EventQueue

LATER = EventPriority(2)  # of a pool of links, at the end of an instant


class Plain(EventQueue["Job", int]):
    """An agenda that leaves everything to simpy's queue."""

    def put(self, time: float, entry: int) -> None:
        if time in self._due:
            self._due[time].append(entry)
        else:
            self._due[time] = [entry]
            heappush(self.env._queue, (time, NORMAL, next(self.env._eid), self))


class Job:
    """A job that logs its entries and events of simpy, each of which puts down a few more at random."""

    def __init__(
        self, env: simpy.Environment, kind: type[EventQueue[Job, int]], seed: int, log: list[str]
    ) -> None:
        self.env, self.random, self.log, self.left, self.seed = env, Random(seed), log, 300, seed
        self.agenda: EventQueue[Job, int] = kind(env, self, Job.happen)
        self.more()

    def happen(self, entries: list[int], now: float) -> None:
        assert now == self.env.now
        self.log.append(f"{self.seed} {now} {entries}")
        for _ in entries:
            self.more()

    def other(self, event: simpy.Event) -> None:
        self.log.append(f"{self.seed} {self.env.now} simpy's")
        self.more()

    def more(self) -> None:
        """Up to three more, most at times that meet others'."""
        for _ in range(self.random.choice([1, 1, 2, 3])):
            if not self.left:
                return
            self.left -= 1
            delay = self.random.choice([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, self.random.random()])
            if self.random.random() < 0.7:
                self.agenda.schedule(self.env.now + delay, self.left)
                continue
            event = simpy.Event(self.env)
            event._ok, event._value, event.callbacks = True, None, [self.other]
            self.env.schedule(event, self.random.choice([NORMAL, LATER]), delay)


def log_of(kind: type[EventQueue[Job, int]], seed: int) -> list[str]:
    """What two jobs on one clock log, which is stopped and goes on."""
    env, log = simpy.Environment(), list[str]()
    jobs = [Job(env, kind, 2 * seed + number, log) for number in range(2)]
    for time in (1.0, 2.5, 4.0):
        env.run(until=time)
        log.append(f"stopped at {env.now}")
    env.run()
    assert [job.left for job in jobs] == [0, 0]
    return log


@pytest.mark.parametrize("seed", range(60))
def test_entries_happen_in_simpys_order(seed: int) -> None:
    assert log_of(EventQueue, seed) == log_of(Plain, seed)
