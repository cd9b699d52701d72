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

# [Note: a step as a loop]
All of the above is an estimate, for `simulation.every_micro_batch = false`. Otherwise a step of many
micro-batches is simulated with six, or with twelve, where these prove that each further micro-batch repeats
one before (`zsim.engine.micro_batch_period`), and with one more. The difference of both is what each further
one adds, so that the step has the seconds, and the report the numbers, that it has where all of its
micro-batches are simulated, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

import numpy as np

from zsim.engine.simulate import LOOP_COUNTS, Outcome, isolated_seconds, simulate_job
from zsim.errors import NotSimulatedError
from zsim.plan.builder import COMPUTE
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace

NUM_SAMPLED = 3  # micro-batches; each further one adds the difference of the last two
_NUM_AVERAGED = 8  # micro-batches to average if the allocator runs short
_TOLERANCE = 1e-6  # fraction of a micro-batch
_MAX_INTERVAL_EXCESS = (
    1e-2  # by how much, as a fraction, intervals of micro-batches may exceed the difference of steps
)


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
    is_loop: bool = False
    """Whether micro-batches that are not simulated are known to repeat one that is. See [Note: a step as a
    loop].
    """

    @cached_property
    def whole_outcome(self) -> Outcome:
        """The outcome with all micro-batches of a loop, which are simulated at first use. That of another
        step is what was simulated of it.
        """
        if not self.is_loop:
            return self.outcome
        return simulate_job(self.job, unfold=self.outcome.stats.rank_classes == self.job.world_size)

    @property
    def is_complete(self) -> bool:
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
    def length_ratio(self) -> float:
        """Seconds of the step over seconds of `outcome`."""
        return self.seconds / self.outcome.trace.step_seconds

    @property
    def peak_bytes(self) -> int:
        """Maximum GPU bytes of the fullest rank over the step, or before it."""
        return peak_bytes(self.job, self.peak_plan)

    @property
    def retries_per_micro_batch(self) -> float:
        """How often torch's allocator runs short per micro-batch."""
        allocation = self.outcome.allocation
        return 0.0 if allocation is None else allocation.counts.retries / self.outcome_micro_batches


Simulate = Callable[[Job], Outcome]


def simulate_step(job: Job, *, simulate: Simulate | None = None, seconds_only: bool = False) -> SimulatedStep:
    """One steady step, of which as many micro-batches are simulated as `[simulation]` asks for, or as few as
    prove what the others do.

    `simulate` is the study's function that simulates a job (default: `simulate_job`). With `seconds_only` a
    second simulation, of fewer micro-batches, is run only for its seconds and is left out of `terms`.

    Raises NotSimulatedError with jitter or co-located jobs, unless every micro-batch is simulated and has the
    full size.
    """
    run = simulate or simulate_job
    size, steps = job.training.micro_batch_size, job.training.gradient_accumulation_steps
    is_plain = job.simulation.every_micro_batch or steps <= sample_counts(job)[0]
    if is_plain and job.sequences is None:
        return _simulate_loop(job, steps, run) or _simulate_all(job, steps, run)
    if job.colocated_jobs or job.jitter is not None:
        setting = (
            "simulation.every_micro_batch = false" if job.sequences is None else "a smaller last micro-batch"
        )
        raise NotSimulatedError(f"{setting} beside other jobs or with jitter is not simulated yet")
    if job.sequences is None:
        return replace(_extrapolate_step(job, steps, run, seconds_only=seconds_only), job=job)
    num_full = floor(job.sequences / size + 1e-9)
    last_size = job.sequences - num_full * size
    if last_size < _TOLERANCE * size:
        return replace(_extrapolate_step(job, num_full, run, seconds_only=seconds_only), job=job)
    smaller = max(1, round(last_size))
    last = replace(job, training=replace(job.training, micro_batch_size=smaller))
    if num_full == 0:
        step = _extrapolate_step(last, 1, run)
        step = replace(
            step, seconds=step.seconds * last_size / smaller, terms=((last_size / smaller, step.outcome),)
        )
    else:
        three, two = _extrapolate_step(last, NUM_SAMPLED, run), _extrapolate_step(last, NUM_SAMPLED - 1, run)
        difference = three.seconds - two.seconds
        step = _extrapolate_step(job, num_full, run)
        fraction = last_size / smaller
        terms = (*step.terms, (fraction, three.outcome), (-fraction, two.outcome))
        step = replace(step, seconds=step.seconds + difference * last_size / smaller, terms=terms)
    if num_full < NUM_SAMPLED:  # from there on one more does not change the peak
        step = replace(step, peak_plan=make_plan(_set_micro_batches(job, num_full + 1)))
    return replace(step, job=job)


