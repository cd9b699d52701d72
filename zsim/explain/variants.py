"""Further simulations of a step, under other assumptions about overlap, queues, hosts and offloading.

The report of a step of which some micro-batches were simulated is made of the simulated ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from zsim.cost.rates.host_calls import HostCosts, host_seconds, shipped_host_costs
from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import SimulatedStep
from zsim.engine.simulate import Outcome, resimulate_seconds, resimulate_with_hosts, simulate_job
from zsim.errors import ZsimError
from zsim.explain.pipeline import pipeline_of, traced_step_of
from zsim.operations.experts import Experts
from zsim.plan.columns import op_columns
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest_gpu
from zsim.plan.memory.tensors import bytes_at_peak, plan_peaks
from zsim.plan.ops import Collective, OffloadWork, Plan, PointToPoint, Program
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.report.breakdown import Breakdown, weighted_sums
from zsim.report.framework import report_role
from zsim.report.irregular import RankRow
from zsim.report.memory import over_limit
from zsim.report.offload import TierRow
from zsim.report.pipeline import PipelineSection
from zsim.report.report import Report, TracedStep
from zsim.report.traffic import CollectiveRow, SentRow, TrafficRow, collective_rows, overlap_seconds
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.host_speeds import host_speeds
from zsim.specs.cluster.spreads import End as SpreadEnd
from zsim.specs.cluster.spreads import load_spreads, scale_host_speeds, scale_offload_rates
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.software import ASSUMED_STACKED
from zsim.specs.lazy_model import Evidence
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
        issued = format_seconds(self.issue_seconds)
        step = format_range((self.fast_seconds, self.slow_seconds))
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
    experts_note: str = ""
    """The step with other routed experts, in place of the note that begins alike."""

    def replace_note(self, notes: Sequence[str]) -> tuple[str, ...]:
        """The notes with `experts_note` in its place."""
        note = self.experts_note
        return tuple(note if note and each.startswith(ASSUMED_STACKED) else each for each in notes)

    @property
    def host_seconds(self) -> tuple[float, float] | None:
        """Seconds of the step with hosts at the fast and at the slow end."""
        return None if self.hosts is None else (self.hosts.fast_seconds, self.hosts.slow_seconds)


def step_variants(outcome: Outcome, *, has_range: bool = True) -> Variants:
    """Simulate the step again: without overlap, with CUDA's default number of hardware queues, with faster
    and slower hosts where it waits for them and, with `has_range`, with offloading as fast and as slow, and
    routing as even and as uneven, as it may be."""
    without_overlap = step_seconds_without_overlap(outcome)
    variants = Variants(without_overlap, unshared_queue_seconds(outcome), hosts=host_range(outcome))
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
    even, uneven = (
        simulate_job(_set_expert_loads(job, experts, end)).trace.step_seconds for end in ("low", "high")
    )
    return even, uneven


def _set_expert_loads(job: Job, experts: Experts, end: End) -> Job:
    split = assume_loads(job.parallelism.experts, experts, end)
    return replace(job, parallelism=replace(job.parallelism, experts=split))


# Maximum for a note, some 5 s on one core: Mixtral 8x7B's 3,072 products are planned and simulated in 0.37 s.
# Qwen3 30B A3B has 73,728 of them, whose note would take longer than the rest of `zsim run`.
_MAX_EXPERT_OPS = 40_000


def _older_experts_note(outcome: Outcome) -> str:
    """The note on the assumed release, with the step of routed experts as transformers 4 runs them. Empty
    where something says the release, where the step is not simulated, or where older releases refuse the job.
    """
    job, experts = outcome.job, stacked_experts(outcome.job.model)
    note = next((note for note in job.notes if note.startswith(ASSUMED_STACKED)), "")
    if experts is None or not note:
        return ""
    passes = 4 * job.training.gradient_accumulation_steps  # forward, once more, and two products backward
    ops = 3 * experts.num_experts * len(job.model.blocks) * passes
    if ops > _MAX_EXPERT_OPS or outcome.jitter_run is not None or outcome.concurrent_jobs:
        return ""
    changes = training_of(job.kind).transformers_4_changes(job.experiment.strategy)
    try:
        older = resolve(change_experiment(job.experiment, changes))
        seconds = simulate_job(older).trace.step_seconds
    except ZsimError:  # a key that older releases lack
        return ""
    keys = ", ".join(f'{key} = "{value}"' for key, value in changes.items())
    return f"{note}; {format_seconds(seconds)} a step with {keys}"


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
    spreads = load_spreads()
    fast, slow = (
        replace(job, cluster=scale_offload_rates(job.cluster, end, spreads)) for end in ("fast", "slow")
    )
    faster = report_role(job.kind).faster_offloading(job, job.strategy)
    if faster is not None:
        fast = replace(fast, strategy=faster[0])
    ends = (fast, plan if faster is None else None), (slow, plan)
    fast_seconds, slow_seconds = (
        simulate_job(end, plan=end_plan).trace.step_seconds for end, end_plan in ends
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


Row = TypeVar("Row", CollectiveRow, TrafficRow, SentRow, TierRow, RankRow)


def full_step(step: SimulatedStep) -> TracedStep:
    """The simulated micro-batches as a traced step, with the breakdown and the seconds of the
    complete step. That of a loop also has its waits and its overlap.
    """
    traced_terms = [(factor, traced_step_of(outcome)) for factor, outcome in step.terms]
    traced = traced_terms[0][1]
    breakdown = _weighted_breakdown(
        traced.breakdown, [(factor, term.breakdown) for factor, term in traced_terms]
    )
    period = step.outcome.period
    if not step.is_loop or period is None:
        return replace(traced, breakdown=breakdown, full_seconds=step.seconds)
    begin, count = period.begins[traced.rank], step.micro_batches - step.outcome_micro_batches
    waits = traced.breakdown.waits.repeat(begin, begin + period.seconds, count)
    overlaps = [(factor, overlap_seconds(outcome.trace, traced.rank)) for factor, outcome in step.terms]
    hidden, total = (sum(factor * seconds[index] for factor, seconds in overlaps) for index in (0, 1))
    return replace(
        traced,
        breakdown=replace(breakdown, waits=waits),
        overlap_fraction=hidden / total if total > 0 else None,
        full_seconds=step.seconds,
    )


def full_collectives(step: SimulatedStep) -> tuple[CollectiveRow, ...]:
    """The collectives of all micro-batches of a loop."""
    return sum_rows(
        [
            (factor, collective_rows(outcome.trace, traced.rank, traced.breakdown.waits))
            for factor, outcome in step.terms
            for traced in [traced_step_of(outcome)]
        ],
        "kind", "group", "group_size", "bytes", "dtype",
    )  # fmt: skip


def sum_rows(terms: Sequence[tuple[float, Sequence[Row]]], *key_fields: str) -> tuple[Row, ...]:
    """The weighted sums of the numbers of rows that are the same but for these, in the order of the first
    term. `key_fields` tell what a row is of.
    """
    key_of = attrgetter(*key_fields)
    totals: dict[Any, dict[str, Any]] = {}
    for factor, rows in terms:
        for row in rows:
            total = totals.setdefault(key_of(row), {})
            for field in fields(row):
                value = getattr(row, field.name)
                if field.name not in key_fields and value is not None:
                    total[field.name] = total.get(field.name, 0) + factor * value
    return tuple(
        replace(
            row,
            **{
                name: round(total) if isinstance(getattr(row, name), int) else max(total, 0.0)
                for name, total in totals[key_of(row)].items()
            },
        )
        for row in terms[0][1]
    )


def full_allocation(step: SimulatedStep) -> Allocation | None:
    """torch's allocator over the complete step: as often short for a micro-batch as in the simulated ones."""
    allocation = step.outcome.allocation
    if allocation is None or not allocation.is_short:
        return allocation
    factor, counts = step.length_ratio, allocation.counts
    counts = replace(
        counts,
        retries=round(counts.retries * factor),
        released=round(counts.released * factor),
        segments=round(counts.segments * factor),
    )
    return replace(allocation, counts=counts, extra_seconds=allocation.extra_seconds * factor)


