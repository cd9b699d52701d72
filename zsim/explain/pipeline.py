"""A pipeline's outcome as the section of a report, and the rank that the report is of."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.engine.simulate import Outcome
from zsim.plan.node_types import pipeline_rank_of
from zsim.plan.pipeline.orders import stage_of
from zsim.report.breakdown import step_breakdown
from zsim.report.pipeline.bubbles import Bubbles
from zsim.report.pipeline.section import PipelineSection, pipeline_section
from zsim.report.report import TracedStep
from zsim.report.traffic import overlap_fraction
from zsim.specs.experiment.job import Job


def pipeline_of(outcome: Outcome) -> PipelineSection | None:
    """The section on the pipeline. None without a pipeline."""
    job, plan = outcome.job, outcome.plan
    layers = rank_layers(job)
    return pipeline_section(
        plan,
        outcome.trace,
        outcome.peers,
        layers=layers
        if len(layers) == 1 + max(pipeline_rank_of(plan, number) for number in range(len(plan.programs)))
        else (),
        connections=job.training.device_max_connections,
    )


def bubbles_of(outcome: Outcome) -> Bubbles:
    """The bubbles of all simulated ranks."""
    return Bubbles(outcome.plan, outcome.trace, outcome.peers, outcome.job.training.device_max_connections)


def rank_layers(job: Job) -> list[int]:
    """Number of layers on each pipeline rank. Empty without a pipeline."""
    parallelism = job.parallelism
    if not parallelism.layers_per_stage:
        return []
    ranks, chunks = range(parallelism.pipeline), range(parallelism.virtual_stages)
    return [
        sum(
            parallelism.layers_per_stage[stage_of(parallelism.schedule, parallelism.pipeline, rank, chunk)]
            for chunk in chunks
        )
        for rank in ranks
    ]


def seconds_by_cause(outcome: Outcome) -> Mapping[str, float]:
    """The breakdown of the outcome's step: of its first rank, or of a pipeline's slowest."""
    section = pipeline_of(outcome)
    breakdown = step_breakdown(outcome.trace) if section is None else section.slowest.breakdown
    return breakdown.seconds


def slowest_step(outcome: Outcome, section: PipelineSection) -> TracedStep:
    """The step as the slowest pipeline rank saw it."""
    row, trace = section.slowest, outcome.trace
    return TracedStep(trace, row.first_rank, row.breakdown, overlap_fraction(trace, row.first_rank))
