"""A measured run and zsim's prediction of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from zsim.validated.validation import Validation
from zsim.validated.verdict import Verdict


def summarise(rows: Sequence[RowResult]) -> dict[str, Any]:
    """The figures of all rows, and of each source in alphabetical order."""
    sources = sorted({row.source for row in rows})
    by_source = {name: _figures([row for row in rows if row.source == name]) for name in sources}
    return _figures(rows) | {"by_source": by_source, "mean_of_sources": mean_of_sources(rows)}


def mean_of_sources(rows: Sequence[RowResult]) -> dict[str, float | None]:
    """The means over sources of each source's own mean, median and bias. All sources have the same weight,
    however many rows they have.
    """
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.relative_error is not None:
            errors.setdefault(row.source, []).append(row.relative_error)
    names = ("mean_absolute_error", "median_absolute_error", "bias")
    source_figures = [error_figures(source_errors) for source_errors in errors.values()]
    return {
        name: fmean(figures[name] or 0.0 for figures in source_figures) if source_figures else None
        for name in names
    }


def _figures(rows: Sequence[RowResult]) -> dict[str, Any]:
    times = [row.relative_error for row in rows if row.relative_error is not None]
    memory = [row.memory_relative_error for row in rows if row.memory_relative_error is not None]
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        for kind, error in row.memory_errors.items():
            by_kind.setdefault(kind, []).append(error)
    outcomes = [row for row in rows if row.predicted_fits is not None and row.measured_fits is not None]
    return {
        "rows": len(times),
        "simulated": sum(row.status == "ok" for row in rows),
        "skipped": sum(row.status == "skipped" for row in rows),
        **error_figures(times),
        "within_range": _coverage([row.is_within_range for row in rows]),
        "memory": {"rows": len(memory), **error_figures(memory)},
        "memory_by_kind": {
            kind: {"rows": len(errors), **error_figures(errors)} for kind, errors in sorted(by_kind.items())
        },
        "fits": {
            "rows": len(outcomes),
            "right": sum(row.predicted_fits == row.measured_fits for row in outcomes),
        },
    }


def _coverage(outcomes: Iterable[bool | None]) -> dict[str, Any]:
    """The number of rows with an interval, and the fraction of them whose measured step lies inside."""
    judged = [is_inside for is_inside in outcomes if is_inside is not None]
    return {"rows": len(judged), "fraction": sum(judged) / len(judged) if judged else None}


def error_figures(errors: Iterable[float]) -> dict[str, float | None]:
    """Mean, median and worst absolute error, mean signed error, and the fraction within 10 %."""
    signed = list(errors)
    if not signed:
        names = ("mean_absolute_error", "median_absolute_error", "worst_absolute_error", "bias")
        return {**dict.fromkeys(names), "within_10_percent_fraction": None}
    absolute = [abs(error) for error in signed]
    return {
        "mean_absolute_error": fmean(absolute),
        "median_absolute_error": median(absolute),
        "worst_absolute_error": max(absolute),
        "bias": fmean(signed),
        "within_10_percent_fraction": sum(error <= 0.1 for error in absolute) / len(absolute),
    }


@dataclass(frozen=True)
class RowResult:
    """A row of a table, measured and predicted, or the reason why it was skipped. Errors are predicted over
    measured, less one.
    """

    row_id: str
    source: str
    status: str
    reason: str | None = None
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    relative_error: float | None = None
    measured_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    memory_relative_error: float | None = None
    memory_kind: str | None = None
    """The figure of memory that `measured_memory_bytes` and `predicted_memory_bytes` compare."""
    measured_fits: bool | None = None
    predicted_fits: bool | None = None
    predicted_retries: float | None = None
    """How often the allocator is predicted to run short, per micro-batch. None if the tensors alone exceed
    the GPU's memory.
    """
    predicted_failures: float | None = None
    """How often the allocator is predicted to find no room even then, per micro-batch. None if the tensors
    alone exceed the GPU's memory.
    """
    predicted_load: float | None = None
    """The peak over the usable bytes."""
    verdict: Verdict | None = None
    """The verdict on the load, by the errors of other sources."""
    role: str = ""
    tier: str = ""
    assumptions: tuple[str, ...] = ()
    measured_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind that is published (allocated, active, reserved, device)."""
    predicted_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind."""
    predicted_range_seconds: tuple[float, float] | None = None
    """Contains the step with probability 80 %, according to runs of other sources (`validation`)."""
    validation: Validation | None = None
    framework: str = ""
    """The name of the program that was measured."""
    parallelism: str = ""
    """"TP", "PP", "CP", "mixed" or "data parallel"."""

    @property
    def is_within_range(self) -> bool | None:
        """Whether the measured step lies inside the predicted range, or None if either is missing."""
        if self.measured_seconds is None or self.predicted_range_seconds is None:
            return None
        low, high = self.predicted_range_seconds
        return low <= self.measured_seconds <= high

    @property
    def memory_errors(self) -> dict[str, float]:
        """Relative error of every memory figure that the row publishes, by kind."""
        predicted = self.predicted_memory
        return {kind: predicted[kind] / size - 1 for kind, size in self.measured_memory.items() if predicted}


@dataclass(frozen=True)
class CheckResult:
    """The results of all rows, in the order of the files."""

    rows: tuple[RowResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The rows and their summary, as `--json` has them."""
        rows = [_row_dict(row) for row in self.rows]
        return {"rows": rows, "summary": summarise(self.rows), "notes": list(self.notes)}


def _row_dict(row: RowResult) -> dict[str, Any]:
    validation = None if row.validation is None else row.validation.to_dict()
    bare = asdict(replace(row, validation=None, verdict=None))
    word, probability = (None, None) if row.verdict is None else (row.verdict.word, row.verdict.probability)
    return bare | {
        "assumptions": list(row.assumptions),
        "validation": validation,
        "verdict": word,
        "fits_probability": probability,
    }