def _simulate_loop(job: Job, steps: int, run: Simulate) -> SimulatedStep | None:
    """A step of `steps` micro-batches of which few are simulated. None where the others are not known to
    repeat one of these. See [Note: a step as a loop].
    """
    if not job.may_repeat_micro_batches:
        return None
    for count in LOOP_COUNTS:
        if steps < 3 * count:  # the two steps and the proof take as long
            break
        sampled = _simulate_all(job, count, run)
        period, allocation = sampled.outcome.period, sampled.outcome.allocation
        if period is None:
            continue
        longer = _simulate_all(job, count + 1, run)
        is_same = abs(longer.seconds - sampled.seconds - period.seconds) <= _TOLERANCE * period.seconds
        if not is_same or allocation != longer.outcome.allocation:
            continue
        num_further = float(steps - count)
        return replace(
            sampled,
            job=job,
            seconds=sampled.seconds + num_further * period.seconds,
            terms=((1.0 - num_further, sampled.outcome), (num_further, longer.outcome)),
            is_loop=True,
        )
    return None


def extrapolate_seconds(sampled_seconds: float, shorter_seconds: float, num_further: float) -> float:
    """Seconds of a step of NUM_SAMPLED + `num_further` micro-batches.

    NUM_SAMPLED micro-batches take `sampled_seconds`, and NUM_SAMPLED - 1 take `shorter_seconds`. In a
    pipeline these are groups of as many micro-batches as there are ranks.
    """
    return sampled_seconds + num_further * (sampled_seconds - shorter_seconds)


def sample_counts(job: Job) -> tuple[int, int]:
    """Two numbers of micro-batches, from whose steps the step of any larger number follows.

    Where it does not follow, both are the number of the job itself. See [Note: a full pipeline repeats].
    """
    split, steps = job.parallelism, job.training.gradient_accumulation_steps
    ranks = split.pipeline
    if ranks == 1:
        return NUM_SAMPLED, NUM_SAMPLED - 1
    holds_all = split.schedule in ("gpipe", "looped-bfs") or split.schedule_csv or split.passes > 1
    if holds_all or (split.virtual_stages > 1 and steps % ranks):
        return steps, steps
    return (
        (ranks + 2, ranks) if split.schedule == "1f1b" else (NUM_SAMPLED * ranks, (NUM_SAMPLED - 1) * ranks)
    )


def shorten_micro_batches(job: Job) -> Job:
    """The job with no more micro-batches than its memory's maximum needs. See `sample_counts`."""
    count = sample_counts(job)[0]
    is_shortened = job.sequences is None and job.training.gradient_accumulation_steps > count
    return _set_micro_batches(job, count) if is_shortened else job


def limit_micro_batches(experiment: Experiment, max_micro_batches: int) -> Experiment:
    """The experiment with at most `max_micro_batches` micro-batches, and then without its global batch size.

    Where that is at least the first of `sample_counts`, memory does not change.
    """
    training = experiment.training
    if (training.gradient_accumulation_steps or 1) <= max_micro_batches:
        return experiment
    limited = training.model_copy(
        update={"gradient_accumulation_steps": max_micro_batches, "global_batch_size": None}
    )
    return experiment.model_copy(update={"training": limited})


