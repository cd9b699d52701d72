"""A step whose micro-batches are not all simulated.

# [Note: middle micro-batches are alike]
The first micro-batch of a step finds an idle machine, and the last reduces gradients; what lies between
repeats. So a step of many takes what one of three does, and for each one more what the third added to a step
of two; a smaller last one adds what one of its size does. The peak of memory is that of three. Where torch's
allocator runs short no two are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import floor

from zsim.engine.simulate import Outcome, simulate_job
from zsim.errors import NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job

FEW = 3  # beyond so many the rest are taken to be like the last two of these
_FEW_SHORT = 8  # where the allocator runs short no two are alike: their mean
_SAME = 1e-6  # of a micro-batch


@dataclass(frozen=True)
class SimulatedStep:
    """The step of `job`, of `seconds`. `outcome` simulated its micro-batches, or some of them; whatever
    adds up over a step (seconds, joules) is the sum of that of `terms`, so many times each. `peak_plan` is
    the plan of as many micro-batches as reach the step's peak."""

    job: Job
    outcome: Outcome
    seconds: float
    terms: tuple[tuple[float, Outcome], ...]
    peak_plan: Plan

    @property
    def is_whole(self) -> bool:
        """Whether `outcome` is all of the step."""
        return self.job.sequences is None and self.micro_batches == self.outcome_micro_batches

    @property
    def micro_batches(self) -> int:
        """Of the step, a smaller last one included."""
        return self.job.training.gradient_accumulation_steps

    @property
    def outcome_micro_batches(self) -> int:
        """Of `outcome`."""
        return self.outcome.job.training.gradient_accumulation_steps

    @property
    def times_longer(self) -> float:
        """The step over `outcome`."""
        return self.seconds / self.outcome.trace.step_seconds

    @property
    def peak_bytes(self) -> int:
        """Highest GPU memory of rank 0."""
        return peak_bytes(self.job, self.peak_plan)

    @property
    def retries_per_micro_batch(self) -> float:
        """How often torch's allocator runs short."""
        found = self.outcome.allocation
        return 0.0 if found is None else found.counts.retries / self.outcome_micro_batches


Simulate = Callable[[Job], Outcome]


def simulate_step(job: Job, *, unfold: bool = False, simulate: Simulate | None = None) -> SimulatedStep:
    """One steady step, as `simulate_job`, of as many micro-batches as `[simulation]` asks for; `simulate` is
    what the study simulates its jobs by.

    Raises NotSimulatedError where steps are drawn or other jobs run beside, unless every micro-batch is
    simulated and whole.
    """
    run = simulate or partial(simulate_job, unfold=unfold)
    size, steps = job.training.micro_batch_size, job.training.gradient_accumulation_steps
    is_plain = job.sequences is None and (job.simulation.every_micro_batch or steps <= FEW)
    if is_plain:
        return _simulated(job, steps, run)
    if job.others or job.jitter is not None:
        what = (
            "simulation.every_micro_batch = false" if job.sequences is None else "a smaller last micro-batch"
        )
        raise NotSimulatedError(f"{what} beside other jobs or with jitter is not simulated yet")
    if job.sequences is None:
        return replace(_of(job, steps, run), job=job)
    whole = floor(job.sequences / size + 1e-9)
    rest = job.sequences - whole * size
    if rest < _SAME * size:
        return replace(_of(job, whole, run), job=job)
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
    if whole < FEW:  # beyond, one more leaves the peak as it is
        step = replace(step, peak_plan=make_plan(_with_steps(job, whole + 1)))
    return replace(step, job=job)


def longer(few: float, less: float, more: int) -> float:
    """What a step of FEW + `more` micro-batches takes, where FEW take `few` and FEW - 1 take `less`."""
    return few + more * (few - less)


def _of(job: Job, steps: int, run: Simulate) -> SimulatedStep:
    """A step of so many whole micro-batches. Where the allocator runs short no two of them are alike, and
    many are as many times the mean of some."""
    if job.simulation.every_micro_batch:
        return _simulated(job, steps, run)
    few = _simulated(job, min(steps, FEW), run)
    if steps <= FEW:
        return few
    if few.retries_per_micro_batch:
        count = min(steps, _FEW_SHORT)
        some = _simulated(job, count, run)
        seconds = some.seconds * steps / count
        return replace(some, seconds=seconds, terms=((steps / count, some.outcome),))
    less = _simulated(job, FEW - 1, run)
    more = steps - FEW
    seconds = longer(few.seconds, less.seconds, more)
    return replace(few, seconds=seconds, terms=((1.0 + more, few.outcome), (-float(more), less.outcome)))


def _simulated(job: Job, steps: int, run: Simulate) -> SimulatedStep:
    job = _with_steps(job, steps)
    outcome = run(job)
    return SimulatedStep(job, outcome, outcome.trace.step_seconds, ((1.0, outcome),), outcome.plan)


def _with_steps(job: Job, steps: int) -> Job:
    if job.training.gradient_accumulation_steps == steps and job.sequences is None:
        return job
    training = replace(job.training, gradient_accumulation_steps=steps)
    return replace(job, training=training, sequences=None)
