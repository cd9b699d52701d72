"""Steps of which only some micro-batches are simulated.

# [Note: middle micro-batches are alike]
The first micro-batch of a step starts on an idle machine, and the last reduces gradients. Those between
repeat. So a step of n micro-batches takes the time of a step of three, plus n - 3 times the difference
between steps of three and of two. A smaller last micro-batch adds the difference for its size. The memory
peak is the peak of three. If torch's allocator runs short, micro-batches differ from each other.

# [Note: host and GPU take turns]
A GPU that waits at the beginning of a step may have micro-batches to catch up with. Then one more micro-batch
costs what it costs the GPU, though many cost what they cost the slower host. Or a host may be ahead of a
slower GPU, but not yet far enough to hide its work at the step's end. So each further micro-batch takes as
long as lies between the beginnings of the last two, on the host or on the GPU, where that is longer than
steps of three and of two differ. Where it is longer by a hundredth, six are simulated.

# [Note: a full pipeline repeats]
A pipeline of p ranks under 1F1B is full after p micro-batches. Interleaved, with v stages a rank, it is full
after at most 2 p (the first rank begins with 2 (p - 1) + (v - 1) p of its v p forwards). From then on one
more takes as long as one before. So a step of n takes the time of p + 2, plus (n - p - 2) / 2 times the
difference between p + 2 and p. Interleaved, in groups of p, it takes the time of 3 p, plus (n - 3 p) / p
times the difference between 3 p and 2 p, where n is a multiple. Schedules that hold all micro-batches at once
(GPipe, looped BFS) are simulated completely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import floor

import numpy as np

from zsim.dataclass import dataclass
from zsim.engine.simulate import Outcome, seconds_alone, simulate_job
from zsim.errors import NotSimulatedError
from zsim.plan.builder import COMPUTE
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace

FEW = 3  # micro-batches; each further one adds the difference of the last two
_FEW_SHORT = 8  # micro-batches to average if the allocator runs short
_SAME = 1e-6  # fraction of a micro-batch
_SETTLED = 1e-2  # how much further apart micro-batches may begin than steps differ, as a fraction


@dataclass(frozen=True)
class SimulatedStep:
    """The step of `job`, which takes `seconds`."""

    job: Job
    outcome: Outcome
    """The simulation of all its micro-batches, or of some."""
    seconds: float
    terms: tuple[tuple[float, Outcome], ...]
    """Pairs (factor, outcome) whose weighted sum gives any additive quantity of the step (seconds,
    joules).
    """
    peak_plan: Plan
    """The plan of enough micro-batches to reach the step's memory peak."""

    @property
    def is_whole(self) -> bool:
        """Whether `outcome` has all micro-batches of the step."""
        return self.job.sequences is None and self.micro_batches == self.outcome_micro_batches

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of the step, with a smaller last one."""
        return self.job.training.gradient_accumulation_steps

    @property
    def outcome_micro_batches(self) -> int:
        """Number of micro-batches of `outcome`."""
        return self.outcome.job.training.gradient_accumulation_steps

    @property
    def times_longer(self) -> float:
        """Seconds of the step over seconds of `outcome`."""
        return self.seconds / self.outcome.trace.step_seconds

    @property
    def peak_bytes(self) -> int:
        """Maximum GPU bytes of the fullest rank over the step, or before it."""
        return peak_bytes(self.job, self.peak_plan)

    @property
    def retries_per_micro_batch(self) -> float:
        """How often torch's allocator runs short per micro-batch."""
        found = self.outcome.allocation
        return 0.0 if found is None else found.counts.retries / self.outcome_micro_batches


Simulate = Callable[[Job], Outcome]


def simulate_step(
    job: Job, *, unfold: bool = False, simulate: Simulate | None = None, seconds_only: bool = False
) -> SimulatedStep:
    """One steady step, of which as many micro-batches are simulated as `[simulation]` asks for.

    `simulate` is the study's function that simulates a job (default: `simulate_job`). With `seconds_only` a
    second simulation, of fewer micro-batches, is run only for its seconds and is left out of `terms`.

    Raises NotSimulatedError with jitter or co-located jobs, unless every micro-batch is simulated and has the
    full size.
    """
    run = simulate or partial(simulate_job, unfold=unfold)
    size, steps = job.training.micro_batch_size, job.training.gradient_accumulation_steps
    is_plain = job.simulation.every_micro_batch or steps <= few_of(job)[0]
    if is_plain and job.sequences is None:
        return _simulated(job, steps, run)
    if job.others or job.jitter is not None:
        what = (
            "simulation.every_micro_batch = false" if job.sequences is None else "a smaller last micro-batch"
        )
        raise NotSimulatedError(f"{what} beside other jobs or with jitter is not simulated yet")
    if job.sequences is None:
        return replace(_of(job, steps, run, seconds_only=seconds_only), job=job)
    whole = floor(job.sequences / size + 1e-9)
    rest = job.sequences - whole * size
    if rest < _SAME * size:
        return replace(_of(job, whole, run, seconds_only=seconds_only), job=job)
    smaller = max(1, round(rest))
    last = replace(job, training=replace(job.training, micro_batch_size=smaller))
    if whole == 0:
        step = _of(last, 1, run)
        step = replace(step, seconds=step.seconds * rest / smaller, terms=((rest / smaller, step.outcome),))
    else:
        three, two = _of(last, FEW, run), _of(last, FEW - 1, run)
        more = three.seconds - two.seconds
        step = _of(job, whole, run)
        part = rest / smaller
        terms = (*step.terms, (part, three.outcome), (-part, two.outcome))
        step = replace(step, seconds=step.seconds + more * rest / smaller, terms=terms)
    if whole < FEW:  # from there on one more does not change the peak
        step = replace(step, peak_plan=make_plan(_with_steps(job, whole + 1)))
    return replace(step, job=job)


