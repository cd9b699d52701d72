"""The runs that are like a job, weights by which sources count alike, and quantiles of weighted errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from zsim.arrays import Floats
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, ValidatedRuns

LEVEL = 0.8  # of the intervals
# A broader cell weighs as much as one more source of the narrower one.
BROADER_CELL_WEIGHT = 1.0
# Number of sources from which on runs like a job are enough; below it those of its framework are counted too.
MIN_SOURCES = 3
# Repeated runs of one configuration differ by this in their step (MosaicML's, validation/published).
REPEAT_ERROR = 0.006

FIRST_DISSIMILAR_CELL = 2  # from this cell on runs are not like the job: they have another strategy
FRAMEWORK_CELL = 2


def similar_runs(features: Features, runs: Sequence[ValidatedRun]) -> tuple[tuple[ValidatedRun, ...], int]:
    """The runs of the job's closest cell that has any, and the cell's number (`Features.cells`).

    Without a run of the job's framework, nodes and strategy there are none.
    """
    runs = ValidatedRuns.from_runs(runs)
    for number, cell in enumerate(features.cells):
        indices = runs.cell_indices(number, cell)
        if indices:
            is_like = number < FIRST_DISSIMILAR_CELL
            return tuple(runs[index] for index in indices) if is_like else (), number
    return (), len(features.cells) - 1


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
