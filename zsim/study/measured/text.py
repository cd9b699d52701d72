"""Tables of measured and predicted runs: for an 80-column terminal, and in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zsim.report.views.result import Column
from zsim.report.views.text.plain import markdown, named_columns, paragraph, table
from zsim.study.measured.results import CheckResult, RowResult

_MAX_REASONS = 12


def check_lines(result: CheckResult) -> list[str]:
    """Every simulated row, then the errors by source and overall, then the skipped rows with the reasons."""
    simulated = [row for row in result.rows if row.status == "ok"]
    return [*_row_lines(simulated), *summary_lines(result)]


def summary_lines(result: CheckResult) -> list[str]:
    """The errors by source and overall, then the skipped rows with the reasons."""
    lines = [*_summary_lines(result), *_skipped_lines(result.rows)]
    return [*lines, *(line for note in result.notes for line in paragraph(note, first="note: ", indent=2))]


def _row_lines(rows: Sequence[RowResult]) -> list[str]:
    if not rows:
        return []
    columns = [
        *named_columns("row", "measured", "predicted", "error", "memory"),
        Column("fits", is_left=True),
    ]
    cells = [
        (
            row.row_id,
            _seconds(row.measured_seconds),
            _seconds(row.predicted_seconds),
            _signed_percent(row.relative_error),
            _signed_percent(row.memory_relative_error),
            _format_verdict(row),
        )
        for row in rows
    ]
    return [*table(columns, cells), ""]


def _format_verdict(row: RowResult) -> str:
    """The verdict with its probability, and the measured outcome where it was the less likely one."""
    verdict = row.verdict
    if verdict is None:
        return ""
    text = f"{verdict.word} {verdict.probability:.0%}"
    if verdict.word != "fits":
        text = f"{verdict.word} ({verdict.probability:.0%} that it fits)"
    if row.measured_fits in (None, verdict.is_likely):
        return text
    return f"{text} ({'ran' if row.measured_fits else 'out of memory'})"


def _summary_lines(result: CheckResult) -> list[str]:
    summary = result.to_dict()["summary"]
    rows = [
        _summary_cells(name, figures) for name, figures in (*summary["by_source"].items(), ("all", summary))
    ]
    lines = table(named_columns("source", "rows", "skipped", "mean", "median", "worst", "bias"), rows)
    macro = summary["mean_of_sources"]
    if len(summary["by_source"]) > 1 and macro["bias"] is not None:
        lines.append(
            f"mean of the sources: mean {_percent(macro['mean_absolute_error'])}, "
            f"median {_percent(macro['median_absolute_error'])}, bias {_signed_percent(macro['bias'])}"
        )
    within = summary["within_range"]
    if within["rows"]:
        lines.append(
            f"within their 80 % range, judged by other sources: {within['fraction']:.0%} of "
            f"{within['rows']:,} rows"
        )
    memory, fits = summary["memory"], summary["fits"]
    if memory["rows"]:
        lines.append(
            f"memory: {memory['rows']} rows, mean {_percent(memory['mean_absolute_error'])}, "
            f"worst {_percent(memory['worst_absolute_error'])}, bias {_signed_percent(memory['bias'])}"
        )
    if fits["rows"]:
        lines.append(f"fits or not: {fits['right']} of {fits['rows']} rows right")
    return lines


def _summary_cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    errors = (_percent(figures[f"{kind}_absolute_error"]) for kind in ("mean", "median", "worst"))
    return [name, f"{figures['rows']}", f"{figures['skipped']}", *errors, _signed_percent(figures["bias"])]


def _skipped_lines(rows: Sequence[RowResult]) -> list[str]:
    reasons = Counter(row.reason or "" for row in rows if row.status == "skipped")
    if not reasons:
        return []
    lines = ["", f"skipped: {sum(reasons.values())} rows"]
    most_common = reasons.most_common(_MAX_REASONS)
    lines += [f"{count:>6}  {_truncate(reason, 71)}" for reason, count in most_common]
    num_hidden = len(reasons) - len(most_common)
    return (
        [*lines, f"        and {num_hidden} more reasons (--json names every row's)"] if num_hidden else lines
    )


def markdown_lines(result: CheckResult) -> list[str]:
    """The errors by source and role as a Markdown table."""
    summary = result.to_dict()["summary"]
    columns = named_columns(
        "source", "rows", "skipped", "mean", "median", "worst", "bias", "memory rows", "memory mean",
        "fits right",
    )  # fmt: skip
    rows = []
    for name, figures in (*summary["by_source"].items(), ("**all**", summary)):
        if not figures["simulated"]:
            continue
        memory, fits = figures["memory"], figures["fits"]
        right = f"{fits['right']} of {fits['rows']}" if fits["rows"] else ""
        mean = _percent(memory["mean_absolute_error"])
        rows.append([*_summary_cells(name, figures), f"{memory['rows']}", mean, right])
    return markdown(columns, rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g} s"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _signed_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}%"


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
