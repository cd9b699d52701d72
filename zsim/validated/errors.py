"""The distribution of zsim's error on a job, from validated runs of sources whose errors differ by source.

# [Note: what an interval assumes]
Runs of one source have errors that are not exchangeable with those of another source, so 500 runs of one
source say little more about a new run than 50 do. The sources of similar runs are taken to be exchangeable,
the job's source among them. Every source has the same weight in a cell of similar runs, and a new run is
distributed as a run drawn from a randomly drawn source: the pooled distribution of R. Dunn, L. Wasserman and
A. Ramdas ("Distribution-free prediction sets for two-layer hierarchical models", JASA 2023).

Exact guarantees there and in Y. Lee, R. Barber and R. Willett ("Distribution-free inference with hierarchical
data", 2023) count the job's source as one more source with errors of any size. With fewer than ten sources
there is then no interval at all. Here that additional source has the errors of the others with the opposite
sign (`estimate_errors`). Cells with few sources borrow from broader ones (`BROADER_CELL_WEIGHT`). All of this
is judged by leaving one source out (docs/accuracy.md), so coverage is measured, not proven, and holds for
jobs like the published ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Floats
from zsim.validated.features import KERNELS, Features
from zsim.validated.runs import ValidatedRun, ValidatedRuns

LEVEL = 0.8  # of the intervals
# A broader cell weighs as much as one more source of the narrower one. With half to twice that weight
# coverage is 78 to 80 % over rows and 83 to 85 % as the mean of sources.
BROADER_CELL_WEIGHT = 1.0
# Number of sources from which on a cell is trusted by itself. With 2, 3 and 4 coverage is 81, 79 and 79 %
# over rows, and 84 % as the mean of sources; half of Megatron's intervals on one node are wider than 23 %
# each way with 2, than 9 % with 3 and 4.
MIN_SOURCES = 3
# Repeated runs of one configuration differ by this in their step (MosaicML's, validation/published).
REPEAT_ERROR = 0.006

FIRST_DISSIMILAR_CELL = 3  # from this cell on runs are not like the job

# By the number of the broader cell (`Features.cells`) that a job borrows from, the narrower cells that it
# is trusted no better than: those of other chips, of other ranks to a replica and of mixtures or dense
# models; where the job's binding is little known, those of jobs bound by kernels, on which zsim is best;
# where its framework is little known, the other frameworks'.
_FRAMEWORK_CELL = 2
_FRAMEWORKS: tuple[tuple[int, ...], Callable[[Features], bool]] = ((_FRAMEWORK_CELL,), lambda f: True)
_NARROWER_CELLS: tuple[tuple[tuple[int, ...], Callable[[Features], bool]], ...] = (
    ((), lambda f: False),
    ((0,), lambda f: True),
    ((0, 1), lambda f: f.binding == KERNELS),
    _FRAMEWORKS,
    _FRAMEWORKS,
)


@dataclass(frozen=True)
class ErrorDistribution:
    """Signed errors (as `ValidatedRun.error`) with weights."""

    values: Floats
    weights: Floats
    similar_runs: tuple[ValidatedRun, ...]
    """The runs of the job's closest cell that has any. Empty if only dissimilar runs are left."""
    cell: int
    """The number of that cell."""

    def interval(self) -> tuple[float, float]:
        """The quantiles between which `LEVEL` of the errors lie. The interval is at least as wide as repeated
        runs differ.
        """
        tail = (1 - LEVEL) / 2
        low, high = quantiles(self.values, self.weights, (tail, 1 - tail))
        return min(low, -REPEAT_ERROR), max(high, REPEAT_ERROR)


def estimate_errors(features: Features, runs: Sequence[ValidatedRun], first: int = 0) -> ErrorDistribution:
    """The distribution of zsim's error on a job with these features.

    It is estimated from the errors of `runs` in the job's cells from number `first` on.
    """
    runs = ValidatedRuns.from_runs(runs)
    weights, opposite_weights, remaining_weight = np.zeros(len(runs)), np.zeros(len(runs)), 1.0
    similar_runs: tuple[ValidatedRun, ...] | None = None
    cells = features.cells
    closest = len(cells) - 1
    for number in range(first, len(cells)):
        indices = runs.cell_indices(number, cells[number])
        if not indices:
            continue
        is_last = number == len(cells) - 1
        if similar_runs is None:
            similar_runs, closest = (
                (() if number >= FIRST_DISSIMILAR_CELL else tuple(runs[index] for index in indices)),
                number,
            )
        source_weights, num_sources = weights_by_source([runs[index].source for index in indices])
        share = 1.0 if is_last else num_sources / (num_sources + BROADER_CELL_WEIGHT)
        mirrored_share = 1 / (num_sources + 1)
        weights[indices] += remaining_weight * share * (1 - mirrored_share) * source_weights
        opposite_weights[indices] += remaining_weight * share * mirrored_share * source_weights
        remaining_weight *= 1 - share
    return ErrorDistribution(
        np.r_[runs.errors, -runs.errors], np.r_[weights, opposite_weights], similar_runs or (), closest
    )