def longer(few: float, less: float, more: float) -> float:
    """Seconds of a step of NUM_SAMPLED + `num_further` micro-batches.

    NUM_SAMPLED micro-batches take `sampled_seconds`, and NUM_SAMPLED - 1 take `shorter_seconds`. In a
    pipeline these are groups of as many micro-batches as there are ranks.
    """
    return few + more * (few - less)


def few_of(job: Job) -> tuple[int, int]:
    """Two numbers of micro-batches, from whose steps the step of any larger number follows.

    Where it does not follow, both are the number of the job itself. See [Note: a full pipeline repeats].
    """
    split, steps = job.parallelism, job.training.gradient_accumulation_steps
    ranks = split.pipeline
    if ranks == 1:
        return FEW, FEW - 1
    holds_all = split.schedule in ("gpipe", "looped-bfs") or split.schedule_csv or split.passes > 1
    if holds_all or (split.virtual_stages > 1 and steps % ranks):
        return steps, steps
    return (ranks + 2, ranks) if split.schedule == "1f1b" else (FEW * ranks, (FEW - 1) * ranks)


def with_few(job: Job) -> Job:
    """The job with no more micro-batches than its memory's maximum needs. See `sample_counts`."""
    most = few_of(job)[0]
    is_longer = job.sequences is None and job.training.gradient_accumulation_steps > most
    return _with_steps(job, most) if is_longer else job


def few_micro_batches(experiment: Experiment, most: int) -> Experiment:
    """The experiment with at most `max_micro_batches` micro-batches, and then without its global batch size.

    Where that is at least the first of `sample_counts`, memory does not change.
    """
    training = experiment.training
    if (training.gradient_accumulation_steps or 1) <= most:
        return experiment
    few = training.model_copy(update={"gradient_accumulation_steps": most, "global_batch_size": None})
    return experiment.model_copy(update={"training": few})


def _of(
    job: Job,
    steps: int,
    run: Simulate,
    *,
    seconds_only: bool = False,
    enough: tuple[int, int] | None = None,
) -> SimulatedStep:
    """A step of `steps` full micro-batches.

    If the allocator runs short, micro-batches differ, and the step is `steps` times the mean of the first
    `_NUM_AVERAGED`. `seconds_only` has the meaning that it has in `simulate_step`. `counts` are the two
    numbers that are simulated, if they are other than those of `sample_counts`.
    """
    if job.simulation.every_micro_batch:
        return _simulated(job, steps, run)
    (most, fewer), ranks = enough or few_of(job), job.parallelism.pipeline
    few = _simulated(job, min(steps, most), run)
    if steps <= most:
        return few
    if few.retries_per_micro_batch:
        count = min(steps, max(_FEW_SHORT, most))
        some = _simulated(job, count, run)
        seconds = some.seconds * steps / count
        return replace(some, seconds=seconds, terms=((steps / count, some.outcome),))
    less = None if seconds_only else _simulated(job, fewer, run)
    short = seconds_alone(_with_steps(job, fewer)) if less is None else less.seconds
    more = (steps - most) / (most - fewer)
    if ranks == 1:
        apart = _seconds_apart(few.outcome.trace) / (few.seconds - short)
        if apart > 1 + _SETTLED and most == FEW:
            return _of(job, steps, run, seconds_only=seconds_only, enough=(2 * FEW, 2 * FEW - 1))
        more *= max(apart, 1.0)
    terms = few.terms if less is None else ((1.0 + more, few.outcome), (-more, less.outcome))
    return replace(few, seconds=longer(few.seconds, short, more), terms=terms)


def _seconds_apart(trace: Trace) -> float:
    """Seconds between the beginnings of the last two micro-batches on the host or, if later, on the GPU.

    It is 0 where forwards are not between backwards. See [Note: host and GPU take turns].
    """
    is_compute = np.array([info.stream == COMPUTE for info in trace.infos])
    is_forward = np.array([info.phase == "forward" for info in trace.infos])
    own = (trace.ranks == trace.ranks[0]) & is_compute[trace.info_indices]
    forward = is_forward[trace.info_indices[own]]
    begins = np.flatnonzero(forward[1:] & ~forward[:-1])[-2:] + 1
    if len(begins) < 2:
        return 0.0
    return max(float(np.diff(when[own][begins])[0]) for when in (trace.start_seconds, trace.issue_seconds))


def _simulated(job: Job, steps: int, run: Simulate) -> SimulatedStep:
    job = _with_steps(job, steps)
    outcome = run(job)
    return SimulatedStep(job, outcome, outcome.trace.step_seconds, ((1.0, outcome),), outcome.plan)


def _with_steps(job: Job, steps: int) -> Job:
    if job.training.gradient_accumulation_steps == steps and job.sequences is None:
        return job
    split, whole = job.parallelism, job.training.gradient_accumulation_steps
    if split.pipeline > 1 and steps < whole:
        split = replace(split, buffered_micro_batches=whole // split.passes)
    training = replace(job.training, gradient_accumulation_steps=steps)
    return replace(job, training=training, parallelism=split, sequences=None)