def full_pipeline(step: SimulatedStep) -> PipelineSection | None:
    """The pipeline of the simulated micro-batches with breakdowns of the complete step. None without a
    pipeline.
    """
    simulated = pipeline_of(step.outcome)
    if simulated is None:
        return None
    sections = [(factor, _pipeline_of_term(outcome)) for factor, outcome in step.terms]
    rows = tuple(
        replace(
            row,
            breakdown=_weighted_breakdown(
                row.breakdown, [(factor, section.rows[row.rank].breakdown) for factor, section in sections]
            ),
        )
        for row in simulated.rows
    )
    return replace(simulated, rows=rows, step_seconds=step.seconds, micro_batches=step.micro_batches)


def _pipeline_of_term(outcome: Outcome) -> PipelineSection:
    section = pipeline_of(outcome)
    assert section is not None, "fewer micro-batches of a pipeline are a pipeline"
    return section


def _weighted_breakdown(simulated: Breakdown, breakdowns: Sequence[tuple[float, Breakdown]]) -> Breakdown:
    """The weighted sum of breakdowns by cause and phase. Its waits are those of `simulated`."""
    return replace(
        simulated,
        seconds=weighted_sums([(factor, breakdown.seconds) for factor, breakdown in breakdowns]),
        by_phase={
            phase: weighted_sums(
                [(factor, breakdown.by_phase.get(phase, {})) for factor, breakdown in breakdowns]
            )
            for phase in simulated.by_phase
        },
    )