def estimate_interval(
    features: Features, runs: Sequence[ValidatedRun]
) -> tuple[ErrorDistribution, tuple[float, float]]:
    """The errors and their interval.

    A job whose closest cell has runs of fewer than `MIN_SOURCES` sources is trusted no better than the
    closest broader cell with enough sources, nor than the narrower cells with enough sources in that one
    (`_NARROWER_CELLS`), nor than other frameworks' jobs with its binding if its framework has no run with it.
    Jobs of the same cells have the same interval.
    """
    runs = ValidatedRuns.from_runs(runs)
    cached: tuple[ErrorDistribution, tuple[float, float]] | None = runs.cache_per_cells.get(features.cells)
    if cached is None:
        cached = runs.cache_per_cells[features.cells] = _compute_interval(features, runs)
    return cached


def _compute_interval(
    features: Features, runs: ValidatedRuns
) -> tuple[ErrorDistribution, tuple[float, float]]:
    errors = estimate_errors(features, runs)
    low, high = errors.interval()
    for number, neighbour in _comparison_cells(features, runs):
        interval = estimate_errors(neighbour, runs, number).interval()
        low, high = min(low, interval[0]), max(high, interval[1])
    return errors, (low, high)


def broader_cell(features: Features, runs: Sequence[ValidatedRun]) -> int:
    """The number of the closest cell with runs of enough sources, or of the last cell if none has enough."""
    runs = ValidatedRuns.from_runs(runs)
    return next(
        (
            number
            for number, cell in enumerate(features.cells)
            if len({runs[index].source for index in runs.cell_indices(number, cell)}) >= MIN_SOURCES
        ),
        len(features.cells) - 1,
    )


def _comparison_cells(features: Features, runs: ValidatedRuns) -> list[tuple[int, Features]]:
    """The broader cell and the narrower cells in it, as the cell's number and the features of a job in it.

    Empty if the closest cell has enough sources.
    """
    number = broader_cell(features, runs)
    levels, holds = _NARROWER_CELLS[number]
    runs_in_cell = ValidatedRuns(runs[index] for index in runs.cell_indices(number, features.cells[number]))
    comparison_cells = [(number, features)] if number else []
    for level in levels:
        cells = {run.features.cells[level]: run.features for run in runs_in_cell if holds(run.features)}
        comparison_cells += [
            (level, features_in_cell)
            for features_in_cell in cells.values()
            if broader_cell(features_in_cell, runs_in_cell) <= level
        ]
    if number == _FRAMEWORK_CELL and not any(
        _has_same_binding(run.features, features) for run in runs_in_cell
    ):
        bound = [run.features for run in runs if _has_same_binding(run.features, features)]
        comparison_cells += [
            (_FRAMEWORK_CELL, features_in_cell)
            for features_in_cell in {job.framework: job for job in bound}.values()
        ]
    return comparison_cells


def _has_same_binding(run: Features, job: Features) -> bool:
    return (run.is_several, run.binding) == (job.is_several, job.binding)


def weights_by_source(sources: Sequence[str]) -> tuple[Floats, int]:
    """Weights that add up to 1 and are the same for every source, and the number of sources."""
    counts = Counter(sources)
    weights = {source: 1.0 / (len(counts) * count) for source, count in counts.items()}
    return np.array([weights[source] for source in sources]), len(counts)


def quantiles(values: Floats, weights: Floats, levels: Sequence[float]) -> list[float]:
    """Weighted quantiles at `levels`, interpolated between the middles of the sorted values' weights."""
    counts = weights > 0
    values, weights = values[counts], weights[counts]
    order = np.argsort(values, kind="stable")
    middles = np.cumsum(weights[order]) - weights[order] / 2
    return [float(value) for value in np.interp(levels, middles / weights.sum(), values[order])]
