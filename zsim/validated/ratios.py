"""Errors of a predicted ratio of two configurations' steps.

# [Note: errors of a ratio]
The errors of two steps on one machine have the same sign and the same causes, so the error of their ratio is
smaller than either. It is measured on pairs of published runs of one source on one GPU that differ in one
setting, as the difference of their two signed errors. Sources weigh the same, as in [Note: what an interval
assumes], and a setting that few sources vary borrows from all pairs (`BROADER_CELL_WEIGHT`). Pairs in which
several ranks share a replica have larger errors than others, most of all where the batch differs, and are
estimated separately. A pair may be taken either way round, so the interval of the ratio's logarithm is
symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import exp
from statistics import fmean

import numpy as np

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.validated.errors import BROADER_CELL_WEIGHT, LEVEL, quantiles
from zsim.validated.features import ALLOCATOR, data_strategy
from zsim.validated.runs import ValidatedRun, shipped_estimates

NO_DIFFERENCE = "no difference that zsim can tell"
SEVERAL_SETTINGS = "several settings"
ALLOCATOR_SHORT = "torch's allocator runs short in one or both"

# The settings by which two runs of one model on one kind of GPU differ. The batch follows from the length,
# the number of GPUs and the degrees of parallelisms, and then does not count as a setting of its own.
SETTINGS: Mapping[str, Callable[[ValidatedRun], object]] = {
    "batch": lambda run: (run.settings.micro_batch_size, run.settings.gradient_accumulation_steps),
    "sequence length": lambda run: run.settings.sequence_length,
    "GPUs": lambda run: (run.features.nodes, run.features.gpus),
    "strategy": lambda run: data_strategy(run.features.strategy),
    "parallelism": lambda run: run.settings.degrees,
    "network": lambda run: (run.features.fabric, run.settings.network_gbps),
    "training": lambda run: run.settings.training,
}
_BATCH_DETERMINING = ("sequence length", "GPUs", "parallelism")
KINDS = (*SETTINGS, ALLOCATOR_SHORT, SEVERAL_SETTINGS)


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


def bound_of(kinds: Iterable[str], bounds: Mapping[str, float]) -> float:
    """The bound for the settings (or `ALLOCATOR_SHORT`) that differ.

    A difference in several is trusted no better than in each of them, and a difference in a setting that no
    pair varies, no better than in any setting.
    """
    names = list(kinds)
    if ALLOCATOR_SHORT not in names and (kind := kind_of(names)) != SEVERAL_SETTINGS:
        return bounds[kind]
    single = names if set(names) <= {*SETTINGS, ALLOCATOR_SHORT} else [*SETTINGS, *names]
    return max(bounds[name] for name in (SEVERAL_SETTINGS, *single) if name in bounds)


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


def kind_of(kinds: Iterable[str]) -> str:
    """The member of `KINDS` for settings that differ in combination."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 2 and "batch" in names and any(name in _BATCH_DETERMINING for name in names):
        names.remove("batch")
    return names[0] if len(names) == 1 and names[0] in SETTINGS else SEVERAL_SETTINGS


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


def shipped_bound(kinds: Iterable[str], *, is_shared: bool) -> float:
    """`bound_of` by the shipped pairs.

    With `is_shared` several ranks have a replica in one step or in both.
    """
    return bound_of(kinds, shipped_estimates()["shared_ratios" if is_shared else "ratios"])


def ratio_range(ratio: float, kinds: Iterable[str], *, is_shared: bool) -> tuple[float, float]:
    """The interval that contains the ratio of two steps with 80 %, where `kinds` of `SETTINGS` differ.

    `kinds` may also be `ALLOCATOR_SHORT`. With `is_shared` several ranks have a replica in one of the steps
    or in both.
    """
    bound = shipped_bound(kinds, is_shared=is_shared)
    return ratio * exp(-bound), ratio * exp(bound)


def is_ratio_significant(
    first_seconds: float, second_seconds: float, kinds: Iterable[str], *, is_shared: bool
) -> bool:
    """Whether the interval of the ratio excludes 1, so that zsim can tell which configuration is faster."""
    low, high = ratio_range(first_seconds / second_seconds, kinds, is_shared=is_shared)
    return not low <= 1.0 <= high
