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
from zsim.plan.memory.capacity import framework_memory, usable_bytes_of_fullest
from zsim.plan.memory.peaks import held_at_peak, plan_peaks
from zsim.report.breakdown import Breakdown
from zsim.report.memory import over_limit
from zsim.report.pipeline.section import PipelineSection
from zsim.report.report import Report, TracedStep


def whole_step(step: SimulatedStep) -> TracedStep:
    """The simulated micro-batches as a traced step, with the breakdown and the seconds of the
    complete step.
    """
    traced = traced_step_of(step.outcome)
    parts = [(times, traced_step_of(outcome).breakdown) for times, outcome in step.terms]
    breakdown = _whole_breakdown(traced.breakdown, parts)
    return replace(traced, breakdown=breakdown, whole_seconds=step.seconds)


def whole_allocation(step: SimulatedStep) -> Allocation | None:
    """torch's allocator over the complete step: as often short for a micro-batch as in the simulated ones."""
    found = step.outcome.allocation
    if found is None or not found.is_short:
        return found
    times, counts = step.times_longer, found.counts
    counts = replace(
        counts,
        retries=round(counts.retries * times),
        released=round(counts.released * times),
        segments=round(counts.segments * times),
    )
    return replace(found, counts=counts, extra_seconds=found.extra_seconds * times)


def whole_pipeline(step: SimulatedStep) -> PipelineSection | None:
    """The pipeline of the simulated micro-batches with breakdowns of the complete step. None without a
    pipeline.
    """
    shown = pipeline_of(step.outcome)
    if shown is None:
        return None
    parts = [(times, _section(outcome)) for times, outcome in step.terms]
    rows = tuple(
        replace(
            row,
            breakdown=_whole_breakdown(
                row.breakdown, [(times, part.rows[row.rank].breakdown) for times, part in parts]
            ),
        )
        for row in shown.rows
    )
    return replace(shown, rows=rows, step_seconds=step.seconds, micro_batches=step.micro_batches)


def _section(outcome: Outcome) -> PipelineSection:
    found = pipeline_of(outcome)
    assert found is not None, "fewer micro-batches of a pipeline are a pipeline"
    return found


def _whole_breakdown(shown: Breakdown, parts: Sequence[tuple[float, Breakdown]]) -> Breakdown:
    """The weighted sum of breakdowns by cause and phase. Its waits are those of `simulated`."""
    return replace(
        shown,
        seconds=_summed([(times, part.seconds) for times, part in parts]),
        by_phase={
            phase: _summed([(times, part.by_phase.get(phase, {})) for times, part in parts])
            for phase in shown.by_phase
        },
    )


def _summed(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted sums of (weight, values by name), by name. Negative sums become 0."""
    total: dict[str, float] = {}
    for times, values in parts:
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + times * value
    return {name: max(value, 0.0) for name, value in total.items()}


def lengthened(variants: Variants, step: SimulatedStep) -> Variants:
    """The variants of the simulated micro-batches, scaled to the complete step."""
    times = step.times_longer
    ends = variants.offload_range
    return replace(
        variants,
        without_overlap=None if variants.without_overlap is None else variants.without_overlap * times,
        own_queues=None if variants.own_queues is None else variants.own_queues * times,
        offload_range=None if ends is None else (ends[0] * times, ends[1] * times),
        hosts=None if variants.hosts is None else variants.hosts.times(times),
    )


def with_peak(report: Report, step: SimulatedStep) -> Report:
    """The report with the memory peak of the micro-batch in which it is reached, where that is not among the
    simulated ones."""
    plan, job = step.peak_plan, step.job
    if plan is step.outcome.plan:
        return report
    framework = {"framework": framework_memory(job, plan).bytes}
    by_category = {name: size for name, size in plan_peaks(plan).items() if name != "total"} | framework
    at_total: dict[str, int] = {**held_at_peak(plan), **framework}
    total = sum(at_total.values())
    peak = replace(report.peaks["gpu"], total=total, by_category=by_category, at_total=at_total)
    report = replace(report, peaks={**report.peaks, "gpu": peak})
    usable = usable_bytes_of_fullest(job, plan)
    if report.out_of_memory is None and total > usable:
        found = replace(over_limit("the last micro-batch", "gpu", total, usable), rank=report.rank)
        return replace(report, out_of_memory=found)
    return report


def few_note(step: SimulatedStep) -> str:
    """A note on which micro-batches were simulated, and which figures are of these only."""
    count, shown = step.micro_batches, step.outcome_micro_batches
    last = ", the last of them smaller" if step.job.sequences is not None else ""
    return (
        f"of {count:,} micro-batches{last}, {shown:,} are simulated: calls, traffic and trace are theirs, "
        "the seconds are of the whole step"
    )
