"""Co-located jobs on one fabric and one clock.

All jobs start at the same instant, and every job repeats its step until each has run `_ROUNDS` rounds. They
share links as the flows of one job do. All other resources are per job. The first round of each job is not
counted, because the other jobs are not in their steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import simpy

from zsim.engine.executor import Executor
from zsim.engine.folding import find_concurrent_classes
from zsim.engine.prepare import PreparedJob, prepare
from zsim.engine.record import make_trace
from zsim.engine.request import StepRequest
from zsim.fabric.fabric import connect
from zsim.trace.trace import Trace

_ROUNDS = 4  # per job; the first is not counted


@dataclass
class JobLoop:
    """A job that repeats its step until all jobs have run enough rounds."""

    prepared: PreparedJob
    all_done: simpy.Event
    loops: list[JobLoop] = field(default_factory=list)
    """The loops of all jobs, this one included."""
    traces: list[Trace] = field(default_factory=list)
    """Its counted steps."""
    rounds: int = 0
    events: int = 0
    executor: Executor = field(init=False)

    def begin(self) -> None:
        """Start a round."""
        self.executor = self.prepared.executor()
        self.executor.on_finish = self._finish
        self.executor.begin()

    def _finish(self) -> None:
        executor, prepared = self.executor, self.prepared
        self.rounds += 1
        self.events += executor.num_events
        if self.rounds > 1:
            self.traces.append(make_trace(prepared.job, prepared.plan, executor, executor.end()))
        if all(loop.rounds >= _ROUNDS for loop in self.loops):
            self.all_done.succeed()
        else:
            self.begin()

    @property
    def median_step(self) -> Trace:
        """The counted step of median length (the shorter of two)."""
        order = sorted(range(len(self.traces)), key=lambda n: (self.traces[n].step_seconds, n))
        return self.traces[order[(len(order) - 1) // 2]]


def run_concurrently(
    requests: Sequence[StepRequest], *, unfold: bool
) -> tuple[list[JobLoop], tuple[str, ...]]:
    """The jobs' loops after they have run, and notes on the approximations of their classes.

    Raises StuckError if the clock stops with work left.
    """
    env = simpy.Environment()
    classes, notes = find_concurrent_classes(requests, unfold=unfold)
    prepared = [
        prepare(request, job_classes, env, is_connected=False)
        for request, job_classes in zip(requests, classes, strict=True)
    ]
    connect([prepared_job.fabric for prepared_job in prepared])
    all_done = env.event()
    loops = [JobLoop(prepared_job, all_done) for prepared_job in prepared]
    for loop in loops:
        loop.loops = loops
        loop.begin()
    try:
        env.run(until=all_done)
    except RuntimeError:  # simpy: no events are left
        for loop in loops:
            loop.executor.end()
        raise
    return loops, notes
