"""Read tables of published steps of reinforcement learning, and of runs of inference engines.

A table of engines has a column `output_len`, one of steps has `placement`. No other column but `row_id` has
to be there, and those of outcomes may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zsim.errors import InputError
from zsim.study.measured.experiment_table import check_names, read_csv_rows


@dataclass(frozen=True)
class RlRow:
    """One row of a table."""

    row_id: str
    cells: Mapping[str, str]
    """The cells by column, as text."""
    is_engine: bool
    """The row is of an engine alone."""

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """The first number in the cell, or None without any: "1,024 (max)" is 1024."""
        match = re.search(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", self.text(column))
        return float(match[0].replace(",", "")) if match else None

    def count(self, column: str) -> int | None:
        """The first number in the cell as a whole one, or None without any."""
        value = self.number(column)
        return None if value is None else round(value)

    def has_word(self, pattern: str, *columns: str) -> bool:
        """Whether a pattern is found in any of the columns, in capitals or not."""
        return any(re.search(pattern, self.text(column), re.IGNORECASE) for column in columns)


def read_rows(paths: Iterable[Path]) -> list[RlRow]:
    """The rows of CSV files, in order.

    Raises InputError for a file that is missing, empty, or no such table.
    """
    rows: list[RlRow] = []
    for path in paths:
        columns: list[str] = []

        def check(names: list[str], path: Path = path, columns: list[str] = columns) -> None:
            check_names(path.name, names)
            if not {"output_len", "placement"} & set(names):
                raise InputError(
                    f"{path.name}: line 1: found {', '.join(names)[:60]!r}, expected a header line with "
                    "'placement' (steps of reinforcement learning) or 'output_len' (runs of an engine)"
                )
            columns.extend(names)

        for where, cells in read_csv_rows(path, check):
            row_id = cells.get("row_id") or where.removeprefix(f"{path.name}: ")
            rows.append(RlRow(row_id, cells, "placement" not in columns))
    return rows
