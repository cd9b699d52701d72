"""Writes the shipped table of published memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from zsim.validated.memory import COLUMNS, DIGITS, MemoryRun


def format_memory_table(runs: Iterable[MemoryRun]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        writer.writerow(_format_cell(name, getattr(run, name)) for name in COLUMNS)
    return text.getvalue()


def _format_cell(name: str, value: str | float | bool | None) -> str:
    if value is None or isinstance(value, str | bool):
        return "" if value is None else str(value)
    return f"{value:.{DIGITS[name]}f}".rstrip("0").rstrip(".")
