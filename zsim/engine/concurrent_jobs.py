"""Co-located jobs on one fabric and one clock.

All jobs start at the same instant, and every job repeats its step until each has run `_ROUNDS` rounds. They
share links as the flows of one job do. All other resources are per job. The first round of each job is not
counted, because the other jobs are not in their steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import simpy

from zsim.arrays import Floats
from zsim.engine.executor import Executor
from zsim.engine.folding import find_concurrent_classes
from zsim.engine.prepare import PreparedJob, prepare
from zsim.engine.record import make_trace
from zsim.fabric.fabric import connect
from zsim.plan.ops import Plan
from zsim.plan.passes.repeated_step import is_drained, repeat_step
from zsim.specs.experiment.job import Job
from zsim.specs.topology.topology import Topology
from zsim.trace.trace import Trace

_ROUNDS = 4  # per job; the first is not counted


@dataclass(frozen=True)
class ConcurrentJob:
    """A co-located job: the positions of its ranks (`topology`), their kernel slowdowns, and its plan."""

    job: Job
    topology: Topology
    slowdowns: Floats
    plan: Plan


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


def run_concurrently(jobs: Sequence[ConcurrentJob], *, unfold: bool) -> tuple[list[JobLoop], tuple[str, ...]]:
    """The jobs' loops after they have run, and notes on the approximations of their classes.

    Raises StuckError if the clock stops with work left.
    """
    env = simpy.Environment()
    placements = [(member.topology, member.plan, member.slowdowns) for member in jobs]
    classes, notes = find_concurrent_classes(placements, unfold=unfold)
    prepared = [
        prepare(
            member.job,
            member.plan,
            member.plan if member.plan.memoize(is_drained) else member.plan.memoize(repeat_step),
            member.topology,
            job_classes,
            member.slowdowns,
            env,
            is_connected=False,
        )
        for member, job_classes in zip(jobs, classes, strict=True)
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
