"""Run a step once, or many times with jitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zsim.engine.executor import Executor
from zsim.engine.prepare import PreparedJob, Seconds
from zsim.engine.priced_program import scale_seconds
from zsim.engine.record import make_trace, step_seconds
from zsim.specs.experiment.jitter import JitterConfig
from zsim.trace.trace import Trace


@dataclass(frozen=True)
class ProgramRun:
    """One run of a job's programs: the executor, and the time at which the last op ended."""

    prepared: PreparedJob
    executor: Executor
    end_seconds: float

    @property
    def step_seconds(self) -> float:
        return step_seconds(self.prepared.plan, self.executor, self.end_seconds)

    @cached_property
    def trace(self) -> Trace:
        """The run as a trace."""
        return make_trace(self.prepared.job, self.prepared.plan, self.executor, self.end_seconds)


@dataclass(frozen=True)
class JitterRun:
    """Steps drawn with jitter."""

    jitter: JitterConfig
    steps: tuple[Trace, ...]
    """Traces of the first simulated rank."""
    median: Trace
    """Trace of all simulated ranks of the step of median length."""
    plain_seconds: float
    """Of the step without jitter."""
    events: int


def run_once(prepared: PreparedJob, kernel_seconds: Sequence[Seconds] | None = None) -> ProgramRun:
    """Run the prepared programs once, from now on."""
    executor = prepared.executor(kernel_seconds)
    return ProgramRun(prepared, executor, executor.run())


def draw_steps(prepared: PreparedJob, plain: ProgramRun, jitter: JitterConfig) -> JitterRun:
    """Draw `jitter.steps` steps. `plain` is the run without jitter.

    A class of one rank draws its factors, a larger class the envelope of its slowest members.
    """
    from zsim.engine.jitter.draw import class_generator, op_seconds, rank_factors
    from zsim.engine.jitter.slowest_of_class import RankEnsemble

    factors = rank_factors(jitter, prepared.job.world_size)
    ranks, sizes = prepared.classes.representatives, prepared.classes.sizes.tolist()
    seconds = [
        scale_seconds(kernels, float(factors[rank]))
        for kernels, rank in zip(prepared.kernel_seconds, ranks, strict=True)
    ]
    concentration = [np.array(priced.concentration) for priced in prepared.programs]
    program_of = prepared.program_of
    is_alone = all(size == 1 for size in sizes)
    ensemble = None if is_alone else RankEnsemble(prepared, plain.executor, factors, jitter.kernel_sigma)
    traces: list[Trace] = []
    events = 0
    for step in range(jitter.steps):
        envelope_seconds = ensemble.step(class_generator(jitter, step)) if ensemble is not None else seconds
        drawn = [
            op_seconds(jitter, step, rank, seconds[number], concentration[program_of[number]])
            if size == 1
            else envelope_seconds[number]
            for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True))
        ]
        run = run_once(prepared, drawn)
        events += run.executor.num_events
        traces.append(run.trace)
    by_length = sorted(range(jitter.steps), key=lambda number: (traces[number].step_seconds, number))
    median = traces[by_length[(jitter.steps - 1) // 2]]
    first_rank_steps = tuple(trace.select_rank(ranks[0]) for trace in traces)
    return JitterRun(jitter, first_rank_steps, median, plain.trace.step_seconds, events)
