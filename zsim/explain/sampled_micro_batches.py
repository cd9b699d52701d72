"""The report of a step of which some micro-batches were simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zsim.engine.allocation import Allocation
from zsim.engine.micro_batches import SimulatedStep
from zsim.engine.simulate import Outcome
from zsim.explain.gpu_types import traced_step_of
from zsim.explain.pipeline import pipeline_of
from zsim.explain.variants import Variants
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest_gpu
from zsim.plan.memory.peaks import bytes_at_peak, plan_peaks
from zsim.report.breakdown import Breakdown
from zsim.report.memory import over_limit
from zsim.report.pipeline.section import PipelineSection
from zsim.report.report import Report, TracedStep


def full_step(step: SimulatedStep) -> TracedStep:
    """The simulated micro-batches as a traced step, with the breakdown and the seconds of the
    complete step.
    """
    traced = traced_step_of(step.outcome)
    breakdowns = [(factor, traced_step_of(outcome).breakdown) for factor, outcome in step.terms]
    breakdown = _weighted_breakdown(traced.breakdown, breakdowns)
    return replace(traced, breakdown=breakdown, full_seconds=step.seconds)


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
        seconds=_weighted_sums([(factor, breakdown.seconds) for factor, breakdown in breakdowns]),
        by_phase={
            phase: _weighted_sums(
                [(factor, breakdown.by_phase.get(phase, {})) for factor, breakdown in breakdowns]
            )
            for phase in simulated.by_phase
        },
    )


def _weighted_sums(terms: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted sums of (weight, values by name), by name. Negative sums become 0."""
    total: dict[str, float] = {}
    for factor, values in terms:
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + factor * value
    return {name: max(value, 0.0) for name, value in total.items()}


def scale_variants(variants: Variants, step: SimulatedStep) -> Variants:
    """The variants of the simulated micro-batches, scaled to the complete step."""
    factor = step.length_ratio
    return replace(
        variants,
        without_overlap=None if variants.without_overlap is None else variants.without_overlap * factor,
        unshared_queues=None if variants.unshared_queues is None else variants.unshared_queues * factor,
        offload_range=_scaled(variants.offload_range, factor),
        hosts=None if variants.hosts is None else variants.hosts.scale(factor),
        routing=_scaled(variants.routing, factor),
    )


def _scaled(ends: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return None if ends is None else (ends[0] * factor, ends[1] * factor)


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
        "theirs, "
        "the seconds are of the whole step"
    )
