"""How far a predicted difference between two configurations is to be trusted.

# [Note: errors of a ratio]
The errors of two steps on one machine have the same sign and the same causes, so the error of their ratio is
smaller than either. It is measured on pairs of published runs of one source on one GPU that differ in one
setting: the difference of their two signed errors. Sources weigh the same, as in [Note: what an interval
assumes], and a setting that few sources vary borrows from all pairs (`BROADER`). A pair may be taken either
way round, so the interval of the ratio's logarithm is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import exp
from statistics import fmean

import numpy as np

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.validated.errors import BROADER, LEVEL, quantiles, weights_by_source
from zsim.validated.features import ALLOCATOR
from zsim.validated.runs import ValidatedRun, shipped_estimates

NO_DIFFERENCE = "no difference that zsim can tell"
ANY = "several settings"
SHORT = "torch's allocator runs short in one or both"

# The settings by which two runs of one model on one kind of GPU differ. The batch follows from the length
# and from the number of GPUs, and then does not count as a setting of its own.
SETTINGS: Mapping[str, Callable[[ValidatedRun], object]] = {
    "batch": lambda run: (run.settings.micro_batch_size, run.settings.gradient_accumulation_steps),
    "sequence length": lambda run: run.settings.sequence_length,
    "GPUs": lambda run: (run.features.nodes, run.features.gpus),
    "strategy": lambda run: run.features.strategy,
    "network": lambda run: (run.features.fabric, run.settings.network_gbps),
    "training": lambda run: run.settings.training,
}
_LEADING = ("sequence length", "GPUs")
KINDS = (*SETTINGS, SHORT, ANY)


def estimate_ratio_errors(runs: Sequence[ValidatedRun]) -> dict[str, float]:
    """By differing setting (`KINDS`), the bound that `LEVEL` of the errors of the ratio's logarithm do not
    exceed."""
    return _bounds(list(_pairs(runs)))


def _bounds(pairs: Sequence[Pair]) -> dict[str, float]:
    every = [pair for pair in pairs if pair.kind != SHORT]
    own = {kind: [pair for pair in pairs if pair.kind == kind] for kind in KINDS} | {ANY: every}
    return {kind: _quantile(own[kind], every) for kind in KINDS}


def bound_of(kinds: Iterable[str], bounds: Mapping[str, float]) -> float:
    """The bound for the settings (or `SHORT`) that differ: a difference in several is trusted no better than
    in each of them, and a difference in a setting that no pair varies, no better than in any setting."""
    names = list(kinds)
    if SHORT not in names and (kind := kind_of(names)) != ANY:
        return bounds[kind]
    single = names if set(names) <= {*SETTINGS, SHORT} else [*SETTINGS, *names]
    return max(bounds[name] for name in (ANY, *single) if name in bounds)


@dataclass(frozen=True, slots=True)
class RatioCoverage:
    """Coverage of the pairs that differ by `kind`: `bound` on the error of `LEVEL` of them, and the fraction
    within the bound of the other sources' pairs, over pairs and as the mean of sources."""

    kind: str
    pairs: int
    sources: int
    bound: float
    covered: float
    covered_by_source: float


def ratio_coverage(runs: Sequence[ValidatedRun]) -> list[RatioCoverage]:
    """The coverage of every kind, each source's pairs judged by those of the others; kinds without pairs are
    left out."""
    pairs = list(_pairs(runs))
    bounds = _bounds(pairs)
    inside: dict[str, dict[str, list[bool]]] = {}
    for source in sorted({pair.source for pair in pairs}):
        others = _bounds([pair for pair in pairs if pair.source != source])
        for pair in pairs:
            if pair.source == source:
                by_source = inside.setdefault(pair.kind, {})
                differ = (SHORT,) if pair.kind == SHORT else pair.settings
                by_source.setdefault(source, []).append(pair.error <= bound_of(differ, others))
    return [
        RatioCoverage(
            kind,
            sum(map(len, inside[kind].values())),
            len(inside[kind]),
            bounds[kind],
            fmean(covered for own in inside[kind].values() for covered in own),
            fmean(fmean(own) for own in inside[kind].values()),
        )
        for kind in KINDS
        if kind in inside
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of one source, model and GPU: the settings in which they differ, and the absolute error of the
    logarithm of their ratio."""

    kind: str
    source: str
    error: float
    settings: tuple[str, ...] = ()


def _pairs(runs: Sequence[ValidatedRun]) -> Iterator[Pair]:
    """All pairs; runs that differ in no setting are not a pair."""
    alike: dict[tuple[str, str, str], list[ValidatedRun]] = {}
    for run in runs:
        alike.setdefault((run.source, run.features.gpu, run.settings.model), []).append(run)
    for (source, _, _), group in alike.items():
        for one, other in combinations(group, 2):
            kinds = [name for name, value in SETTINGS.items() if value(one) != value(other)]
            if kinds:
                is_short = ALLOCATOR in (one.features.binding, other.features.binding)
                kind = SHORT if is_short else kind_of(kinds)
                yield Pair(kind, source, abs(one.error - other.error), tuple(kinds))


def kind_of(kinds: Iterable[str]) -> str:
    """The one of `KINDS` for settings that differ together."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 2 and "batch" in names and any(name in _LEADING for name in names):
        names.remove("batch")
    return names[0] if len(names) == 1 and names[0] in SETTINGS else ANY


def _quantile(own: Sequence[Pair], every: Sequence[Pair]) -> float:
    """The `LEVEL` quantile of the errors of `own` pairs, borrowing from `every` pair the more, the fewer
    sources `own` has."""
    values: list[Floats] = []
    weights: list[Floats] = []
    count = len({pair.source for pair in own})
    share = count / (count + BROADER)
    for pairs, part in ((own, share), (every, 1 - share)):
        if pairs and part:
            values.append(np.array([pair.error for pair in pairs]))
            weights.append(part * weights_by_source([pair.source for pair in pairs])[0])
    return quantiles(np.concatenate(values), np.concatenate(weights), (LEVEL,))[0] if values else 0.0


def ratio_range(ratio: float, kinds: Iterable[str]) -> tuple[float, float]:
    """The interval that contains the ratio of two steps with 80 %, where `kinds` of `SETTINGS` (or `SHORT`)
    differ."""
    bound = bound_of(kinds, shipped_estimates()["ratios"])
    return ratio * exp(-bound), ratio * exp(bound)


def can_tell(one_seconds: float, other_seconds: float, kinds: Iterable[str]) -> bool:
    """Whether the interval of the ratio excludes 1: whether zsim can tell which configuration is faster."""
    low, high = ratio_range(one_seconds / other_seconds, kinds)
    return not low <= 1.0 <= high
