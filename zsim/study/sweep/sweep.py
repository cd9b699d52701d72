"""Run a study from its file to its tables. Results that exist already are not simulated again."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from zsim.errors import ZsimError
from zsim.files import check_folder, make_folder, write_atomically
from zsim.study.progress import Progress
from zsim.study.sweep.identity import Identities, Record, Store
from zsim.study.sweep.points import Point, study_points
from zsim.study.sweep.pool import Task, run_tasks
from zsim.study.sweep.row import failed_record
from zsim.study.sweep.study_file import Study
from zsim.version import __version__

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


@dataclass(frozen=True)
class Sweep:
    """A study that has run, or was stopped."""

    study: Study
    points: Sequence[Point]
    rows: Sequence[Row]
    files: Mapping[str, Path]
    cached: int
    """The number of points that had results before the study ran."""
    is_stopped: bool

    @property
    def done(self) -> int:
        return sum(row["status"] != "not run" for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(row["status"] == "error" for row in self.rows)


def run_sweep(
    study: Study,
    out: Path | None,
    *,
    jobs: int,
    backend: str = "loky",
    scheduler: str | None = None,
    cache: Path | None = None,
    is_quiet: bool = False,
) -> Sweep:
    """Run the points without results and write `out`/results.csv and .parquet. Ctrl-C writes the results so
    far. Without `out` nothing is written.

    Results are kept by content in `cache` (default `out`/points). A point with the same experiment, files and
    zsim is never simulated twice, neither in this study nor in another one with the same cache.
    """
    if out is not None:
        check_folder(out)
    points = study_points(study)
    options: dict[str, Any] = {"jobs": jobs, "backend": backend, "scheduler": scheduler, "is_quiet": is_quiet}
    with points_folder(cache or (out and out / "points")) as folder:
        run = run_points(points, folder, **options)
    rows = result_rows(points, run.records, study.keys)
    files: Mapping[str, Path] = {}
    if out is not None:
        files = write_tables(rows, out)
        _write_summary(study, rows, out / "study.json")
    return Sweep(study, points, rows, files, run.cached, run.is_stopped)


@contextmanager
def points_folder(cache: Path | None) -> Iterator[Path]:
    """The folder of finished points: `cache`, or a temporary one that is removed afterwards."""
    if cache is not None:
        yield cache
        return
    with TemporaryDirectory(prefix="zsim-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class SweepRun:
    """The records of a run by the number of their point."""

    records: Mapping[int, Record]
    cached: int
    """The number of records that existed before."""
    is_stopped: bool


def run_points(
    points: Sequence[Point],
    folder: Path,
    *,
    jobs: int,
    backend: str = "loky",
    scheduler: str | None = None,
    is_quiet: bool = False,
) -> SweepRun:
    """Simulate the points whose results are not in `folder` yet. Ctrl-C ends the run early.

    Raises InputError, before anything is simulated, where `folder` cannot be made or written.
    """
    check_folder(folder)
    store = Store(folder)
    records, tasks, numbers = _plan_tasks(points, store)
    cached = sum(bool(record["identity"]) for record in records.values())  # not those refused just now
    is_stopped = False
    with Progress(len(points), len(records), is_quiet=is_quiet) as progress:

        def accept(record: Record) -> None:
            for number in numbers[record["identity"]]:
                records[number] = record
                progress.advance(is_ok=record["status"] == "ok")

        try:
            run_tasks(tasks, folder, accept, jobs=jobs, backend=backend, scheduler=scheduler)
        except KeyboardInterrupt:
            is_stopped = True
            for task in tasks:
                record = None if numbers[task.identity][0] in records else store.load(task.identity)
                if record is not None:
                    accept(record)
    return SweepRun(records, cached, is_stopped)


def _plan_tasks(
    points: Sequence[Point], store: Store
) -> tuple[dict[int, Record], list[Task], dict[str, list[int]]]:
    """(existing records by point, tasks to run, point numbers by identity). Equal points run once."""
    identities = Identities()
    records: dict[int, Record] = {}
    tasks: list[Task] = []
    numbers: dict[str, list[int]] = {}
    for point in points:
        experiment, error = point.experiment, point.error
        identity = ""
        if experiment is not None:
            try:
                identity = identities.identify(experiment)
            except ZsimError as refusal:
                error = str(refusal)
        if experiment is None or error is not None:
            records[point.number] = failed_record("", "InputError", error or "")
            continue
        if identity in numbers:
            numbers[identity].append(point.number)
            first = records.get(numbers[identity][0])
            if first is not None:
                records[point.number] = first
            continue
        numbers[identity] = [point.number]
        record = store.load(identity)
        if record is not None:
            records[point.number] = record
        else:
            tasks.append(Task(identity, experiment))
    return records, tasks, numbers


def _write_summary(study: Study, rows: Sequence[Row], path: Path) -> None:
    """Write a summary of the study that the tables belong to."""
    states = [row["status"] for row in rows]
    content = {
        "name": study.name,
        "zsim_version": __version__,
        "axes": [{key: [row[index] for row in axis.rows] for index, key in enumerate(axis.keys)}
                 for axis in study.axes],
        "where": [condition.text for condition in study.where],
        "points": {state: states.count(state) for state in ("ok", "error", "not run")},
    }  # fmt: skip
    write_atomically(path, json.dumps(content, indent=1) + "\n")
