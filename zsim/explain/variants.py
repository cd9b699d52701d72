"""Further simulations of a step, under other assumptions about overlap, queues, hosts and offloading."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from zsim.cost.rates.host_calls import HostCosts, host_seconds, shipped_host_costs
from zsim.engine.simulate import Outcome, resimulate_seconds, resimulate_with_hosts, simulate_job
from zsim.operations.experts import Experts
from zsim.plan.columns import op_columns
from zsim.plan.ops import Collective, OffloadWork, Plan, PointToPoint, Program
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.report.framework import report_role
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.host_speeds import host_speeds
from zsim.specs.cluster.spreads import End as SpreadEnd
from zsim.specs.cluster.spreads import load_spreads, scale_host_speeds, scale_offload_rates
from zsim.specs.cluster.table import Evidence
from zsim.specs.experiment.job import Job
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.strategy.expert_degrees import assume_loads
from zsim.specs.strategy.experts import End
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.units import format_seconds
from zsim.validated.validation import format_range

_KNOWN: tuple[Evidence, ...] = ("measured", "calibrated")
_LEAST = 0.01  # of the step; hosts that move it by less do not bind it
_NEAR = 0.9  # of the step; the slowest host that issues for less is taken not to bind it


_Issue = tuple[str | None, int, int]  # overhead, events and launches of an op


@dataclass(frozen=True, slots=True)
class HostRange:
    """Seconds of the step with hosts at both ends of how far hosts of one kind differ."""

    fast_seconds: float
    """With hosts at the fast end."""
    slow_seconds: float
    """With hosts at the slow end."""
    factors: tuple[float, float]
    """The factors of both ends on a host's time."""
    issue_seconds: float
    """Seconds in which the busiest rank's host issues the step's work."""
    cpu: str
    """The processors that the cluster names."""

    def note(self, bound_fraction: float) -> str:
        """The host that is taken, and what depends on it. `bound_fraction` is the fraction of the step that
        waits for it.
        """
        low, high = self.factors
        issued, step = (
            format_seconds(self.issue_seconds),
            format_range((self.fast_seconds, self.slow_seconds)),
        )
        return (
            f"the host ({self.cpu}, not measured) issues the step's work in {issued}, and "
            f"{bound_fraction:.0%} of the step waits for it; hosts of one kind of machine take {low:g} to "
            f"{high:g} times as long, and the step then {step}, which the range counts (cluster.host.cpu "
            "names another CPU, `zsim calibrate` reads measurements of one)"
        )


def host_range(outcome: Outcome) -> HostRange | None:
    """The step with its hosts at both ends of their range of speeds.

    None where the step waits for them at neither end, where their speed was measured, on a CPU's ranks, and
    with jitter or other jobs.

    A host that has issued everything before the GPU is done, and would have at its slow end, is not simulated
    again. When it is slower by a factor f, it holds the step up by at most (f - 1) H, where H is the seconds
    in which it issues.
    """
    job = outcome.job
    hosts = job.cluster.hosts
    is_known = all(host.evidence in _KNOWN or not host.seconds_per_launch for host in hosts)
    if is_known or outcome.jitter_run is not None or outcome.concurrent_jobs:
        return None
    speeds, step = host_speeds().spread, outcome.trace.step_seconds
    issued = max(issue_seconds(outcome.plan, host, shipped_host_costs()) for host in hosts)
    if speeds.slow * issued < _NEAR * step:
        return None
    slow = max(step, _seconds_at(outcome, "slow"))
    if slow < (1 + _LEAST) * step:
        return None
    fast = min(step, _seconds_at(outcome, "fast"))
    cpus = " + ".join(dict.fromkeys(host.cpu or "a CPU without a name" for host in hosts))
    return HostRange(fast, slow, (speeds.fast, speeds.slow), issued, cpus)


def issue_seconds(plan: Plan, host: HostDevice, costs: HostCosts) -> float:
    """Seconds in which the busiest rank's host issues a step's ops."""
    return max(
        sum(number * host_seconds(*issue, host, costs) for issue, number in program.memoize(_issues).items())
        for program in plan.programs
    )


def _issues(program: Program) -> Counter[_Issue]:
    columns = program.memoize(op_columns)
    return Counter(zip(columns.overhead, columns.events, columns.launches, strict=True))


def _seconds_at(outcome: Outcome, end: SpreadEnd) -> float:
    return resimulate_with_hosts(outcome, scale_host_speeds(outcome.job.cluster, end))


_MAX_OPS = 20_000  # maximum; a longer plan is not simulated twice more


def step_seconds_without_overlap(outcome: Outcome) -> float | None:
    """Seconds of the step with kernels and collectives one after the other. None where the overlap is not in
    doubt.

    # [Note: overlap in doubt]
    Published runs of DeepSpeed over several nodes take longer than its schedule implies: 21 of 29 are nearer
    to a step without overlap, and the cause is not known (validation/published/README.md). Until zsim is
    within 10 % of these runs, the report of such a job gives the step without overlap too.
    """
    job = outcome.job
    if not report_role(job.kind).doubts_overlap(job, job.strategy) or _is_drawn(outcome):
        return None
    if not any(isinstance(work, Collective | PointToPoint) for work in outcome.plan.unique_work()):
        return None
    return resimulate_seconds(outcome, is_serial=True)


