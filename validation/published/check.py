"""Published runs against what is measured, and against the pins of a baseline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from validation.published.predict import predict_row
from validation.published.table import PublishedRun, read_runs
from zsim.files import CHECKOUT
from zsim.study.check.baseline import Baseline
from zsim.study.check.check import COUNTED, CheckReport, check_tables
from zsim.study.progress import Counts


def check_published(
    paths: Sequence[Path],
    base: Path = CHECKOUT,
    *,
    baseline: Baseline | None = None,
    is_fast: bool = False,
    update: bool = False,
) -> CheckReport:
    """Predict the rows of tables, and compare with the baseline, as `zsim check` does with one's own runs.

    Names of tables are relative to `base`. The caller writes a baseline that is updated.
    """
    tables: dict[str, Sequence[PublishedRun]] = {}
    notes: list[str] = []
    for path in paths:
        table = read_runs([path])
        tables[Path(os.path.relpath(path.resolve(), base.resolve())).as_posix()] = table.runs
        notes += table.notes
    with Counts(*COUNTED) as progress:
        return check_tables(
            tables,
            predict_row,
            baseline=baseline,
            is_fast=is_fast,
            update=update,
            on_done=progress.update,
            notes=notes,
        )
