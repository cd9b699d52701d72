"""Estimates the parts of a spread and the quantiles of errors in units of it (`zsim.validated.spread`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign, log, sqrt
from statistics import fmean, median, variance

import numpy as np

from zsim.arrays import Floats
from zsim.validated.extrapolation import RESPECTS, extrapolations
from zsim.validated.features import Features
from zsim.validated.runs import (
    LEVEL,
    MIN_SOURCES,
    REPEAT_ERROR,
    ValidatedRun,
    ValidatedRuns,
    are_blind_enough,
    exclude_source,
    quantiles,
)
from zsim.validated.spread import RESPECTS_OF_JOBS, SpreadEstimates, settings_left_open

# Of an error in the fits: a larger one tells of a setup that is not as it was taken to be, not of a respect
# of the job. The quantile counts it whole. It is a choice, on which little depends: with one blind source
# left out at a time, 76 to 78 % of rows lie within ranges of 26 to 27 % half width with 0.2, 0.25 and 0.4.
LARGEST = 0.25
# How alike runs of a blind source are, as the intraclass correlation of whether an error is beyond 0.2: 0.36
# in the first 139 runs of 22 sources and in 283 of 49 (one-way analysis of variance; of their signed errors
# it is 0.7). A source of n runs tells of the quantile as much as n / (1 + (n - 1) 0.36) sources of one run
# (L. Kish, "Survey sampling", 1965, section 5.4).
ALIKE = 0.36
_SHRINKAGE = 0.3  # what a part needs, in sources and errors, before it counts; nothing holds back the first
_NAMES = (*RESPECTS_OF_JOBS, *RESPECTS)


def estimate_spread(
    runs: Sequence[ValidatedRun],
    vouching: Sequence[ValidatedRun] | None = None,
    open_settings: Mapping[str, float] | None = None,
) -> SpreadEstimates:
    """The estimates from runs with a stranger's error.

    A run extrapolates in the respects in which no run of another source vouches for it (`vouching`, by
    default `runs`): what such respects cost is what they cost on sources left out. Parts are not below zero,
    and fitted to absolute errors of at most `LARGEST` of the blind sources, every source alike. What no blind
    run has is fitted to the errors of the others that these parts leave. The ends are the quantile of the
    blind sources' absolute errors over spreads (`score_quantile`). All sources count as blind where fewer
    than `MIN_SOURCES` are. `open_settings` are taken as they are.
    """
    judged = [run for run in runs if run.stranger_error is not None]
    rows = respect_rows(judged, runs if vouching is None else vouching)
    return fit_rows(judged, rows, dict(open_settings or {}))


def respect_rows(judged: Sequence[ValidatedRun], vouching: Sequence[ValidatedRun]) -> Floats:
    """How much of each respect every run has, in the order of `RESPECTS_OF_JOBS` and `RESPECTS`."""
    others = {source: exclude_source(vouching, source) for source in {run.source for run in judged}}
    known: dict[tuple[str, Features], list[float]] = {}
    rows = []
    for run in judged:
        key = run.source, run.features
        if key not in known:
            known[key] = _respects(run, others[run.source])
        rows.append(known[key])
    return np.array(rows, dtype=np.float64).reshape(len(judged), len(_NAMES))


def _respects(run: ValidatedRun, others: ValidatedRuns) -> list[float]:
    job = run.features
    without = {part.respect: part.steps for part in extrapolations(job, others)}
    return [
        *(float(respect.holds(job)) for respect in RESPECTS_OF_JOBS.values()),
        *(without.get(name, 0.0) for name in RESPECTS),
    ]


def fit_rows(
    judged: Sequence[ValidatedRun], rows: Floats, open_settings: dict[str, float]
) -> SpreadEstimates:
    """The estimates from runs and their `respect_rows`.

    Runs to which numbers of zsim were fitted (role calibrate) tell of a new source no more than a model's
    errors on what it was trained on: the estimates leave them out, where there are others.
    """
    unseen = [index for index, run in enumerate(judged) if run.role != "calibrate"]
    if unseen:
        judged, rows = [judged[index] for index in unseen], rows[unseen]
    unexplained = mean_errors(judged)
    errors = np.array(
        [
            _less_inputs(run, run.error_for_others - unexplained.get(run.features.regime, 0.0))
            for run in judged
        ]
    )
    counts = Counter(run.source for run in judged)
    weights = np.array([1.0 / counts[run.source] for run in judged])
    by_blind = are_blind_enough(judged)
    judging = [index for index, run in enumerate(judged) if run.is_blind or not by_blind]
    sizes = np.minimum(np.abs(errors), LARGEST)
    shares = np.array(fit_parts(rows[judging], sizes[judging], weights[judging]))
    others = np.where(rows[judging].any(axis=0), 0.0, rows)
    shares += fit_parts(others, sizes - rows @ shares, weights)
    num = len(RESPECTS_OF_JOBS)
    estimates = SpreadEstimates(
        dict(zip(RESPECTS_OF_JOBS, shares[:num].tolist(), strict=True)),
        dict(zip(RESPECTS, shares[num:].tolist(), strict=True)),
        open_settings,
        -1.0,
        1.0,
        unexplained,
    )
    judged, rows, errors = [judged[index] for index in judging], rows[judging], errors[judging]
    spreads = np.maximum(rows @ shares, REPEAT_ERROR)
    opened = [
        sum(open_settings.get(name, 0.0) ** 2 for name in settings_left_open(run.features)) for run in judged
    ]
    high = score_quantile(errors / np.sqrt(spreads**2 + np.array(opened)), [run.source for run in judged])
    return replace(estimates, low=-high, high=high)


def _less_inputs(run: ValidatedRun, error: float) -> float:
    """The error without what the spread of the run's inputs explains of it, which an interval has in squares
    (`zsim.validated.validation.widen_for_input`)."""
    explained = log(run.input_slow if error > 0 else run.input_fast)
    return copysign(sqrt(max(0.0, error**2 - explained**2)), error)


def mean_errors(judged: Sequence[ValidatedRun]) -> dict[str, float]:
    """The mean of the median errors of each regime's sources, shrunk to zero as far as it may be chance
    (`zsim.validated.spread`). A median beyond `LARGEST` counts as `LARGEST`. Regimes whose mean is all
    chance, or of fewer than three sources, are left out.
    """
    errors: dict[str, dict[str, list[float]]] = {}
    for run in judged:
        errors.setdefault(run.features.regime, {}).setdefault(run.source, []).append(run.error_for_others)
    means = {}
    for regime, errors_per_source in sorted(errors.items()):
        of_sources = [max(-LARGEST, min(LARGEST, median(own))) for own in errors_per_source.values()]
        mean = fmean(of_sources)
        if len(of_sources) < MIN_SOURCES or not mean:
            continue
        share = 1 - variance(of_sources) / len(of_sources) / mean**2
        if share > 0:
            means[regime] = mean * share
    return means


def fit_parts(rows: Floats, errors: Floats, weights: Floats) -> list[float]:
    """The parts x, none below zero, that bring rows x nearest to the errors in weighted squares.

    By coordinate descent, which for least squares with x >= 0 ends at the one minimum (V. Franc, V. Hlavac
    and M. Navara, "Sequential coordinate-wise algorithm for the non-negative least squares problem", CAIP
    2005)."""
    scaled = rows * np.sqrt(weights)[:, None]
    shrinkage = np.full(rows.shape[1], _SHRINKAGE**2)
    shrinkage[0] = 1e-12
    gram = scaled.T @ scaled + np.diag(shrinkage)
    target = scaled.T @ (errors * np.sqrt(weights))
    parts = np.zeros(rows.shape[1])
    for _ in range(2000):
        before = parts.copy()
        for index in range(len(parts)):
            slope = gram[index] @ parts - target[index]
            parts[index] = max(0.0, parts[index] - slope / gram[index, index])
        if np.max(np.abs(parts - before)) < 1e-9:
            break
    return [float(part) for part in parts]


def score_quantile(scores: Floats, sources: Sequence[str]) -> float:
    """The size that `LEVEL` of the scores do not exceed. Of n scores of a source each weighs
    1 / (1 + (n - 1) `ALIKE`)."""
    counts = Counter(sources)
    weights = np.array([1.0 / (1.0 + (counts[source] - 1) * ALIKE) for source in sources])
    return quantiles(np.abs(scores), weights, (LEVEL,))[0]
