"""The error bar of an offloaded step: simulations with its inputs as fast and as slow as they may be."""

from __future__ import annotations

from dataclasses import replace

from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.ops import OffloadWork
from zsim.specs.cluster.spreads import load_spreads, scale_offload_rates

MAX_OPS = 20_000  # maximum; a longer plan is not simulated twice more


def offload_range(outcome: Outcome) -> tuple[float, float] | None:
    """Seconds of the step with all inputs of offloading at their fast ends, and at their slow ends.

    None where nothing is offloaded, or for the reason in `no_range_note`.
    """
    job, plan = outcome.job, outcome.plan
    if no_range_note(outcome) is not None:
        return None
    if not any(isinstance(work, OffloadWork) for work in plan.unique_work()):
        return None
    spreads = load_spreads()
    fast, slow = (
        simulate_job(
            replace(job, cluster=scale_offload_rates(job.cluster, end, spreads)),
            unfold=outcome.stats.rank_classes == job.world_size,
            plan=plan,
        ).trace.step_seconds
        for end in ("fast", "slow")
    )
    return fast, slow


def no_range_note(outcome: Outcome) -> str | None:
    """A note on why an offloaded step is not simulated at both ends. None where it is simulated.

    The reasons are that the step is drawn with jitter, that it shares the cluster, or that its plan is too
    long for two more simulations.
    """
    if outcome.jitter_run is not None:
        why = "the step is drawn with jitter"
    elif outcome.concurrent_jobs:
        why = "other jobs share the cluster"
    elif outcome.plan.num_ops > MAX_OPS:
        why = f"its plan of {outcome.plan.num_ops:,} ops is too long to be run twice more"
    else:
        return None
    return (
        f"no range is given for the offloaded step: {why}; zsim sensitivity turns PCIe, host memory, CPU and "
        "drives one at a time"
    )
