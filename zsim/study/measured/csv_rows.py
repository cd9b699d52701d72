"""Read the rows of a CSV file with a header line."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zsim.errors import InputError, unreadable_reason
from zsim.reading import read_bytes


def read_csv_rows(
    path: Path, check_columns: Callable[[list[str]], None]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(position for messages, cells by column) of every row that is not empty.

    `check_columns` is called with the header first. Raises InputError for a file that is missing, empty, no
    CSV table, without rows, or with rows of another length than the header.
    """
    reader = csv.DictReader(_text(path).splitlines(), strict=True)
    has_rows = False
    try:
        columns = [column.strip() for column in reader.fieldnames or ()]
        reader.fieldnames = columns
        check_columns(columns)
        for row in reader:
            where = f"{path.name}: line {reader.line_num}"
            cells = _clean_cells(where, row)
            if any(cells.values()):
                has_rows = True
                yield where, cells
        if not has_rows:
            raise InputError(f"{path.name}: no row below the header line; expected one per measured run")
    except csv.Error as error:
        raise InputError(f"{path.name}: line {reader.line_num}: not a CSV file: {error}") from None


def check_names(name: str, columns: list[str]) -> None:
    """Raise InputError for columns without a name, and for two of one name."""
    if columns.count("") > 1:
        raise InputError(f"{name}: line 1: {columns.count('')} columns have no name")
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise InputError(f"{name}: the column '{repeated[0]}' stands there twice")


def _text(path: Path) -> str:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a CSV table of measured runs") from None
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    if not content.strip():
        raise InputError(f"{path.name}: the file is empty; expected a CSV table of measured runs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not a CSV file: not UTF-8 text") from None


def _clean_cells(where: str, row: Mapping[str | None, str | None]) -> dict[str, str]:
    if None in row:
        raise InputError(f"{where}: more cells than the header has columns")
    if None in row.values():
        raise InputError(f"{where}: fewer cells than the header has columns; is the file whole?")
    return {str(column): str(value).strip() for column, value in row.items()}
