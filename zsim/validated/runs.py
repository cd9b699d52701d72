"""Validated runs: the shipped table, the runs that are like a job or nearest to it, and quantiles of errors.

The table has one line per published run, with its features and zsim's error.

`python validation/published/accuracy.py` rewrites it.
"""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import exp, expm1, log2
from operator import itemgetter
from pathlib import Path
from typing import Self

import numpy as np

from zsim import garbage_collection
from zsim.arrays import Floats
from zsim.validated.features import Features

PRESETS = Path(__file__).resolve().parent.parent / "presets"
TABLE = PRESETS / "validated_runs.csv"
ESTIMATES = PRESETS / "validated_errors.toml"
BLIND = "blind"
"""The role of runs that were predicted before anything was known of their source, and not changed since."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that make two runs of one source on one GPU comparable: equal but for one of these.

    The number of GPUs and the strategy are the other settings by which they may differ.
    """

    model: str
    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: float
    training: str
    """Precision and checkpointing."""
    network_gbps: float
    """Gbit/s per GPU. 0 on one node."""
    degrees: str = ""
    """The degrees of the parallelisms in addition to data parallelism, as "TP 8, PP 4 x 2"."""


@dataclass(frozen=True, slots=True)
class ValidatedRun:
    """A published run and zsim's error on it."""

    row_id: str
    source: str
    role: str
    tier: str
    features: Features
    settings: Settings
    error: float
    """ln(measured / predicted) of the step. Above 0 the run was slower than predicted."""
    stranger_error: float | None = None
    """The same as a stranger would write the run, without what was found out of its source. None where it has
    not been predicted so."""
    input_fast: float = 1.0
    """The step with the job's inputs at the fast end of their spreads, as a multiple of the predicted one."""
    input_slow: float = 1.0
    """The same at their slow end."""

    @property
    def is_blind(self) -> bool:
        """Whether the run was predicted before anything was known of its source."""
        return self.role == BLIND

    @property
    def error_for_others(self) -> float:
        """The error that tells of other sources' runs: a stranger's, where there is one."""
        return self.error if self.stranger_error is None else self.stranger_error


class ValidatedRuns(tuple[ValidatedRun, ...]):
    """Runs with an index of their cells."""

    @classmethod
    def from_runs(cls, runs: Iterable[ValidatedRun]) -> Self:
        """The runs with an index of their cells. They are returned as they are if they have one."""
        return runs if isinstance(runs, cls) else cls(runs)

    def cell_indices(self, number: int, cell: Hashable) -> Sequence[int]:
        """The indices of the runs in a cell, see `Features.cells`."""
        if number not in self._indices_per_cell:
            indices_of_cells: dict[Hashable, list[int]] = {}
            for index, run in enumerate(self):
                indices_of_cells.setdefault(run.features.cells[number], []).append(index)
            self._indices_per_cell[number] = indices_of_cells
        return self._indices_per_cell[number].get(cell, ())

    @cached_property
    def _indices_per_cell(self) -> dict[int, dict[Hashable, list[int]]]:
        """The indices of the runs by the number of the cell, of those asked for, and by its key."""
        return {}

    @cached_property
    def errors(self) -> Floats:
        """The error of each run."""
        return np.array([run.error for run in self])

    @cached_property
    def features(self) -> Sequence[Features]:
        """Features of the runs, each once."""
        return list(dict.fromkeys(run.features for run in self))


RUN_COLUMNS = ("row_id", "source", "role", "tier")
FEATURE_COLUMNS = tuple(field.name for field in fields(Features))
SETTING_COLUMNS = tuple(field.name for field in fields(Settings))
INPUT_COLUMNS = ("input_fast", "input_slow")
COLUMNS = (*RUN_COLUMNS, *FEATURE_COLUMNS, *SETTING_COLUMNS, "error", "stranger_error", *INPUT_COLUMNS)
# Older tables lack these.
_LATER = frozenset(("is_low_precision", "open_settings", "stranger_error", *INPUT_COLUMNS))
SEPARATOR = "; "


@cache
def validated_runs() -> ValidatedRuns:
    """The runs of the shipped table."""
    with garbage_collection.pause():
        return read_validated(TABLE.read_text(encoding="utf-8"))


@cache
def shipped_estimates() -> Mapping[str, Mapping[str, float]]:
    """Estimates from the shipped table: "spread", "extrapolation", "open", "scores", "ratios" and
    "shared_ratios" by the setting that differs."""
    return tomllib.loads(ESTIMATES.read_text(encoding="utf-8"))


def read_validated(text: str) -> ValidatedRuns:
    """The runs of a table in the columns of the shipped one, or of an earlier release."""
    rows = csv.reader(io.StringIO(text))
    columns = next(rows)
    if not {*COLUMNS} - _LATER <= {*columns} <= {*COLUMNS}:
        raise ValueError("a table of validated runs has other columns than this release writes")
    pick = itemgetter(*(columns.index(name) if name in columns else len(columns) for name in COLUMNS))
    features: dict[tuple[str, ...], Features] = {}
    return ValidatedRuns(_parse_run(pick((*row, "")), features) for row in rows)


