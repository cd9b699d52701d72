"""Predicts the runs with tensor, pipeline or context parallelism of a table, and writes the error of each row
into parallel_errors.csv as it comes, then recorded_errors.csv, from which intervals come, and parallel.md.
Rows that are there are not predicted again; to begin anew, delete the file.

python -m validation.published.parallel TRAINING_RUNS.csv [--processes N] [--rows N] [--seconds S]
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from validation.published.frameworks import parallelism_table_lines
from validation.published.parallelism import model_ranks_of
from validation.published.predict import predict_row
from validation.published.recorded import record, recorded_runs
from validation.published.table import PublishedRun, read_runs
from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.measured.prediction import RowResult, error_figures, iterate_predictions

FOLDER = Path(__file__).parent
TABLE = FOLDER / "parallel_errors.csv"
PAGE = FOLDER / "parallel.md"
_TEXTS = ("row_id", "source", "role", "tier", "framework", "parallelism", "status", "reason", "memory_kind")
_FIGURES = ("measured_seconds", "predicted_seconds", "relative_error", "memory_relative_error")
_COLUMNS = (*_TEXTS, *_FIGURES)
_SEED = 1
_RECORDED_AT_ONCE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="?", help="none: only the page is written")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--rows", type=int, default=None, help="predict at most so many more")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="and none after so many seconds")
    asked = parser.parse_args()
    known = read_errors(TABLE)
    if asked.table is not None:
        runs = read_runs([asked.table]).runs
        todo = [run for run in chosen(runs) if run.row_id not in known][: asked.rows]
        recorded_runs()  # raises now, not after hours, if its columns are of another release
        append(todo, iterate_predictions(todo, predict_row, processes=asked.processes), asked.seconds)
        known = read_errors(TABLE)
    PAGE.write_text("\n".join(page(list(known.values()))) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


def chosen(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The rows in which ranks share a replica of a dense model, of roles that are predicted; in an order
    drawn once, so that any beginning of it is a sample."""
    found = [
        run
        for run in runs
        if model_ranks_of(run) > 1
        and "moe{" not in run.text("notes")
        and (run.count("ep") or 1) == 1
        and run.role != "trend"
    ]
    Random(_SEED).shuffle(found)
    return found


def append(runs: Sequence[PublishedRun], rows: Iterator[RowResult], most_seconds: float) -> None:
    """Append the rows of the runs to the table as they come, until `most_seconds` have passed, and record
    them, every few and where it is interrupted: a row that is in the table is not predicted again."""
    began, is_new = time.monotonic(), not TABLE.exists()
    done: list[tuple[PublishedRun, RowResult]] = []
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(_COLUMNS)
        try:
            for run, row in zip(runs, rows, strict=False):
                writer.writerow(cells_of(row))
                file.flush()
                done.append((run, row))
                if time.monotonic() - began > most_seconds:
                    break
                if len(done) == _RECORDED_AT_ONCE:
                    record(done)
                    done.clear()
        finally:
            record(done)


def cells_of(row: RowResult) -> list[str]:
    """The row of the table: seconds to six digits, errors to five decimals."""
    texts = [str(getattr(row, name) or "") for name in _TEXTS]
    seconds = [_number(value, ".6g") for value in (row.measured_seconds, row.predicted_seconds)]
    return [*texts, *seconds, *(_number(e, ".5f") for e in (row.relative_error, row.memory_relative_error))]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def read_errors(path: Path) -> dict[str, RowResult]:
    """The rows of the table by name; none without a file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {cells["row_id"]: _row_of(cells) for cells in csv.DictReader(file)}


def _row_of(cells: Mapping[str, str]) -> RowResult:
    row = RowResult(cells["row_id"], cells["source"], cells["status"])
    figures = {name: float(cells[name]) if cells[name] else None for name in _FIGURES}
    return replace(
        row,
        reason=cells["reason"] or None,
        role=cells["role"],
        tier=cells["tier"],
        framework=cells["framework"],
        parallelism=cells["parallelism"],
        memory_kind=cells["memory_kind"] or None,
        measured_seconds=figures["measured_seconds"],
        predicted_seconds=figures["predicted_seconds"],
        relative_error=figures["relative_error"],
        memory_relative_error=figures["memory_relative_error"],
    )


def page(rows: Sequence[RowResult]) -> list[str]:
    """parallel.md."""
    skipped = [row for row in rows if row.status == "skipped"]
    complete = sum(row.tier in ("A", "B") for row in rows)
    left_out = sum(row.tier in ("A", "B") for row in skipped)
    lines = [
        "# Tensor, pipeline and context parallelism: errors on published runs",
        "",
        "Written by `python -m validation.published.parallel TRAINING_RUNS.csv`:",
        f"{len(rows):,} rows, of which {len(rows) - len(skipped):,} are predicted; no mixtures of experts.",
        "Errors are of the step's time, predicted over measured, less one; every row is in",
        "[parallel_errors.csv](parallel_errors.csv), the causes are in [README.md](README.md).",
        "",
    ]
    for title, role in (("Rows of role report: no constant is fitted to them", "report"), ("All rows", "")):
        own = [row for row in rows if row.relative_error is not None and role in ("", row.role)]
        lines += [f"## {title}", "", *parallelism_table_lines(own), "", *source_lines(own), ""]
    lines += [
        "## Skipped",
        "",
        f"{left_out} of {complete:,} rows of tiers A and B, and {len(skipped) - left_out} of tier C.",
        "",
    ]
    return [*lines, *reason_lines(skipped)]


def source_lines(rows: Sequence[RowResult]) -> list[str]:
    """Errors by source."""
    names = sorted({row.source for row in rows})
    columns = named_columns(
        "source", "rows", "bias", "mean", "median", "within 10 %", "memory rows", "memory mean"
    )
    cells = []
    for name in names:
        own = [row for row in rows if row.source == name]
        figures = error_figures(row.relative_error or 0.0 for row in own)
        memory = [row.memory_relative_error for row in own if row.memory_relative_error is not None]
        held = error_figures(memory)["mean_absolute_error"]
        cells.append(
            (
                name,
                str(len(own)),
                f"{figures['bias']:+.1%}",
                f"{figures['mean_absolute_error']:.1%}",
                f"{figures['median_absolute_error']:.1%}",
                f"{figures['within_10_percent_fraction']:.0%}",
                str(len(memory)),
                "" if held is None else f"{held:.1%}",
            )
        )
    return markdown(columns, cells)


def reason_lines(skipped: Sequence[RowResult]) -> list[str]:
    """The reasons for which rows are skipped, numbers left out, with their sources."""
    reasons = Counter((re.sub(r"\d[\d,.]*", "n", row.reason or ""), row.source, row.tier) for row in skipped)
    columns = named_columns("source", "tier", "rows", "reason")
    cells = [(source, tier, str(count), reason) for (reason, source, tier), count in sorted(reasons.items())]
    return markdown(columns, cells)


if __name__ == "__main__":
    main()