def _extrapolate_step(
    job: Job,
    steps: int,
    run: Simulate,
    *,
    seconds_only: bool = False,
    counts: tuple[int, int] | None = None,
) -> SimulatedStep:
    """A step of `steps` full micro-batches.

    If the allocator runs short, micro-batches differ, and the step is `steps` times the mean of the first
    `_NUM_AVERAGED`. `seconds_only` has the meaning that it has in `simulate_step`. `counts` are the two
    numbers that are simulated, if they are other than those of `sample_counts`.
    """
    if job.simulation.every_micro_batch:
        return _simulate_all(job, steps, run)
    (num_sampled, fewer), ranks = counts or sample_counts(job), job.parallelism.pipeline
    sampled = _simulate_all(job, min(steps, num_sampled), run)
    if steps <= num_sampled:
        return sampled
    if sampled.retries_per_micro_batch:
        count = min(steps, max(_NUM_AVERAGED, num_sampled))
        averaged = _simulate_all(job, count, run)
        seconds = averaged.seconds * steps / count
        return replace(averaged, seconds=seconds, terms=((steps / count, averaged.outcome),))
    shorter = None if seconds_only else _simulate_all(job, fewer, run)
    if shorter is not None and shorter.retries_per_micro_batch and ranks == 1:
        # a step that is short of memory is no measure of one that is not
        return _extrapolate_step(job, steps, run, counts=(num_sampled + 1, num_sampled))
    shorter_seconds = isolated_seconds(_set_micro_batches(job, fewer)) if shorter is None else shorter.seconds
    num_further = (steps - num_sampled) / (num_sampled - fewer)
    if ranks == 1:
        interval_ratio = _micro_batch_interval(sampled.outcome.trace) / (sampled.seconds - shorter_seconds)
        if interval_ratio > 1 + _MAX_INTERVAL_EXCESS and num_sampled == NUM_SAMPLED:
            return _extrapolate_step(
                job, steps, run, seconds_only=seconds_only, counts=(2 * NUM_SAMPLED, 2 * NUM_SAMPLED - 1)
            )
        num_further *= max(interval_ratio, 1.0)
    terms = (
        sampled.terms
        if shorter is None
        else ((1.0 + num_further, sampled.outcome), (-num_further, shorter.outcome))
    )
    return replace(
        sampled, seconds=extrapolate_seconds(sampled.seconds, shorter_seconds, num_further), terms=terms
    )


def _micro_batch_interval(trace: Trace) -> float:
    """Seconds between the beginnings of the last two micro-batches on the host or, if later, on the GPU.

    It is 0 where forwards are not between backwards. See [Note: host and GPU take turns].
    """
    is_compute = np.array([info.stream == COMPUTE for info in trace.infos])
    is_forward = np.array([info.phase == "forward" for info in trace.infos])
    is_row = (trace.ranks == trace.ranks[0]) & is_compute[trace.info_indices]
    forward = is_forward[trace.info_indices[is_row]]
    begins = np.flatnonzero(forward[1:] & ~forward[:-1])[-2:] + 1
    if len(begins) < 2:
        return 0.0
    return max(
        float(np.diff(times[is_row][begins])[0]) for times in (trace.start_seconds, trace.issue_seconds)
    )


def _simulate_all(job: Job, steps: int, run: Simulate) -> SimulatedStep:
    job = _set_micro_batches(job, steps)
    outcome = run(job)
    return SimulatedStep(job, outcome, outcome.trace.step_seconds, ((1.0, outcome),), outcome.plan)


def _set_micro_batches(job: Job, steps: int) -> Job:
    if job.training.gradient_accumulation_steps == steps and job.sequences is None:
        return job
    split, num_micro_batches = job.parallelism, job.training.gradient_accumulation_steps
    if split.pipeline > 1 and steps < num_micro_batches:
        split = replace(split, buffered_micro_batches=num_micro_batches // split.passes)
    training = replace(job.training, gradient_accumulation_steps=steps)
    return replace(job, training=training, parallelism=split, sequences=None)
