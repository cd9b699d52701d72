"""Waits for samples that are loaded more slowly than they are trained on."""

from __future__ import annotations

from dataclasses import replace

from zsim.report.report import TracedStep
from zsim.report.views.meanings import DATA_LOADING
from zsim.specs.experiment.data.loading import waiting_seconds
from zsim.specs.experiment.job import Job


def add_data_loading(job: Job, step: TracedStep) -> TracedStep:
    """The step with the seconds that it waits for its samples, as a part of its breakdown. It is unchanged
    without `[data]`.
    """
    table = job.experiment.data
    if table.samples_per_second_per_host is None:
        return step
    waits = waiting_seconds(table, job.training, job.gpus_per_node, job.parallelism.model_ranks, step.seconds)
    seconds = {**step.breakdown.seconds, DATA_LOADING: waits}
    return replace(
        step, full_seconds=step.seconds + waits, breakdown=replace(step.breakdown, seconds=seconds)
    )


def lengths_note(job: Job) -> list[str]:
    """A sentence on documents of different lengths. There is none without them."""
    lengths = job.training.lengths
    if lengths is None:
        return []
    padded = (
        f"{lengths.padding_fraction:.1%} of the tokens are padding"
        if lengths.padding_fraction
        else "no padding"
    )
    return [
        f"documents of different lengths: {padded}; a token's document has {lengths.span:,.0f} tokens in "
        f"the mean "
        f"of the slowest rank, which computes {lengths.slowest_over_mean:.3f} times what the mean one does"
    ]