def _parse_run(values: Sequence[str], shared_features: dict[tuple[str, ...], Features]) -> ValidatedRun:
    """The run of a row's values in the order of `COLUMNS`. Runs of equal features share them, and so the
    names of their cells."""
    (row_id, source, role, tier,
     framework, strategy, gpu, nodes, gpus, fabric, binding, parameters, model_ranks, is_mixture, low, open_,
     model, length, micro_batch_size, accumulation_steps, training, network_gbps, degrees,
     error, stranger_error, fast, slow) = values  # fmt: skip
    low = low or str(is_low_precision(training))
    key = *values[4:14], low, open_
    features = shared_features.get(key)
    if features is None:
        features = shared_features[key] = Features(
            framework, strategy, gpu, int(nodes), int(gpus), fabric, binding, int(parameters),
            int(model_ranks), is_mixture == "True", low == "True",
            tuple(filter(None, open_.split(SEPARATOR))),
        )  # fmt: skip
    settings = Settings(
        model, int(length), int(micro_batch_size), float(accumulation_steps), training, float(network_gbps),
        degrees,
    )  # fmt: skip
    return ValidatedRun(
        row_id, source, role, tier, features, settings, float(error),
        float(stranger_error) if stranger_error else None, float(fast or 1.0), float(slow or 1.0),
    )  # fmt: skip


def is_low_precision(training: str) -> bool:
    """Whether the precision that `Settings.training` begins with is of 8 or 4 bits."""
    return re.search(r"fp8|fp4|float8", training.partition(",")[0].lower()) is not None


def exclude_source(runs: Sequence[ValidatedRun], source: str | None) -> ValidatedRuns:
    """The runs of all other sources, or all runs without a `source`. No source vouches for itself."""
    return ValidatedRuns.from_runs(runs if source is None else (run for run in runs if run.source != source))


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


def are_blind_enough(runs: Iterable[ValidatedRun]) -> bool:
    """Whether so many sources were predicted blind that errors are judged by them alone."""
    return len({run.source for run in runs if run.is_blind}) >= MIN_SOURCES


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


_MAX_RUNS = 6
# Distance of a feature that differs, in doublings of the number of GPUs. Chosen so that a list reads well.
_OTHER_STRATEGY, _OTHER_GPU, _OTHER_FABRIC, _LENGTH = 3.0, 2.0, 1.0, 0.5


@dataclass(frozen=True, slots=True)
class NearRun:
    """A validated run near a job."""

    run: ValidatedRun
    cell: int
    """The number of the closest cell that the run shares with the job (`Features.cells`)."""
    more: int = 0
    """Runs of the same source that share that cell and are not shown."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one: below 0 where zsim was too fast."""
        return expm1(-self.run.error)

    @property
    def measured_over_predicted(self) -> float:
        """In the measure of intervals: above 1 where zsim was too fast."""
        return exp(self.run.error)


def nearest_runs(
    job: Features,
    sequence_length: float | None = None,
    runs: Sequence[ValidatedRun] | None = None,
    *,
    per_source: int = 2,
) -> tuple[NearRun, ...]:
    """The runs nearest to the job, at most `per_source` of each source.

    They are ordered by the closest shared cell, and in it by strategy, GPU, fabric, and the ratios of GPUs,
    parameters and sequence length.
    """
    runs = validated_runs() if runs is None else runs
    ordered = sorted(
        ((_closest_shared_cell(run.features, job), _distance(run, job, sequence_length), run.row_id), run)
        for run in runs
    )
    runs_per_source = Counter((key[0], run.source) for key, run in ordered)
    chosen: list[tuple[int, ValidatedRun]] = []
    for (cell, _, _), run in ordered:
        if len(chosen) == _MAX_RUNS:
            break
        if sum(each.source == run.source for _, each in chosen) < per_source:
            chosen.append((cell, run))
    shown = Counter((cell, run.source) for cell, run in chosen)
    return tuple(
        NearRun(run, cell, runs_per_source[cell, run.source] - shown[cell, run.source])
        for cell, run in chosen
    )


def _closest_shared_cell(run: Features, job: Features) -> int:
    pairs = zip(run.cells, job.cells, strict=True)
    return next(number for number, (run_cell, job_cell) in enumerate(pairs) if run_cell == job_cell)


def _distance(run: ValidatedRun, job: Features, sequence_length: float | None) -> float:
    features = run.features
    distance = _OTHER_STRATEGY * (features.strategy != job.strategy) + _OTHER_GPU * (features.gpu != job.gpu)
    distance += _OTHER_FABRIC * (features.fabric != job.fabric)
    for count, job_count in ((features.gpus, job.gpus), (features.parameters, job.parameters)):
        distance += abs(log2(max(count, 1) / max(job_count, 1)))
    if sequence_length:
        distance += _LENGTH * abs(log2(max(run.settings.sequence_length, 1) / sequence_length))
    return distance
