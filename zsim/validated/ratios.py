"""How far a difference between two configurations is to be trusted.

# [Note: errors of a ratio]
Two steps on one machine are off in the same direction for the same reasons, so their ratio is off by less
than either. How much is measured on pairs of published runs of one source on one GPU that differ in one
setting: the difference of their two signed errors. Sources weigh the same, as in [Note: what an interval
assumes], and a setting that few sources vary leans on all pairs (`BROADER`). A pair may be taken either
way round, so the interval of the ratio's logarithm is symmetric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import exp

import numpy as np

from zsim.validated.errors import BROADER, LEVEL, Floats, quantiles, weights_by_source
from zsim.validated.features import ALLOCATOR
from zsim.validated.runs import ValidatedRun, shipped_estimates

NO_DIFFERENCE = "no difference that zsim can tell"
ANY = "several settings"
SHORT = "torch's allocator runs short in one or both"

# The settings by which two runs of one model on one kind of GPU differ. The batch follows from the length
# and from the number of GPUs, and is no setting of its own then.
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
    """By what differs (`KINDS`), below what `LEVEL` of the errors of the ratio's logarithm are."""
    by_kind: dict[str, list[tuple[str, float]]] = {kind: [] for kind in KINDS}
    for kind, source, error in _pairs(runs):
        by_kind[kind].append((source, error))
    every = [pair for kind in KINDS if kind != SHORT for pair in by_kind[kind]]
    found = {}
    for kind in KINDS:
        own = by_kind[kind] if kind != ANY else every
        found[kind] = _quantile(own, every)
    return found


def _pairs(runs: Sequence[ValidatedRun]) -> Iterator[tuple[str, str, float]]:
    """(what differs, source, absolute error of the ratio's logarithm) of all pairs of one source, model and
    GPU; what differs only in time is no pair."""
    alike: dict[tuple[str, str, str], list[ValidatedRun]] = {}
    for run in runs:
        alike.setdefault((run.source, run.features.gpu, run.settings.model), []).append(run)
    for (source, _, _), group in alike.items():
        for one, other in combinations(group, 2):
            kinds = [name for name, value in SETTINGS.items() if value(one) != value(other)]
            if kinds:
                is_short = ALLOCATOR in (one.features.binding, other.features.binding)
                yield SHORT if is_short else kind_of(kinds), source, abs(one.error - other.error)


def kind_of(kinds: Iterable[str]) -> str:
    """One of `KINDS` for settings that differ together."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 2 and "batch" in names and any(name in _LEADING for name in names):
        names.remove("batch")
    return names[0] if len(names) == 1 else ANY


def _quantile(own: Sequence[tuple[str, float]], every: Sequence[tuple[str, float]]) -> float:
    """Of `own` pairs, leaning on `every` one as far as few sources have their like."""
    values: list[Floats] = []
    weights: list[Floats] = []
    count = len({source for source, _ in own})
    share = count / (count + BROADER)
    for pairs, part in ((own, share), (every, 1 - share)):
        if pairs and part:
            values.append(np.array([error for _, error in pairs]))
            weights.append(part * weights_by_source([source for source, _ in pairs])[0])
    return quantiles(np.concatenate(values), np.concatenate(weights), (LEVEL,))[0] if values else 0.0


def ratio_range(ratio: float, kinds: Iterable[str]) -> tuple[float, float]:
    """Between what the ratio of two steps lies with 80 %, where `kinds` of `SETTINGS` (or `SHORT`) differ."""
    names = list(kinds)
    kind = SHORT if SHORT in names else kind_of(names)
    bound = shipped_estimates()["ratios"][kind]
    return ratio * exp(-bound), ratio * exp(bound)


def can_tell(one_seconds: float, other_seconds: float, kinds: Iterable[str]) -> bool:
    """Whether the interval of the ratio leaves out 1: which of two configurations is faster."""
    low, high = ratio_range(one_seconds / other_seconds, kinds)
    return not low <= 1.0 <= high
