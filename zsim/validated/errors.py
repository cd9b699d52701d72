"""The distribution of zsim's error on a job like those validated, from sources that err each in its own way.

# [Note: what an interval assumes]
Runs of one source are alike: their errors are not exchangeable with those of another, so 500 runs of one
source say little more about a new one than 50 do. What is taken to be exchangeable are the sources of runs
that are alike, the job's own among them. Every source has the same weight in a cell of alike runs, and a new
run is distributed as one that is drawn from a source that is drawn first: the pooled distribution of R. Dunn,
L. Wasserman and A. Ramdas ("Distribution-free prediction sets for two-layer hierarchical models", JASA 2023).
Exact guarantees there and in Y. Lee, R. Barber and R. Willett ("Distribution-free inference with hierarchical
data", 2023) count the job's own source as one more with errors of any size: with fewer than ten sources that
is no interval at all. Here that one more source errs as the others do, the other way round (`errors_like`).
Cells that few sources are in lean on broader ones (`BROADER`); all of that is judged by leaving one source
out (docs/accuracy.md), so coverage is measured, not proven, and holds for jobs like the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun

LEVEL = 0.8  # of the intervals
# A broader cell weighs as much as one more source of the one within it. With half to three times that weight
# coverage is 85 to 88 % over rows and 75 to 81 % as the mean of sources; this stands in the middle of what is
# wanted of rows, 75 to 90 %.
BROADER = 1.0
# Repeated, the same configuration gives steps that differ by this (MosaicML's, validation/published).
REPEATS = 0.006

Floats = NDArray[np.float64]
_Key = Callable[[Features], tuple[Any, ...]]

# From runs that are like the job in all that matters to any run at all.
CELLS: tuple[_Key, ...] = (
    lambda f: (f.framework, f.is_several, f.binding, f.chip),
    lambda f: (f.framework, f.is_several, f.binding),
    lambda f: (f.framework, f.is_several),
    lambda f: (),
)


@dataclass(frozen=True)
class Errors:
    """Signed errors (as `ValidatedRun.error`) with weights; `alike` are the runs of the job's closest cell
    that has any, empty where only unlike ones are left; `cell` is which of `CELLS` that is."""

    values: Floats
    weights: Floats
    alike: tuple[ValidatedRun, ...]
    cell: int

    def interval(self) -> tuple[float, float]:
        """The quantiles between which `LEVEL` of the errors lie; no narrower than runs repeat."""
        outside = (1 - LEVEL) / 2
        low, high = quantiles(self.values, self.weights, (outside, 1 - outside))
        return min(low, -REPEATS), max(high, REPEATS)


def errors_like(features: Features, runs: Sequence[ValidatedRun]) -> Errors:
    """How the errors of `runs` say that zsim errs on a job with these features."""
    weights, opposite, rest = np.zeros(len(runs)), np.zeros(len(runs)), 1.0
    alike: tuple[ValidatedRun, ...] | None = None
    closest = len(CELLS) - 1
    for number, key in enumerate(CELLS):
        wanted = key(features)
        inside = [index for index, run in enumerate(runs) if key(run.features) == wanted]
        if not inside:
            continue
        is_last = number == len(CELLS) - 1
        if alike is None:
            alike, closest = (() if is_last else tuple(runs[index] for index in inside)), number
        own, num_sources = weights_by_source([runs[index].source for index in inside])
        share = 1.0 if is_last else num_sources / (num_sources + BROADER)
        mirrored = 1 / (num_sources + 1)
        weights[inside] += rest * share * (1 - mirrored) * own
        opposite[inside] += rest * share * mirrored * own
        rest *= 1 - share
    values = np.array([run.error for run in runs])
    return Errors(np.r_[values, -values], np.r_[weights, opposite], alike or (), closest)


def interval_like(features: Features, runs: Sequence[ValidatedRun]) -> tuple[Errors, tuple[float, float]]:
    """The errors and their interval; a chip that no such run is of is trusted no better than any chip that
    one is of."""
    errors = errors_like(features, runs)
    low, high = errors.interval()
    if errors.cell == 1:
        for gpu in sorted({run.features.chip for run in errors.alike}):
            other = errors_like(replace(features, gpu=gpu), runs).interval()
            low, high = min(low, other[0]), max(high, other[1])
    return errors, (low, high)


def weights_by_source(sources: Sequence[str]) -> tuple[Floats, int]:
    """Weights that add up to 1 and are the same for every source, and how many sources there are."""
    _, index, counts = np.unique(sources, return_inverse=True, return_counts=True)
    return 1.0 / (len(counts) * counts[index]), len(counts)


def quantiles(values: Floats, weights: Floats, at: Sequence[float]) -> list[float]:
    """Weighted quantiles, between the middles of the values' weights in proportion."""
    counts = weights > 0
    values, weights = values[counts], weights[counts]
    order = np.argsort(values, kind="stable")
    middles = np.cumsum(weights[order]) - weights[order] / 2
    return [float(value) for value in np.interp(at, middles / weights.sum(), values[order])]
