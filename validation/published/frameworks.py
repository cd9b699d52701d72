"""Errors by framework and by parallelism, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.measured.prediction import RowResult, error_figures, mean_of_sources

_ALL = "**all**"


def framework_lines(rows: Sequence[RowResult]) -> list[str]:
    """Two tables: the errors of step times by framework, and by framework and kind of parallelism for the
    rows in which ranks share a replica. Next to the mean over rows stands the mean of the sources' own means.
    """
    timed = [row for row in rows if row.relative_error is not None]
    shared = [row for row in timed if row.parallelism != "data parallel"]
    lines = ["## By framework", "", *_table(timed, "framework", lambda row: row.framework), ""]
    if not shared:
        return lines
    return [
        *lines,
        "## Where ranks share a replica: by framework and parallelism",
        "",
        "Tensor (TP), pipeline (PP) and context parallelism (CP), each with data parallelism or without;",
        "several of them are mixed.",
        "",
        *parallelism_table_lines(shared),
        "",
    ]


def parallelism_table_lines(rows: Sequence[RowResult]) -> list[str]:
    """Two tables of timed rows in which ranks share a replica, as the last ones of `framework_lines`."""
    return [
        *_table(rows, "framework, parallelism", lambda row: f"{row.framework}, {row.parallelism}"),
        "",
        *_table(rows, "parallelism", lambda row: row.parallelism),
    ]


def _table(rows: Sequence[RowResult], row_kind: str, title: Callable[[RowResult], str]) -> list[str]:
    columns = named_columns(
        row_kind, "rows", "sources", "mean, rows", "median, rows", "mean, sources", "median, sources",
        "bias, rows", "bias, sources", "within 10 %", "memory rows", "memory mean",
    )  # fmt: skip
    titles = sorted({title(row) for row in rows})
    groups = [(name, [row for row in rows if title(row) == name]) for name in titles]
    return markdown(columns, [_cells(name, group) for name, group in (*groups, (_ALL, rows))])


def _cells(name: str, rows: Sequence[RowResult]) -> list[str]:
    figures, macro = error_figures(_errors(rows)), mean_of_sources(rows)
    memory = error_figures(_drop_none(row.memory_relative_error for row in rows))
    return [
        name,
        f"{len(rows)}",
        f"{len({row.source for row in rows})}",
        _percent(figures["mean_absolute_error"]),
        _percent(figures["median_absolute_error"]),
        _percent(macro["mean_absolute_error"]),
        _percent(macro["median_absolute_error"]),
        _percent(figures["bias"], sign="+"),
        _percent(macro["bias"], sign="+"),
        _percent(figures["within_10_percent_fraction"], digits=0),
        f"{sum(row.memory_relative_error is not None for row in rows)}",
        _percent(memory["mean_absolute_error"]),
    ]


def _errors(rows: Sequence[RowResult]) -> list[float]:
    return _drop_none(row.relative_error for row in rows)


def _drop_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _percent(value: float | None, *, sign: str = "", digits: int = 1) -> str:
    return "" if value is None else f"{value:{sign}.{digits}%}"