def full_variants(step: SimulatedStep, *, has_range: bool = True) -> Variants:
    """The variants of the complete step, see `step_variants`: sums of those of a loop's terms, or those of
    the simulated micro-batches, scaled.
    """
    if step.is_complete:
        variants = step_variants(step.outcome, has_range=has_range)
        return replace(variants, experts_note=_older_experts_note(step.outcome) if has_range else "")
    terms = step.terms if step.is_loop else ((step.length_ratio, step.outcome),)
    weighted = [(factor, step_variants(outcome, has_range=has_range)) for factor, outcome in terms]
    simulated = weighted[0][1]

    def total(value: Callable[[Variants], float | None]) -> float | None:
        values = [value(variants) for _, variants in weighted]
        seconds = [factor * number for (factor, _), number in zip(weighted, values, strict=True) if number]
        return sum(seconds) if len(seconds) == len(weighted) else None

    def end_of(name: str, end: int) -> Callable[[Variants], float | None]:
        return lambda variants: (getattr(variants, name) or (None, None))[end]

    def range_of(name: str) -> tuple[float, float] | None:
        low, high = (total(end_of(name, end)) for end in (0, 1))
        return None if low is None or high is None else (low, high)

    hosts, host_range = simulated.hosts, range_of("host_seconds")
    if hosts is not None and host_range is not None:
        issue_seconds = sum(
            factor * variants.hosts.issue_seconds for factor, variants in weighted if variants.hosts
        )
        hosts = HostRange(*host_range, hosts.factors, issue_seconds, hosts.cpu)
    return replace(
        simulated,
        without_overlap=total(lambda variants: variants.without_overlap),
        unshared_queues=total(lambda variants: variants.unshared_queues),
        offload_range=range_of("offload_range"),
        routing=range_of("routing"),
        hosts=hosts if host_range is not None else None,
    )


def full_offload_range(step: SimulatedStep) -> tuple[float, float] | None:
    """`offload_range` of the complete step."""
    terms = step.terms if step.is_loop else ((step.length_ratio, step.outcome),)
    ranges = [(factor, offload_range(outcome)) for factor, outcome in terms]
    fast, slow = (sum(factor * each[end] for factor, each in ranges if each is not None) for end in (0, 1))
    return None if any(each is None for _, each in ranges) else (fast, slow)


def add_memory_peak(report: Report, step: SimulatedStep) -> Report:
    """The report with the memory peak of the micro-batch in which it is reached, where that is not among the
    simulated ones."""
    plan, job = step.peak_plan, step.job
    if plan is step.outcome.plan:
        return report
    framework = {"framework": framework_memory(job, plan).bytes}
    by_category = {name: size for name, size in plan_peaks(plan).items() if name != "total"} | framework
    at_total: dict[str, int] = {**bytes_at_peak(plan), **framework}
    total = sum(at_total.values())
    peak = replace(report.peaks["gpu"], total=total, by_category=by_category, at_total=at_total)
    report = replace(report, peaks={**report.peaks, "gpu": peak})
    usable = usable_bytes_of_fullest_gpu(job, plan)
    if report.out_of_memory is None and total > usable:
        finding = replace(over_limit("the last micro-batch", "gpu", total, usable), rank=report.rank)
        return replace(report, out_of_memory=finding)
    return report


def micro_batches_note(step: SimulatedStep) -> str:
    """A note on which micro-batches were simulated, and which figures are of these only."""
    count, num_simulated = step.micro_batches, step.outcome_micro_batches
    last = ", the last of them smaller" if step.job.sequences is not None else ""
    return (
        f"of {count:,} micro-batches{last}, {num_simulated:,} are simulated: calls, traffic and trace are "
        "theirs, the seconds are of the whole step"
    )
