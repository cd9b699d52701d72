"""The validated runs of tables that are not in the checkout.

They are recorded when their rows are predicted, which takes long. Merged with the runs of the checkout's
tables they make the table that intervals are derived from (`validation/published/accuracy.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from validation.published.shipped import format_validated_table
from validation.published.table import PublishedRun
from validation.published.validation_rows import validated_run_of
from zsim.study.measured.prediction import RowResult
from zsim.validated.runs import ValidatedRun, read_validated

TABLE = Path(__file__).resolve().parent / "recorded_errors.csv"
COMPLETE = ("A", "B")  # tier C lacks settings, and is kept for its memory


def recorded_runs(path: Path = TABLE) -> list[ValidatedRun]:
    """The recorded runs. Empty without a file."""
    return list(read_validated(path.read_text(encoding="utf-8"))) if path.exists() else []


def record(pairs: Iterable[tuple[PublishedRun, RowResult]], path: Path = TABLE) -> None:
    """Add the predicted runs to the recorded ones, replacing older versions of the same rows. A run that is
    skipped now is removed.
    """
    runs = {run.row_id: run for run in recorded_runs(path)}
    for run, result in pairs:
        validated = validated_run_of(run, result) if result.tier in COMPLETE else None
        if validated is None:
            runs.pop(run.row_id, None)
        else:
            runs[run.row_id] = validated
    path.write_text(format_validated_table(runs[name] for name in sorted(runs)), encoding="utf-8")


def merge_runs(table_runs: Sequence[ValidatedRun], recorded: Sequence[ValidatedRun]) -> list[ValidatedRun]:
    """A table's own runs, then the recorded ones that it does not have."""
    row_ids = {run.row_id for run in table_runs}
    return [*table_runs, *(run for run in recorded if run.row_id not in row_ids)]
