"""A study's results as tables: CSV, and Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zsim.files import make_folder, write_atomically
from zsim.study.sweep.points import Point
from zsim.study.sweep.store import Record

Row = dict[str, Any]
_SCALARS = frozenset({bool, int, float, str})


def result_rows(points: Sequence[Point], records: Mapping[int, Record], keys: Sequence[str]) -> list[Row]:
    """One row per point: its number and state, the axes' values, the resolved settings and the results.

    A setting that is also an axis has the axis's value. A point that has not run yet has no results.
    """
    columns: dict[str, None] = {}
    for cached in records.values():
        columns |= dict.fromkeys(cached["row"])
    rows = []
    for point in points:
        record = records.get(point.number)
        results: Row = {} if record is None else record["row"]
        row: Row = {"point": point.number, "status": "not run", "error": None}
        if record is not None:
            row |= {"status": record["status"], "error": record["error"]}
        row |= {key: point.values[key] for key in keys}
        row |= {name: results.get(name) for name in columns if name not in keys}
        row["identity"] = record["identity"] if record is not None else None
        rows.append(row)
    return rows


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV: numbers in full precision, tables and objects as JSON, None as an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(rows[0]) if rows else []
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in names])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    return json.dumps(value) if isinstance(value, Mapping | list | tuple) else value


def write_tables(rows: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Write results.csv, and results.parquet where pyarrow is installed. Returns the paths by kind."""
    paths = {"csv": folder / "results.csv"}
    make_folder(folder)
    write_atomically(paths["csv"], csv_text(rows))
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return paths
    paths["parquet"] = folder / "results.parquet"
    _write_parquet(rows, paths["parquet"])
    return paths


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write Parquet with one type per column: a column of mixed types (true, 8, "none") is text, as in the
    CSV."""
    import pyarrow
    from pyarrow import parquet

    columns = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds <= {int, float} and len(kinds) == 2:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1 or not kinds <= _SCALARS:
            values = [None if value is None else str(_cell(value)) for value in values]
        columns[name] = values
    content = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), content)
    write_atomically(path, content.getvalue())
