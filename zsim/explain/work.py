"""Tokens, FLOPs and kernels of a step."""

from __future__ import annotations

import numpy as np

from zsim.cost.flops import hardware_flops_per_token, model_flops_per_token
from zsim.cost.rates.power import GpuActivity, kernel_activity
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Kernels, Plan
from zsim.report.report import StepWork
from zsim.specs.experiment.job import Job

FLOPS_CONVENTION = "6N + 12LdS per token, N with embeddings"


def step_work(job: Job) -> StepWork:
    """Tokens and FLOPs of one GPU's step."""
    training = job.training
    tokens = training.micro_batch_tokens * training.gradient_accumulation_steps
    if job.sequences is not None:
        tokens = round(job.sequences * training.sequence_length)
    length = training.sequence_length
    policies = [training.checkpointing_of(number) for number in range(len(job.model.blocks))]
    hardware = hardware_flops_per_token(job.model, length, policies)
    peak: float | None = getattr(job.cluster.gpu.peak, training.precision)
    model = model_flops_per_token(job.model, length)
    return StepWork(
        tokens, tokens * model, tokens * hardware, peak, FLOPS_CONVENTION, peak_dtype=training.precision
    )


def kernel_activity_of(job: Job, plan: Plan) -> GpuActivity:
    """Seconds of a step's compute-stream kernels by limiting resource, as mean over all GPUs; every distinct
    work is evaluated once."""
    known: dict[int, GpuActivity] = {}
    totals = [0.0] * len(GpuActivity._fields)
    ranks = np.bincount(plan.program_of, minlength=len(plan.programs)) / plan.world_size
    for program, fraction in zip(plan.programs, ranks.tolist(), strict=True):
        for op in program.ops:
            if op.stream == COMPUTE and isinstance(op.work, Kernels):
                activity = known.get(id(op.work))
                if activity is None:
                    activity = known[id(op.work)] = kernel_activity(op.work.kernels, job.cluster.gpu)
                for index, part in enumerate(activity):
                    totals[index] += part * fraction
    return GpuActivity(*totals)
