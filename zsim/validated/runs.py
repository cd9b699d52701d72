"""The shipped table of validated runs: one line per published run with its features and zsim's error.

`python validation/published/accuracy.py` rewrites it.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from zsim import garbage_collection
from zsim.arrays import Floats
from zsim.validated.features import NUM_CELLS, Features

PRESETS = Path(__file__).resolve().parent.parent / "presets"
TABLE = PRESETS / "validated_runs.csv"
ESTIMATES = PRESETS / "validated_errors.toml"


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


class ValidatedRuns(tuple[ValidatedRun, ...]):
    """Runs with an index of their cells."""

    @classmethod
    def from_runs(cls, runs: Iterable[ValidatedRun]) -> Self:
        """The runs with an index of their cells. They are returned as they are if they have one."""
        return runs if isinstance(runs, cls) else cls(runs)

    def cell_indices(self, number: int, cell: Hashable) -> Sequence[int]:
        """The indices of the runs in a cell, see `Features.cells`."""
        return self._indices_per_cell[number].get(cell, ())

    @cached_property
    def _indices_per_cell(self) -> list[dict[Hashable, list[int]]]:
        """The indices of the runs by the number of the cell and by its key."""
        indices_per_cell: list[dict[Hashable, list[int]]] = [{} for _ in range(NUM_CELLS)]
        for index, run in enumerate(self):
            for indices_of_cell, cell in zip(indices_per_cell, run.features.cells, strict=True):
                indices_of_cell.setdefault(cell, []).append(index)
        return indices_per_cell

    @cached_property
    def errors(self) -> Floats:
        """The error of each run."""
        return np.array([run.error for run in self])

    @cached_property
    def features(self) -> Sequence[Features]:
        """Features of the runs, each once."""
        return list(dict.fromkeys(run.features for run in self))

    @cached_property
    def cache_per_cells(self) -> dict[Hashable, Any]:
        """Values derived from these runs for jobs of the same cells."""
        return {}


RUN_COLUMNS = ("row_id", "source", "role", "tier")
FEATURE_COLUMNS = tuple(field.name for field in fields(Features))
SETTING_COLUMNS = tuple(field.name for field in fields(Settings))
COLUMNS = (*RUN_COLUMNS, *FEATURE_COLUMNS, *SETTING_COLUMNS, "error")


@cache
def validated_runs() -> ValidatedRuns:
    """The runs of the shipped table."""
    with garbage_collection.pause():
        return read_validated(TABLE.read_text(encoding="utf-8"))


@cache
def shipped_estimates() -> Mapping[str, Mapping[str, float]]:
    """Estimates from the shipped table: "widening" by respect, "ratios" and
    "shared_ratios" by the setting that differs."""
    return tomllib.loads(ESTIMATES.read_text(encoding="utf-8"))


def read_validated(text: str) -> ValidatedRuns:
    """The runs of a table in the columns of the shipped one."""
    rows = csv.reader(io.StringIO(text))
    if tuple(next(rows)) != COLUMNS:
        raise ValueError("a table of validated runs has other columns than this release writes")
    shared_features: dict[tuple[str, ...], Features] = {}
    return ValidatedRuns(_parse_run(row, shared_features) for row in rows)


def _parse_run(row: Sequence[str], shared_features: dict[tuple[str, ...], Features]) -> ValidatedRun:
    """The run of a row. Runs of equal features share them, and so the names of their cells."""
    row_id, source, role, tier, *values = row
    feature_values, settings, error = (
        tuple(values[: len(FEATURE_COLUMNS)]),
        values[len(FEATURE_COLUMNS) : -1],
        values[-1],
    )
    if feature_values not in shared_features:
        framework, strategy, gpu, nodes, gpus, fabric, binding, parameters, ranks, is_mixture = feature_values
        sizes = int(parameters), int(ranks)
        shared_features[feature_values] = Features(
            framework, strategy, gpu, int(nodes), int(gpus), fabric, binding, *sizes, is_mixture == "True"
        )
    model, length, micro_batch, steps, training, network, degrees = settings
    return ValidatedRun(
        row_id,
        source,
        role,
        tier,
        shared_features[feature_values],
        Settings(model, int(length), int(micro_batch), float(steps), training, float(network), degrees),
        float(error),
    )


def exclude_source(runs: Sequence[ValidatedRun], source: str | None) -> ValidatedRuns:
    """The runs of all other sources, or all runs without a `source`. No source vouches for itself."""
    return ValidatedRuns.from_runs(runs if source is None else (run for run in runs if run.source != source))
