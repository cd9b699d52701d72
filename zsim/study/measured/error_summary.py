"""Measured runs against a baseline: no source may be predicted worse than the baseline has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from zsim.errors import shorten
from zsim.report.views.result import Column
from zsim.report.views.text.plain import markdown, named_columns, paragraph, table
from zsim.study.check.baseline import Baseline, CheckRow, Outcome
from zsim.study.measured.prediction import CheckResult, RowResult, summarise

# Half a percentage point: less than the change of medians between releases of the measured software.
MARGIN = 0.005
_ERRORS = (
    ("mean_absolute_error", "mean error of step times"),
    ("memory_mean_absolute_error", "mean error of memory"),
)
_MAX_NAMED = 3
_MAX_PINNED_ROWS = 200


def error_summaries(rows: Sequence[RowResult]) -> dict[str, dict[str, Any]]:
    """The figures of each source that a baseline stores."""
    return {name: _error_summary(figures) for name, figures in summarise(rows)["by_source"].items()}


def overall_error_summary(rows: Sequence[RowResult]) -> dict[str, Any]:
    """The figures that a baseline stores, over all rows."""
    return _error_summary(summarise(rows))


def table_lines(sources: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any]) -> list[str]:
    """The errors of the sources with simulated rows, in Markdown."""
    rows = []
    for name, summary in (*sorted(sources.items()), ("**all**", overall)):
        if not summary["simulated"]:
            continue
        memory = summary["memory_mean_absolute_error"]
        row = (
            name,
            str(summary["rows"]),
            *(_percent(summary[key]) for key in ("mean_absolute_error", "median_absolute_error")),
            _percent(summary["worst_absolute_error"]),
            "" if summary["bias"] is None else f"{summary['bias']:+.1%}",
            "" if memory is None else f"{memory:.1%} of {summary['memory_rows']}",
            f"{summary['fits_right']} of {summary['fits_rows']}" if summary["fits_rows"] else "",
        )
        rows.append(row)
    columns = named_columns(
        "source", "rows", "mean", "median", "worst", "bias", "memory, mean", "fits, right"
    )
    return markdown(columns, rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


_FIGURES = (
    "rows", "simulated", "skipped", "mean_absolute_error", "median_absolute_error", "worst_absolute_error",
    "bias", "within_10_percent_fraction",
)  # fmt: skip


def _error_summary(figures: Mapping[str, Any]) -> dict[str, Any]:
    summary = {
        **{name: figures[name] for name in _FIGURES},
        **{f"memory_{name}": figures["memory"][name] for name in ("rows", "mean_absolute_error")},
        **{f"fits_{name}": figures["fits"][name] for name in ("rows", "right")},
    }
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in summary.items()}


def published_rows(
    table: str, rows: Sequence[RowResult], baseline: Baseline | None, kind: Literal["sources", "sample"]
) -> Iterator[CheckRow]:
    """Each source of a table against its pinned figures. Empty without a baseline."""
    if baseline is None:
        return
    pinned = baseline.cases.get(table, {}).get(kind, {})
    unknown = sorted({row.source for row in rows} - set(pinned))
    if unknown:
        text = f"not pinned: {', '.join(unknown)}; --update-baseline adds them"
        yield CheckRow(table, "baseline", "fail", text)
    for source, now in error_summaries(rows).items():
        case, pinned_summary = f"{table}: {source}", pinned.get(source)
        if pinned_summary is None:
            continue
        source_rows = [row for row in rows if row.source == source]
        yield _count_row(case, "rows simulated", now["simulated"], pinned_summary.get("simulated", 0))
        yield _count_row(case, "fits or not, right", now["fits_right"], pinned_summary.get("fits_right", 0))
        for name, title in _ERRORS:
            if now[name] is not None and pinned_summary.get(name) is not None:
                yield _error_row(
                    case, title, now[name], pinned_summary[name], source_rows, is_memory="memory" in name
                )


def row_pins(rows: Sequence[RowResult]) -> dict[str, float | None]:
    """The predicted step of each row in seconds, to pin. Empty for a large table, for which the sources
    suffice.
    """
    if len(rows) > _MAX_PINNED_ROWS:
        return {}
    return {row.row_id: _round_seconds(row.predicted_seconds) for row in rows}


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.9g}")


def changed_rows(table: str, rows: Sequence[RowResult], baseline: Baseline | None) -> Iterator[CheckRow]:
    """A line for each row whose prediction differs from the pinned one, and a passing line with the number of
    the others."""
    pinned = baseline.cases.get(table, {}).get("rows", {}) if baseline is not None else {}
    if baseline is None or not pinned:
        return
    tolerance, count = baseline.tolerances_of(table).step, 0
    for row in rows:
        if row.row_id not in pinned:
            continue
        before, now = pinned[row.row_id], row.predicted_seconds
        if (before is None) != (now is None):
            text = f"skipped now: {row.reason}" if now is None else "skipped in the baseline, simulated now"
            yield CheckRow(f"{table}: {row.row_id}", "step", "fail" if now is None else "pass", text)
        elif before is not None and now is not None and abs(now - before) > tolerance * before:
            text = f"{before:.4g} s pinned, {now:.4g} s simulated"
            error = now / before - 1
            yield CheckRow(f"{table}: {row.row_id}", "step", "fail", text, now, before, error, tolerance)
        else:
            count += 1
    yield CheckRow(table, f"{count} rows predicted as pinned", "pass")


def _count_row(case: str, title: str, now: int, before: int) -> CheckRow:
    outcome: Outcome = "fail" if now < before else "pass"
    text = f"{before} in the baseline, {now} now" if now != before else ""
    return CheckRow(case, title, outcome, text, now, before)


def _error_row(
    case: str, title: str, now: float, before: float, rows: Sequence[RowResult], *, is_memory: bool
) -> CheckRow:
    outcome: Outcome = "fail" if now > before + MARGIN else "pass"
    text = ""
    if outcome == "fail":
        text = f"{before:.1%} in the baseline, {now:.1%} now; worst {_worst_rows(rows, is_memory)}"
    elif now < before - MARGIN:
        text = f"{before:.1%} in the baseline, {now:.1%} now: --update-baseline keeps the gain"
    return CheckRow(case, title, outcome, text, now, before, now - before, MARGIN)


def _worst_rows(rows: Sequence[RowResult], is_memory: bool) -> str:
    errors = [(row.memory_relative_error if is_memory else row.relative_error, row.row_id) for row in rows]
    scored = [(error, row_id) for error, row_id in errors if error is not None]
    scored.sort(key=lambda pair: -abs(pair[0]))
    return ", ".join(f"{row_id} {error:+.1%}" for error, row_id in scored[:_MAX_NAMED])


# -- Tables of measured and predicted runs: for an 80-column terminal, and in Markdown ---------------------


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
        summary_cells(name, figures) for name, figures in (*summary["by_source"].items(), ("all", summary))
    ]
    lines = table(named_columns("source", "rows", "skipped", "mean", "median", "worst", "bias"), rows)
    macro = summary["mean_of_sources"]
    if len(summary["by_source"]) > 1 and macro["bias"] is not None:
        lines.append(
            f"mean of the sources: mean {format_error(macro['mean_absolute_error'])}, "
            f"median {format_error(macro['median_absolute_error'])}, bias {_signed_percent(macro['bias'])}"
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
            f"memory: {memory['rows']} rows, mean {format_error(memory['mean_absolute_error'])}, "
            f"worst {format_error(memory['worst_absolute_error'])}, bias {_signed_percent(memory['bias'])}"
        )
    if fits["rows"]:
        lines.append(f"fits or not: {fits['right']} of {fits['rows']} rows right")
    return lines


def summary_cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    """The row of a source: its numbers of rows, its errors and its bias."""
    errors = (format_error(figures[f"{kind}_absolute_error"]) for kind in ("mean", "median", "worst"))
    return [name, f"{figures['rows']}", f"{figures['skipped']}", *errors, _signed_percent(figures["bias"])]


def _skipped_lines(rows: Sequence[RowResult]) -> list[str]:
    reasons = Counter(row.reason or "" for row in rows if row.status == "skipped")
    if not reasons:
        return []
    lines = ["", f"skipped: {sum(reasons.values())} rows"]
    most_common = reasons.most_common(_MAX_REASONS)
    lines += [f"{count:>6}  {shorten(reason, 71)}" for reason, count in most_common]
    num_hidden = len(reasons) - len(most_common)
    return (
        [*lines, f"        and {num_hidden} more reasons (--json names every row's)"] if num_hidden else lines
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g} s"


def format_error(value: float | None) -> str:
    """E.g. "4.2%". Empty without an error."""
    return "" if value is None else f"{100 * value:.1f}%"


def _signed_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}%"
