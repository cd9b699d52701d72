"""The error bar of an offloaded step: simulated again with its inputs as fast and as slow as they may be."""

from __future__ import annotations

from dataclasses import replace

from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.ops import OffloadWork
from zsim.specs.spreads import load_spreads, offloading_at

MOST_OPS = 20_000  # a plan of more is not run twice again


def offload_range(outcome: Outcome) -> tuple[float, float] | None:
    """(seconds with everything that offloading uses fast, with all of it slow).

    None where nothing is offloaded, where other things are drawn or shared (jitter, other jobs), and for
    plans so long that two more runs would be felt.
    """
    job, plan = outcome.job, outcome.plan
    is_plain = outcome.jittered is None and not outcome.together
    if not is_plain or len(plan.ops) > MOST_OPS:
        return None
    if not any(isinstance(op.work, OffloadWork) for op in plan.ops):
        return None
    spreads = load_spreads()
    fast, slow = (
        simulate_job(
            replace(job, cluster=offloading_at(job.cluster, end, spreads)),
            unfold=outcome.stats.rank_classes == job.world_size,
            plan=plan,
        ).trace.step_seconds
        for end in ("fast", "slow")
    )
    return fast, slow
