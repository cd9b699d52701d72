"""Estimates the errors of predicted ratios from pairs of published runs, see [Note: errors of a ratio]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

from zsim.arrays import Floats
from zsim.validated.features import ALLOCATOR
from zsim.validated.ratios import ALLOCATOR_SHORT, KINDS, SETTINGS, SEVERAL_SETTINGS, bound_of, kind_of
from zsim.validated.runs import BROADER_CELL_WEIGHT, LEVEL, ValidatedRun, quantiles


def estimate_ratio_errors(runs: Sequence[ValidatedRun], *, is_shared: bool | None = None) -> dict[str, float]:
    """The bound, by differing setting (`KINDS`), that `LEVEL` of the errors of the ratio's logarithm do not
    exceed.

    With `is_shared` only pairs count of which one has several ranks to a replica, or, where it is false, none
    has.
    """
    return _bounds_per_kind(_errors_per_source(_pairs(runs, is_shared)))


_ErrorsPerSource = Mapping[str, Mapping[str, Floats]]  # errors of pairs, by kind and source


def _errors_per_source(pairs: Iterable[RunPair]) -> _ErrorsPerSource:
    """The errors of the pairs of every kind. Those in `SEVERAL_SETTINGS` are all but the `ALLOCATOR_SHORT`
    ones.
    """
    errors_per_kind: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for pair in pairs:
        for kind in {pair.kind, pair.kind if pair.kind == ALLOCATOR_SHORT else SEVERAL_SETTINGS}:
            errors_per_kind[kind].setdefault(pair.source, []).append(pair.error)
    return {
        kind: {source: np.array(errors) for source, errors in source_errors.items()}
        for kind, source_errors in errors_per_kind.items()
    }


def _bounds_per_kind(errors: _ErrorsPerSource, excluded_source: str | None = None) -> dict[str, float]:
    """The bound of every kind, by the pairs of all sources but one."""
    remaining = {
        kind: [
            source_errors for source, source_errors in errors_per_source.items() if source != excluded_source
        ]
        for kind, errors_per_source in errors.items()
    }
    return {kind: _quantile(remaining[kind], remaining[SEVERAL_SETTINGS]) for kind in KINDS}


@dataclass(frozen=True, slots=True)
class RatioCoverage:
    """Coverage of the pairs that differ by `kind`."""

    kind: str
    pairs: int
    sources: int
    bound: float
    """The bound on the error of `LEVEL` of the pairs."""
    covered: float
    """The fraction of pairs within the bound of the other sources' pairs."""
    covered_by_source: float
    """The same as the mean of sources."""


def ratio_coverage(runs: Sequence[ValidatedRun], *, is_shared: bool | None = None) -> list[RatioCoverage]:
    """The coverage of every kind, each source's pairs judged by those of the others.

    Kinds without pairs are left out.
    """
    pairs = list(_pairs(runs, is_shared))
    errors = _errors_per_source(pairs)
    bounds = _bounds_per_kind(errors)
    bounds_per_source = {
        source: _bounds_per_kind(errors, source) for source in {pair.source for pair in pairs}
    }
    coverage_flags: dict[str, dict[str, list[bool]]] = {}
    for pair in pairs:
        differ = (ALLOCATOR_SHORT,) if pair.kind == ALLOCATOR_SHORT else pair.settings
        is_inside = pair.error <= bound_of(differ, bounds_per_source[pair.source])
        coverage_flags.setdefault(pair.kind, {}).setdefault(pair.source, []).append(is_inside)
    return [
        RatioCoverage(
            kind,
            sum(map(len, coverage_flags[kind].values())),
            len(coverage_flags[kind]),
            bounds[kind],
            fmean(
                covered
                for covered_of_source in coverage_flags[kind].values()
                for covered in covered_of_source
            ),
            fmean(fmean(covered_of_source) for covered_of_source in coverage_flags[kind].values()),
        )
        for kind in KINDS
        if kind in coverage_flags
    ]


@dataclass(frozen=True, slots=True)
class RunPair:
    """Two runs of one source, model and GPU."""

    kind: str
    source: str
    error: float
    """The absolute error of the logarithm of their ratio."""
    settings: tuple[str, ...] = ()
    """The settings in which they differ."""


def _pairs(runs: Sequence[ValidatedRun], is_shared: bool | None) -> Iterator[RunPair]:
    """All pairs, or those of which one has several ranks to a replica, or none has.

    Runs that differ in no setting are not a pair.
    """
    comparable_runs: dict[tuple[str, str, str], list[ValidatedRun]] = {}
    for run in runs:
        comparable_runs.setdefault((run.source, run.features.gpu, run.settings.model), []).append(run)
    for (source, _, _), group in comparable_runs.items():
        values = {id(run): [value(run) for value in SETTINGS.values()] for run in group}
        for first, second in combinations(group, 2):
            shared = first.features.is_shared or second.features.is_shared
            if is_shared not in (None, shared):
                continue
            settings = zip(SETTINGS, values[id(first)], values[id(second)], strict=True)
            kinds = tuple(name for name, value, second_value in settings if value != second_value)
            if kinds:
                is_short = ALLOCATOR in (first.features.binding, second.features.binding)
                kind = ALLOCATOR_SHORT if is_short else kind_of(kinds)
                yield RunPair(kind, source, abs(first.error - second.error), kinds)


def _quantile(selected: Sequence[Floats], all_pairs: Sequence[Floats]) -> float:
    """The `LEVEL` quantile of the errors of `selected` pairs, source by source.

    It borrows from `all_pairs` the more, the fewer sources `selected` has.
    """
    share = len(selected) / (len(selected) + BROADER_CELL_WEIGHT)
    values: list[Floats] = []
    weights: list[Floats] = []
    for sources, weight in ((selected, share), (all_pairs, 1 - share)):
        for errors in sources if weight else ():
            values.append(errors)
            weights.append(np.full(len(errors), weight / len(sources) / len(errors)))
    return quantiles(np.concatenate(values), np.concatenate(weights), (LEVEL,))[0] if values else 0.0
