"""Coverage of the intervals: the fraction of measured steps that they contain, each source judged by the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1
from statistics import fmean, median

from validation.published.spread_fit import fit_rows, respect_rows
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, exclude_source
from zsim.validated.spread import SpreadEstimates
from zsim.validated.validation import InputSpread, Validation, validation_of, widen_for_input


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run, and its validation by the runs of other sources."""

    run: ValidatedRun
    validation: Validation

    @property
    def error(self) -> float:
        """ln(measured / predicted), as a stranger would have predicted it."""
        return self.run.error_for_others

    @property
    def is_covered(self) -> bool:
        return self.validation.low <= exp(self.error) <= self.validation.high

    @property
    def is_above(self) -> bool:
        """Whether the measured step was longer than the interval has it."""
        return exp(self.error) > self.validation.high

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a fraction of the predicted step."""
        return (self.validation.high - self.validation.low) / 2


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of some runs, and the errors (predicted over measured, less one), over rows and as the mean of
    sources.
    """

    rows: int
    sources: int
    covered: float
    """The fraction of rows within their interval."""
    covered_by_source: float
    """The same as the mean of sources."""
    above: float
    """The fraction of rows above their interval."""
    half_width: float
    """The median of half of the interval's width, as a fraction of the predicted step."""
    mean_absolute_error: float
    mean_absolute_error_by_source: float
    bias: float
    bias_by_source: float
    worst_absolute_error: float


def leave_one_source_out(
    runs: Sequence[ValidatedRun], open_settings: Mapping[str, float] | None = None
) -> list[JudgedRun]:
    """Every run that was predicted as a stranger's, with its validation by what the other sources alone tell:
    which runs vouch, what respects cost, and how far errors lie apart."""
    strangers = [run for run in runs if run.stranger_error is not None]
    rows = respect_rows(strangers, runs)
    opened = dict(open_settings or {})
    judged = {}
    for source in {run.source for run in strangers}:
        kept = [index for index, run in enumerate(strangers) if run.source != source]
        if not kept:
            continue
        estimates = fit_rows([strangers[index] for index in kept], rows[kept], opened)
        others = exclude_source(runs, source)
        own = [run for run in strangers if run.source == source]
        for judgement in judge_runs(own, others, estimates):
            judged[judgement.run.row_id] = judgement
    return [judged[run.row_id] for run in strangers if run.row_id in judged]


def judge_runs(
    judged: Iterable[ValidatedRun], runs: Sequence[ValidatedRun], estimates: SpreadEstimates
) -> list[JudgedRun]:
    """The runs with their validation by `runs`, which are of other sources: the interval that a report of
    each run gives, wider by the spreads of its inputs."""
    validations: dict[Features, Validation] = {}
    found = []
    for run in judged:
        if run.features not in validations:
            validations[run.features] = validation_of(run.features, runs, estimates)
        spread = InputSpread("its inputs", run.input_fast, run.input_slow)
        found.append(JudgedRun(run, widen_for_input(validations[run.features], spread)))
    return found


def coverage_of(
    judged: Iterable[JudgedRun], holds: Callable[[Features], bool] | None = None
) -> Coverage | None:
    """The coverage of the runs whose features satisfy `holds` (default: all), or None if there are none."""
    selected = [judgement for judgement in judged if holds is None or holds(judgement.run.features)]
    if not selected:
        return None
    errors = [expm1(-judgement.error) for judgement in selected]
    sources = [judgement.run.source for judgement in selected]
    covered = [float(judgement.is_covered) for judgement in selected]
    absolute = [abs(error) for error in errors]
    return Coverage(
        rows=len(selected),
        sources=len(set(sources)),
        covered=fmean(covered),
        covered_by_source=mean_of_sources(covered, sources),
        above=fmean(float(judgement.is_above) for judgement in selected),
        half_width=median(judgement.half_width for judgement in selected),
        mean_absolute_error=fmean(absolute),
        mean_absolute_error_by_source=mean_of_sources(absolute, sources),
        bias=fmean(errors),
        bias_by_source=mean_of_sources(errors, sources),
        worst_absolute_error=max(absolute),
    )


def mean_of_sources(values: Sequence[float], sources: Sequence[str]) -> float:
    """The mean of the sources' means: each source counts once, however many rows it has."""
    values_per_source: dict[str, list[float]] = {}
    for value, source in zip(values, sources, strict=True):
        values_per_source.setdefault(source, []).append(value)
    return fmean(fmean(source_values) for source_values in values_per_source.values())


def regime_title(features: Features) -> str:
    """Title of a regime, e.g. "FSDP, several nodes"."""
    return f"{features.framework}, {'several nodes' if features.is_several else 'one node'}"


def coverage_per_regime(judged: Sequence[JudgedRun]) -> dict[str, Coverage]:
    """The coverage by framework and number of nodes, in alphabetical order."""
    coverages = {}
    for title in sorted({regime_title(judgement.run.features) for judgement in judged}):
        coverage = coverage_of(
            judgement for judgement in judged if regime_title(judgement.run.features) == title
        )
        if coverage is not None:
            coverages[title] = coverage
    return coverages
