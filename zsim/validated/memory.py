"""The shipped table of published memory, and the distribution of its errors, by which a job's probability to
fit is made.

The table says how full zsim predicts a memory to be, the error of that figure, and whether the job ran.

# [Note: what the probability assumes]
A job needs exp(error) times what zsim says, and fits where that is no more than the memory's usable bytes.
Errors are those of rows that no number of zsim is fitted to (role report), and that use at least a quarter of
their GPU. The error of a small job, in proportion, is the context's and the cache's doing. As for the step's
interval (`zsim.validated.runs`), every source counts once, however many rows it has. One more source has
the errors of the others with the opposite sign. A cell of similar runs with few sources borrows from broader
ones.

`python validation/published/memory.py` rewrites the table and shows the calibration, each source judged by
the others.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import exp, log
from typing import Literal

import numpy as np

from zsim.arrays import Floats
from zsim.validated.runs import BROADER_CELL_WEIGHT, LEVEL, PRESETS, quantiles, weights_by_source

TABLE = PRESETS / "validated_memory.csv"
REPORT_ROLE = "report"  # the role of rows that no number is fitted to
LEAST_LOAD = 0.25  # of rows whose errors tell of jobs near the limit
Outcome = Literal["", "ran", "out of memory"]
RAN: Outcome = "ran"
RAN_OUT: Outcome = "out of memory"

# No probability is nearer to 0 or 1: of the published verdicts far from the limit about one in a hundred is
# wrong, for reasons that no figure of memory shows (another length, another program on the GPU).
MAX_PROBABILITY = 0.99


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """A published run."""

    row_id: str
    source: str
    role: str
    framework: str
    is_mixture: bool
    """Whether the model is a mixture of experts."""
    load: float
    """zsim's peak over the usable bytes."""
    exact: float | None
    """The part of `load` that model states are. None where it is not known."""
    retries: float
    """Retries of torch's allocator in zsim's step."""
    failures: float
    """Failures of torch's allocator in zsim's step."""
    outcome: Outcome
    kind: str
    """The published figure (allocated, active, reserved, device). Empty for none."""
    error: float | None
    """ln(measured / predicted) of that figure. None without one."""

    @property
    def runs_short(self) -> bool:
        """Whether torch's allocator is predicted to run short, though all tensors have room."""
        return self.load <= 1 and bool(self.retries or self.failures)


@dataclass(frozen=True)
class MemoryErrors:
    """Errors with weights that add up to 1."""

    values: Floats
    weights: Floats
    rows: int
    """Published rows behind the errors."""
    sources: int
    """Sources behind the errors."""
    fraction_that_ran_short: float
    """The fraction of published jobs predicted to run short that ran."""
    rows_short: int
    """Published jobs predicted to run short."""

    def probability(self, load: float) -> float:
        """The probability that a memory with this load suffices, which is that of an error of at most
        -ln(load).

        Between the middles of two errors' weights it is interpolated.
        """
        if load <= 0 or not len(self.values):
            return MAX_PROBABILITY if load <= 1 else 1 - MAX_PROBABILITY
        values, value_indices = np.unique(self.values, return_inverse=True)
        weights = np.bincount(value_indices, self.weights)
        middles = np.cumsum(weights) - weights / 2
        probability = float(np.interp(-log(load), values, middles, left=0.0, right=1.0))
        return min(max(probability, 1 - MAX_PROBABILITY), MAX_PROBABILITY)

    def interval(self) -> tuple[float, float]:
        """The interval of 80 % of what a job needs, over what zsim says. Without errors, both are 1."""
        if not len(self.values):
            return 1.0, 1.0
        tail = (1 - LEVEL) / 2
        low, high = quantiles(self.values, self.weights, (tail, 1 - tail))
        return exp(low), exp(high)

    def probability_short(self, load: float) -> float:
        """The same where torch's allocator runs short: no more than the published fraction that ran."""
        return min(self.probability(load), self.fraction_that_ran_short)


@cache
def memory_runs() -> tuple[MemoryRun, ...]:
    """The runs of the shipped table."""
    return read_memory(TABLE.read_text(encoding="utf-8"))


@cache
def shipped_errors(framework: str, is_mixture: bool = False) -> MemoryErrors:
    """The errors on a framework's jobs by the shipped table."""
    return estimate_memory_errors(framework, memory_runs(), is_mixture=is_mixture)


def estimate_memory_errors(
    framework: str, runs: Sequence[MemoryRun], *, is_mixture: bool = False
) -> MemoryErrors:
    """The distribution of the error on a job of `framework`, dense or a mixture of experts.

    It is made from three cells of runs: those of the framework that are dense or a mixture as the job is, all
    of the framework, and all.
    """
    usable_runs = [
        run for run in runs if run.role == REPORT_ROLE and run.error is not None and run.load >= LEAST_LOAD
    ]
    values = np.array([run.error for run in usable_runs], dtype=np.float64)
    weights, opposite_weights, remaining_weight = np.zeros(len(usable_runs)), np.zeros(len(usable_runs)), 1.0
    cell_key = framework, is_mixture
    for cell in (2, 1, 0):
        is_last = cell == 0
        indices = [
            index
            for index, run in enumerate(usable_runs)
            if (run.framework, run.is_mixture)[:cell] == cell_key[:cell]
        ]
        if not indices:
            continue
        source_weights, num_sources = weights_by_source([usable_runs[index].source for index in indices])
        share = 1.0 if is_last else num_sources / (num_sources + BROADER_CELL_WEIGHT)
        mirrored_share = 1 / (num_sources + 1)
        weights[indices] += remaining_weight * share * (1 - mirrored_share) * source_weights
        opposite_weights[indices] += remaining_weight * share * mirrored_share * source_weights
        remaining_weight *= 1 - share
    ran_short, rows_short = fraction_that_ran(run for run in runs if run.runs_short)
    return MemoryErrors(
        np.r_[values, -values],
        np.r_[weights, opposite_weights],
        len(usable_runs),
        len({run.source for run in usable_runs}),
        ran_short,
        rows_short,
    )


def fraction_that_ran(runs: Iterable[MemoryRun]) -> tuple[float, int]:
    """The fraction that ran, and the number of runs whose outcome was published.

    The fraction is the mean of sources and of one more source of which half did.
    """
    runs_with_outcome = [run for run in runs if run.outcome]
    if not runs_with_outcome:
        return 0.5, 0
    weights, num_sources = weights_by_source([run.source for run in runs_with_outcome])
    ran = np.array([run.outcome == RAN for run in runs_with_outcome], dtype=np.float64)
    return (num_sources * float(weights @ ran) + 0.5) / (num_sources + 1), len(runs_with_outcome)


COLUMNS = tuple(field.name for field in fields(MemoryRun))
DIGITS = {
    "load": 4,
    "exact": 4,
    "retries": 2,
    "failures": 2,
    "error": 5,
}  # after the point, of the columns of numbers


def read_memory(text: str) -> tuple[MemoryRun, ...]:
    """The runs of a table of published memory."""
    rows = csv.DictReader(io.StringIO(text))
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError("a table of published memory has other columns than this release writes")
    return tuple(_parse_run(row) for row in rows)


def _parse_run(row: dict[str, str]) -> MemoryRun:
    numbers = {name: float(row[name]) if row[name] else None for name in DIGITS}
    is_mixture = row["is_mixture"] == "True"
    return MemoryRun(**{**row, **numbers, "is_mixture": is_mixture})  # type: ignore[arg-type]  # the rest is text