def unshared_queue_seconds(outcome: Outcome) -> float | None:
    """Seconds of the step with CUDA's default number of hardware queues.

    None where no streams share a queue, and where co-located jobs or jitter change the step as well.
    """
    job = outcome.job
    connections = job.training.device_max_connections
    programs = outcome.plan.programs
    is_shared = any(program.memoize(program_next_in_queue, connections) is not None for program in programs)
    if not is_shared or _is_drawn(outcome):
        return None
    return resimulate_seconds(outcome, connections=DEFAULT_CONNECTIONS)


def _is_drawn(outcome: Outcome) -> bool:
    return bool(outcome.concurrent_jobs) or outcome.jitter_run is not None


@dataclass(frozen=True, slots=True)
class Variants:
    """Seconds of the same step under other assumptions, None where these do not apply."""

    without_overlap: float | None = None
    unshared_queues: float | None = None
    offload_range: tuple[float, float] | None = None
    hosts: HostRange | None = None
    routing: tuple[float, float] | None = None
    """The step with even and with uneven loads of experts."""
    notes: tuple[str, ...] = ()
    """Why a variant is missing, and what one assumes."""

    @property
    def host_seconds(self) -> tuple[float, float] | None:
        """Seconds of the step with hosts at the fast and at the slow end."""
        return None if self.hosts is None else (self.hosts.fast_seconds, self.hosts.slow_seconds)


def step_variants(outcome: Outcome, *, has_range: bool = True) -> Variants:
    """Simulate the step again: without overlap, with CUDA's default number of hardware queues, with faster
    and slower hosts where it waits for them and, with `has_range`, with offloading as fast and as slow, and
    routing as even and as uneven, as it may be."""
    without_overlap, unshared_queues = (
        step_seconds_without_overlap(outcome),
        unshared_queue_seconds(outcome),
    )
    variants = Variants(without_overlap, unshared_queues, hosts=host_range(outcome))
    if not has_range:
        return variants
    variants = replace(variants, routing=routing_range(outcome))
    if not outcome.plan.has_offload:
        return variants
    note = no_range_note(outcome)
    if note is not None:
        return replace(variants, notes=(note,))
    faster = report_role(outcome.job.kind).faster_offloading(outcome.job, outcome.job.strategy)
    return replace(
        variants,
        offload_range=offload_range(outcome),
        notes=() if faster is None else (faster[1],),
    )


def routing_range(outcome: Outcome) -> tuple[float, float] | None:
    """Seconds of the step with loads as even and as uneven as was seen.

    None where loads are given or do not count, and where two more simulations are too long or not of this
    step alone.
    """
    job = outcome.job
    split, experts = job.parallelism.experts, stacked_experts(job.model)
    counts = split.ranks > 1 or split.library.pads_to_fullest
    is_assumed = split.deviation > 0 and counts and not split.pads_to_capacity
    is_isolated = outcome.jitter_run is None and not outcome.concurrent_jobs
    if experts is None or not is_assumed or not is_isolated or outcome.plan.num_ops > _MAX_OPS:
        return None
    unfold = outcome.stats.rank_classes == job.world_size
    even, uneven = (
        simulate_job(_set_expert_loads(job, experts, end), unfold=unfold).trace.step_seconds
        for end in ("low", "high")
    )
    return even, uneven


def _set_expert_loads(job: Job, experts: Experts, end: End) -> Job:
    split = assume_loads(job.parallelism.experts, experts, end)
    return replace(job, parallelism=replace(job.parallelism, experts=split))


def offload_range(outcome: Outcome) -> tuple[float, float] | None:
    """Seconds of the step with all inputs of offloading at their fast ends, and at their slow ends. What the
    job leaves open about offloading (`FrameworkReport.faster_offloading`) is as fast as may be at the fast
    end.

    None where nothing is offloaded, or for the reason in `no_range_note`.
    """
    job, plan = outcome.job, outcome.plan
    if no_range_note(outcome) is not None:
        return None
    if not any(isinstance(work, OffloadWork) for work in plan.unique_work()):
        return None
    spreads, unfold = load_spreads(), outcome.stats.rank_classes == job.world_size
    fast, slow = (
        replace(job, cluster=scale_offload_rates(job.cluster, end, spreads)) for end in ("fast", "slow")
    )
    faster = report_role(job.kind).faster_offloading(job, job.strategy)
    if faster is not None:
        fast = replace(fast, strategy=faster[0])
    ends = (fast, plan if faster is None else None), (slow, plan)
    fast_seconds, slow_seconds = (
        simulate_job(end, unfold=unfold, plan=end_plan).trace.step_seconds for end, end_plan in ends
    )
    return fast_seconds, slow_seconds


def no_range_note(outcome: Outcome) -> str | None:
    """A note on why an offloaded step is not simulated at both ends. None where it is simulated.

    The reasons are that the step is drawn with jitter, that it shares the cluster, or that its plan is too
    long for two more simulations.
    """
    if outcome.jitter_run is not None:
        why = "the step is drawn with jitter"
    elif outcome.concurrent_jobs:
        why = "other jobs share the cluster"
    elif outcome.plan.num_ops > _MAX_OPS:
        why = f"its plan of {outcome.plan.num_ops:,} ops is too long to be run twice more"
    else:
        return None
    return (
        f"no range is given for the offloaded step: {why}; zsim sensitivity turns PCIe, host memory, CPU and "
        "drives one at a time"
    )
