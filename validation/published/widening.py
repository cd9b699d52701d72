"""Estimates how much wider intervals are to be where no validated run vouches for a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from zsim.arrays import Floats
from zsim.validated.errors import LEVEL, estimate_interval, quantiles
from zsim.validated.extrapolation import RESPECTS, ValidationRespect
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, ValidatedRuns, exclude_source


def estimate_widening(runs: Sequence[ValidatedRun]) -> dict[str, float]:
    """The factor on intervals by respect, which is at least 1.

    For each run, the runs of other sources that vouch for it in the respect are left out as well. Its error
    is measured in ends of the interval that the remaining runs give. `LEVEL` of these, with equal weight for
    every group and in it for every source, are below the factor.
    """
    factors = {}
    for name, respect in RESPECTS.items():
        scores = extrapolation_scores(runs, respect)
        weights = _group_weights(list(scores), respect)
        score_quantile = quantiles(np.array(list(scores.values())), weights, (LEVEL,))[0] if scores else 1.0
        factors[name] = max(1.0, score_quantile)
    return factors


def _group_weights(runs: Sequence[ValidatedRun], respect: ValidationRespect) -> Floats:
    """Weights that are equal for all groups, within a group for all sources, and within a source for all
    runs."""
    groups = [respect.group(run.features) for run in runs]
    pairs = Counter((group, run.source) for group, run in zip(groups, runs, strict=True))
    sources = Counter(group for group, _ in pairs)
    weights = [
        1.0 / (sources[group] * pairs[group, run.source]) for group, run in zip(groups, runs, strict=True)
    ]
    return np.array(weights)


def extrapolation_scores(
    runs: Sequence[ValidatedRun], respect: ValidationRespect | None = None
) -> dict[ValidatedRun, float]:
    """Each run's error as a multiple of the end of its interval, judged only by runs of other sources that do
    not vouch for it in the respect. Runs that lack the respect are missing."""
    scores: dict[ValidatedRun, float] = {}
    judges: dict[tuple[str, Features], ValidatedRuns] = {}
    others = {source: _OtherSources(exclude_source(runs, source)) for source in {run.source for run in runs}}
    for run in runs:
        key = (run.source, run.features)
        if key not in judges:
            judges[key] = others[run.source].runs_without(respect, run.features)
        if judges[key]:
            interval = estimate_interval(run.features, judges[key])[1]
            scores[run] = run.error / interval[run.error > 0]
    return scores


class _OtherSources:
    """The runs of other sources, and those of them that do not vouch for a part of a job."""

    def __init__(self, runs: ValidatedRuns) -> None:
        self._runs = runs
        self._runs_per_part: dict[Any, ValidatedRuns] = {}

    def runs_without(self, respect: ValidationRespect | None, job: Features) -> ValidatedRuns:
        """The runs that do not vouch for a job in a respect. None if the respect does not apply to it."""
        if respect is None:
            return self._runs
        if not respect.applies(job):
            return ValidatedRuns()
        part = respect.compared_part(job)
        if part not in self._runs_per_part:
            remaining = {features for features in self._runs.features if not respect.vouches(features, job)}
            self._runs_per_part[part] = ValidatedRuns(run for run in self._runs if run.features in remaining)
        return self._runs_per_part[part]
