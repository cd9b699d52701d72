"""The report of a step of which some micro-batches were simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import SimulatedStep
from zsim.engine.simulate import Outcome
from zsim.explain.pipeline import pipeline_of, traced_step_of
from zsim.explain.variants import HostRange, Variants, offload_range, step_variants
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest_gpu
from zsim.plan.memory.tensors import bytes_at_peak, plan_peaks
from zsim.report.breakdown import Breakdown, weighted_sums
from zsim.report.irregular import RankRow
from zsim.report.memory import over_limit
from zsim.report.offload import TierRow
from zsim.report.pipeline import PipelineSection
from zsim.report.report import Report, TracedStep
from zsim.report.traffic import CollectiveRow, SentRow, TrafficRow, collective_rows, overlap_seconds

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
        return step_variants(step.outcome, has_range=has_range)
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
