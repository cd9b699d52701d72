"""How large a step the page simulates."""

from __future__ import annotations

from dataclasses import replace

from zsim.engine.micro_batches import sample_counts
from zsim.errors import NotSimulatedError, ZsimError
from zsim.plan.make import make_plan
from zsim.specs.experiment.job import Job

MAX_OPS = 1_000_000  # of all programs together; measured: 2.4 GB and half a minute for a GPT-2 under ZeRO-3
_MIN_COUNTED = 32  # micro-batches, up to which a step is not counted before it is simulated


def check_size(job: Job) -> None:
    """Raises NotSimulatedError for a step of more ops than the page simulates.

    Every micro-batch adds the same number of ops, so plans of one and of two give the number of all.
    """
    steps, ranks = job.training.gradient_accumulation_steps, job.parallelism.pipeline
    if steps <= _MIN_COUNTED or not job.simulation.every_micro_batch:
        return
    second, first = sample_counts(job)
    if first == second:  # of such a schedule time does not follow from few, but its number of ops does
        second, first = 2 * ranks, ranks
    try:
        first_ops, second_ops = _num_ops(job, first), _num_ops(job, second)
    except ZsimError:
        return  # the simulation says what is wrong
    count = first_ops + (second_ops - first_ops) * (steps - first) // (second - first)
    if count > MAX_OPS:
        raise NotSimulatedError(
            f"training.gradient_accumulation_steps: {steps:,} micro-batches are about {count:,} ops; the "
            f"page simulates up to {MAX_OPS:,}. With simulation.every_micro_batch = false, in other "
            "settings, a few are simulated and the rest taken to be alike; zsim run has no such bound"
        )


def _num_ops(job: Job, steps: int) -> int:
    short_job = replace(job, training=replace(job.training, gradient_accumulation_steps=steps))
    return sum(len(program.ops) for program in make_plan(short_job).programs)
