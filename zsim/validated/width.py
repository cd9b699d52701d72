"""The reasons for an interval's width: the addition of each part of its spread, and what the width does not
count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, expm1

from zsim.units import format_count
from zsim.validated.features import Features
from zsim.validated.ratios import shipped_bound
from zsim.validated.runs import (
    FIRST_DISSIMILAR_CELL,
    FRAMEWORK_CELL,
    ValidatedRun,
    are_blind_enough,
    validated_runs,
)
from zsim.validated.spread import ANY, SpreadEstimates, spread_estimates, spread_of, spread_parts
from zsim.validated.validation import Validation, widen_for_input

_DTYPES = (
    ("fp8", r"fp8"),
    ("fp4", r"fp4"),
    ("bf16", r"bf16"),
    ("fp16", r"fp16|\bfp 16"),
    ("fp32", r"fp32|tf32"),
)


@dataclass(frozen=True, slots=True)
class WidthStage:
    """The interval after a stage, as multiples of the predicted step, and the reason in words."""

    low: float
    high: float
    why: str


def width_stages(
    job: Features,
    runs: Sequence[ValidatedRun] | None = None,
    estimates: SpreadEstimates | None = None,
) -> tuple[WidthStage, ...]:
    """The stages of the job's interval: with what any run costs, and with each further part of its spread.

    The last one is that of `zsim.validated.validation.validation_of`.
    """
    runs = validated_runs() if runs is None else runs
    estimates = spread_estimates() if estimates is None else estimates
    components = spread_parts(job, runs, estimates)
    stages = []
    for count, part in enumerate(components, start=1):
        spread = spread_of(components[:count])
        ends = estimates.ends(job, spread)
        stages.append(_stage(ends, part.sentence + _describe_errors(part.name, runs)))
    return tuple(stages)


def _describe_errors(part: str, runs: Sequence[ValidatedRun]) -> str:
    """Whose errors the part is made of. Empty but for what any run costs."""
    if part != ANY:
        return ""
    judged = [run for run in runs if run.stranger_error is not None]
    how = "each as a stranger would have written it"
    if are_blind_enough(judged):
        judged, how = [run for run in judged if run.is_blind], "predicted before anything was known of them"
    count, sources = len(judged), len({run.source for run in judged})
    return f", by the errors of {format_count(count, 'run')} of {format_count(sources, 'source')}, {how}"


def input_stages(validation: Validation) -> tuple[WidthStage, ...]:
    """The stages that the spread of the job's inputs adds to those of `width_stages`."""
    stages: list[WidthStage] = []
    ends = width_stages(validation.features)[-1]
    narrowed = replace(validation, inputs=(), low=ends.low, high=ends.high)
    for input_spread in validation.inputs:
        narrowed = widen_for_input(narrowed, input_spread)
        words = (
            f"by how fast {input_spread.what} may be: {input_spread.fast:.2f} to {input_spread.slow:.2f} "
            "times the step"
        )
        stages.append(WidthStage(narrowed.low, narrowed.high, words))
    return tuple(stages)


def _stage(ends: tuple[float, float], why: str) -> WidthStage:
    return WidthStage(exp(ends[0]), exp(ends[1]), why)


def describe_cell(job: Features, cell: int) -> str:
    """The runs of a cell of the job in words: "DeepSpeed over several nodes"."""
    where = "over several nodes" if job.is_several else "on one node"
    if cell > FRAMEWORK_CELL + 1:
        return "all runs"
    if cell == FRAMEWORK_CELL + 1:
        return f"runs of any framework {where}"
    words = f"{job.framework} {where}"
    if cell < FIRST_DISSIMILAR_CELL:
        words += f", {job.strategy}"
        words += ", of a mixture of experts" if job.is_mixture else ""
    if cell == 0:
        words += f", on {job.chip.upper()} bound by {job.binding}"
    return words


def uncounted_respects(
    job: Features,
    sequence_length: float | None,
    precision: str | None,
    runs: Sequence[ValidatedRun] | None = None,
) -> tuple[str, ...]:
    """Further respects in which no run vouches for the job, for which the interval is not widened.

    These are the length of the sequence (a run vouches up to twice its own) and the precision, each among the
    framework's runs.
    """
    runs = validated_runs() if runs is None else runs
    framework_runs = [run for run in runs if run.features.framework == job.framework]
    if not framework_runs:
        return ()
    sentences = []
    longest = max(run.settings.sequence_length for run in framework_runs)
    if sequence_length and sequence_length > 2 * longest:
        sentences.append(
            f"sequences of {sequence_length:,.0f}: the longest of a validated run of {job.framework} is "
            f"{longest:,}"
        )
    precisions = {dtype_of(run.settings.training) for run in framework_runs} - {""}
    if precision and precision not in precisions:
        sentences.append(
            f"{precision}: the validated runs of {job.framework} are in {', '.join(sorted(precisions))}"
        )
    return tuple(sentences)


def dtype_of(training: str) -> str:
    """The precision in the words of a run's `training` settings. Empty where they do not say."""
    first = training.partition(",")[0].lower()
    return next((name for name, pattern in _DTYPES if re.search(pattern, first)), "")


def ratio_bound(kinds: Sequence[str], *, is_shared: bool) -> float:
    """The error of the ratio of two steps that differ in `kinds`, for 80 % of published pairs, as a fraction.

    `kinds` are of `zsim.validated.ratios.SETTINGS`. With `is_shared` only pairs count in which several ranks
    share a replica.
    """
    return expm1(shipped_bound(kinds, is_shared=is_shared))
