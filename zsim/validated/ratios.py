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

from collections.abc import Callable, Iterable, Mapping
from math import exp

from zsim.validated.features import data_strategy
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


def kind_of(kinds: Iterable[str]) -> str:
    """The member of `KINDS` for settings that differ in combination."""
    names = list(dict.fromkeys(kinds))
    if len(names) == 2 and "batch" in names and any(name in _BATCH_DETERMINING for name in names):
        names.remove("batch")
    return names[0] if len(names) == 1 and names[0] in SETTINGS else SEVERAL_SETTINGS


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
