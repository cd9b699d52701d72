"""Errors of published mixtures of experts by source, hardware and precision, as a table in Markdown.

    python -m validation.published.experts RUNS.csv

predicts the rows of role calibrate and report that have routed experts and are not in expert_errors.csv yet,
and writes them there as they come (measured, predicted, signed error, or why a row is skipped), then into
recorded_errors.csv, from which intervals are made; then rewrites EXPERTS.md, the table, with
experts_remaining.md behind it. Rows of deep pipelines take minutes. Delete expert_errors.csv to predict all
again.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

from validation.published.mixtures import is_mixture
from validation.published.predict import predict_row
from validation.published.recorded import record, recorded_runs
from validation.published.table import PublishedRun, read_runs
from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.measured.prediction import RowResult

HERE = Path(__file__).parent
COLUMNS = (
    "row_id", "source", "role", "gpu", "precision", "measured_s", "predicted_s", "error", "memory_error",
    "reason",
)  # fmt: skip
Line = dict[str, str]


def line_of(run: PublishedRun, row: RowResult) -> Line:
    """The line of a mixture of experts."""
    figures = row.measured_seconds, row.predicted_seconds, row.relative_error, row.memory_relative_error
    known = row.row_id, row.source, row.role, run.text("gpu"), run.text("precision")
    return dict(zip(COLUMNS, (*known, *map(_text, figures), row.reason or ""), strict=True))


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def tables(lines: Sequence[Line]) -> str:
    """The errors by source, hardware, precision and role, and the reasons of what is skipped."""
    parts: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for line in lines:
        if line["error"]:
            error, is_fp8 = float(line["error"]), "fp8" in line["precision"].lower()
            parts[line["source"], line["gpu"], "fp8" if is_fp8 else "16 bits", line["role"]].append(error)
            parts["**all**", "", "fp8" if is_fp8 else "16 bits", line["role"]].append(error)
    columns = named_columns("source", "GPU", "precision", "role", "rows", "mean", "median", "worst", "bias")
    cells = [(*key, str(len(errors)), *_figures(errors)) for key, errors in sorted(parts.items())]
    reasons = Counter(line["reason"] for line in lines if line["reason"])
    return "\n".join(
        [
            "# Published mixtures of experts",
            "",
            "Errors of the predicted step: mean, median and worst of the absolute ones, and the signed mean.",
            "Written by experts.py from expert_errors.csv, where every row stands.",
            "",
            *markdown(columns, cells),
            "",
            "Skipped rows:",
            "",
            *(f"- {count}: {reason}" for reason, count in reasons.most_common()),
            "",
            (HERE / "experts_remaining.md").read_text(encoding="utf-8"),
        ]
    )


def _figures(errors: Iterable[float]) -> tuple[str, ...]:
    signed = list(errors)
    sizes = [abs(error) for error in signed]
    return (f"{mean(sizes):.1%}", f"{median(sizes):.1%}", f"{max(sizes):.1%}", f"{mean(signed):+.1%}")


@contextmanager
def record_at_end(done: Sequence[tuple[PublishedRun, RowResult]]) -> Iterator[None]:
    """A context at whose end, an interrupted one's too, what is done is recorded: rows of the table are not
    predicted again."""
    try:
        yield
    finally:
        record(done)


def main() -> None:
    """Predict what is missing, and write both files."""
    path = HERE / "expert_errors.csv"
    lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
    known = {line["row_id"] for line in lines}
    done: list[tuple[PublishedRun, RowResult]] = []
    recorded_runs()  # raises now, not after all rows, if its columns are of another release
    with path.open("a", newline="", encoding="utf-8") as file, record_at_end(done):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not lines:
            writer.writeheader()
        for run in read_runs([Path(sys.argv[1])]).runs:
            if is_mixture(run) and run.role != "trend" and run.row_id not in known:
                done.append((run, predict_row(run)))
                lines.append(line_of(*done[-1]))
                writer.writerow(lines[-1])
                file.flush()
    (HERE / "EXPERTS.md").write_text(tables(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
