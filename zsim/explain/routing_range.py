"""The range of routers in a step's range: simulations with loads of experts as even, and as uneven, as was
seen.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.engine.simulate import Outcome, simulate_job
from zsim.explain.offload_range import MAX_OPS
from zsim.specs.experiment.job import Job
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.strategy.expert_degrees import assume_loads
from zsim.specs.strategy.expert_loads import End


def routing_range(outcome: Outcome) -> tuple[float, float] | None:
    """Seconds of the step with loads as even and as uneven as was seen.

    None where loads are given or do not count, and where two more simulations are too long or not of this
    step alone.
    """
    job = outcome.job
    split, experts = job.parallelism.experts, stacked_experts(job.model)
    is_assumed = split.deviation > 0 and split.ranks > 1 and not split.pads_to_capacity
    is_isolated = outcome.jitter_run is None and not outcome.concurrent_jobs
    if experts is None or not is_assumed or not is_isolated or outcome.plan.num_ops > MAX_OPS:
        return None
    unfold = outcome.stats.rank_classes == job.world_size
    even, uneven = (
        simulate_job(_set_expert_loads(job, experts.num_experts, end), unfold=unfold).trace.step_seconds
        for end in ("low", "high")
    )
    return even, uneven


def _set_expert_loads(job: Job, num_experts: int, end: End) -> Job:
    split = assume_loads(job.parallelism.experts, num_experts, end)
    return replace(job, parallelism=replace(job.parallelism, experts=split))
