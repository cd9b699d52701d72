"""Mean, median, worst and bias of signed errors, by source and overall."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, Protocol


class Scored(Protocol):
    """The attributes of a row that enter the statistics."""

    @property
    def source(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def relative_error(self) -> float | None: ...
    @property
    def memory_relative_error(self) -> float | None: ...
    @property
    def memory_errors(self) -> dict[str, float]: ...
    @property
    def is_within_range(self) -> bool | None: ...
    @property
    def measured_fits(self) -> bool | None: ...
    @property
    def predicted_fits(self) -> bool | None: ...


def summarise(rows: Sequence[Scored]) -> dict[str, Any]:
    """The figures of all rows, and of each source in alphabetical order."""
    sources = sorted({row.source for row in rows})
    by_source = {name: _figures([row for row in rows if row.source == name]) for name in sources}
    return _figures(rows) | {"by_source": by_source, "mean_of_sources": mean_of_sources(rows)}


def mean_of_sources(rows: Sequence[Scored]) -> dict[str, float | None]:
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


def _figures(rows: Sequence[Scored]) -> dict[str, Any]:
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
