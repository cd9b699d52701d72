"""Run a study from its file to its tables. Results that exist already are not simulated again."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zsim.errors import InputError, ZsimError
from zsim.files import EXAMPLE, check_folder, make_folder, write_atomically
from zsim.report.views.displayable import Displayable, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import COMMUNICATION
from zsim.report.views.result import Column
from zsim.report.views.text.plain import table
from zsim.specs.experiment.load import ExperimentSource, plain_table
from zsim.specs.experiment.tables import Experiment
from zsim.specs.user_code import UserCode
from zsim.study.progress import Progress
from zsim.study.sweep.points import Point, study_points
from zsim.study.sweep.pool import Task, run_tasks
from zsim.study.sweep.records import Identities, Record, Store, failed_record, points_folder
from zsim.study.sweep.study_file import Study, load_study, study_from
from zsim.units import format_amount, format_bytes, format_percent
from zsim.version import __version__

Row = dict[str, Any]
_SCALARS = frozenset({bool, int, float, str})
_NUM_BEST = 5
_RESULTS = ("status", "fits", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction", "gpu_peak_bytes")
_RUN_COLUMNS = ("expected_days", "goodput_fraction", "run_gpu_hours", "run_money")


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


@dataclass(frozen=True, repr=False)
class SweepResult(Displayable):
    """A study that has run: `rows`, `to_frame()`, `best()`, and step times as `figure()`.

    A point that cannot be simulated is a row with `status` "error" and its reason in `error`.
    """

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

    def records(self) -> Sequence[Row]:
        """One row per point: the axes' values, the resolved settings, the results."""
        return self.rows

    def best(self, count: int = _NUM_BEST) -> list[Row]:
        """The rows of the `count` points that fit with the most tokens per second and GPU, best first.

        Of equal ones, complete runs with the fewest days come first.
        """
        return sorted(self._fitting_rows(), key=_sort_key)[:count]

    def headline(self) -> str:
        fresh = self.done - self.cached
        return (
            f"{self.done} of {len(self.rows)} points: {fresh} simulated, {self.cached} known, {self.failed} "
            "failed"
        )

    def columns(self) -> Sequence[str]:
        run_columns = [name for name in _RUN_COLUMNS if any(row.get(name) is not None for row in self.rows)]
        failed = ["error"] if self.failed else []
        return [*self.study.keys, *_RESULTS, *run_columns, *failed]

    def lines(self) -> Iterator[str]:
        yield self.headline()
        best = self.best()
        if best:
            cells = _cells_per_column(best)
            columns = [
                *map(Column, cells),
                Column(f"fastest that fit, of {len(self._fitting_rows())}", is_left=True),
            ]
            rows = [
                [*(cell(row) for cell in cells.values()), ", ".join(_values(row, self.study.keys))]
                for row in best
            ]
            yield from ["", *table(columns, rows)]
        yield from _reasons("failed", [row["error"] for row in self.rows if row["status"] == "error"])
        yield from _reasons("without a whole run", [row.get("run_error") for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The rows with the axes, as plain data."""
        return {"name": self.study.name, "axes": list(self.study.keys), "rows": [dict(r) for r in self.rows]}

    def plots(self) -> Figures:
        return {"points": lambda: points_figure(self)}

    def pages(self) -> Mapping[str, str]:
        return {"results.csv": csv_text(self.rows)}

    def _fitting_rows(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "ok" and row["fits"]]


def run_sweep(
    study: Study,
    out: Path | None,
    *,
    jobs: int,
    backend: str = "loky",
    scheduler: str | None = None,
    cache: Path | None = None,
    is_quiet: bool = False,
) -> SweepResult:
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
    return SweepResult(study, points, rows, files, run.cached, run.is_stopped)


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


def sweep(
    study: ExperimentSource,
    axes: Mapping[str, Iterable[Any]] | None = None,
    *,
    zipped: Iterable[Mapping[str, Iterable[Any]]] = (),
    where: str | Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    backend: str = "loky",
    scheduler: str | None = None,
    code: UserCode | None = None,
) -> SweepResult:
    """Simulate an experiment at every combination of the values of `axes`, as `zsim sweep` does.

    `study` is a study file (or its content as a dict). With `axes` it is an experiment instead: a file, a
    `zsim.Experiment`, a dict, or None for the README's example. Keys of `axes` are dotted keys of the
    experiment, and values may be typed settings. `zipped` holds axes whose values go in parallel. `where`
    holds conditions on the keys, e.g. "nodes * 8 >= 16". `overrides` are keys that are set at all points.
    `out` is a folder in which results.csv and results.parquet are written too. `cache` is a folder of
    finished points, which are not simulated again. `jobs` is the number of processes, by default that of
    cores. `code` is the permission to run functions that files name as models, which `zsim sweep
    --allow-code` gives.

        found = zsim.sweep(None, {"nodes": [2, 4], "training.micro_batch_size": [1, 2]})
        found.to_frame().sort_values("step_seconds")

    Raises InputError for an unknown key and a condition that keeps no point.
    """
    loaded_study = _study(study, axes, list(zipped), where, overrides or {}, code)
    return run_sweep(
        loaded_study,
        None if out is None else Path(out),
        jobs=jobs or os.cpu_count() or 1,
        backend=backend,
        scheduler=scheduler,
        cache=None if cache is None else Path(cache),
    )


def _study(
    source: ExperimentSource,
    axes: Mapping[str, Iterable[Any]] | None,
    zipped: list[Mapping[str, Iterable[Any]]],
    where: str | Sequence[str],
    overrides: Mapping[str, Any],
    code: UserCode | None,
) -> Study:
    changes = {key: plain_table(value) for key, value in overrides.items()}
    if axes is None and not zipped:
        if isinstance(source, str | Path):
            return load_study(source, changes, code)
        if isinstance(source, Mapping):
            return study_from(source, folder=Path.cwd(), overrides=changes, code=code)
        raise InputError("sweep: nothing varies; expected a study file, or axes={'nodes': [1, 2, 4]}")
    data: dict[str, Any] = {
        "axes": _plain_axes(axes or {}),
        "zip": [_plain_axes(zipped_axes) for zipped_axes in zipped],
    }
    data["where"] = where if isinstance(where, str) else list(where)
    if isinstance(source, Experiment):
        data["base"] = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        data["base"] = {key: plain_table(value) for key, value in source.items()}
    else:
        data["experiment"] = str(Path(EXAMPLE if source is None else source).resolve())
    return study_from(data, folder=Path.cwd(), overrides=changes, code=code)


def _plain_axes(axes: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """The axes with lists of plain values. Ranges ({from, to, factor}) stay."""
    columns: dict[str, Any] = {}
    for key, values in axes.items():
        if isinstance(values, Mapping | str) or not isinstance(values, Iterable):
            columns[key] = values  # a range, or refused with the rest of what is wrong
            continue
        plain_values = values.tolist() if hasattr(values, "tolist") else values
        columns[key] = [plain_table(value) for value in plain_values]
    return columns


def _values(row: Row, keys: Sequence[str]) -> Iterator[str]:
    """The row's values of the keys. A label replaces the tables next to it."""
    if "label" in keys:
        yield str(row["label"])
    for key in keys:
        value = row[key]
        if key != "label" and not ("label" in keys and isinstance(value, dict)):
            yield (
                f"{key.rpartition('.')[2]} {value:g}"
                if isinstance(value, float)
                else (f"{key.rpartition('.')[2]} {value}")
            )


def _sort_key(row: Row) -> tuple[float, float]:
    days = row.get("expected_days")
    return -(row["tokens_per_second_per_gpu"] or 0.0), math.inf if days is None else days


def _reasons(label: str, reasons: Iterable[str | None]) -> Iterator[str]:
    """The most frequent reasons, each with how many points it is of."""
    for reason, count in Counter(filter(None, reasons)).most_common(_NUM_BEST):
        yield f"\n{count} {label}: {reason}"


def _cells_per_column(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """A cell of each column, by its title. Complete runs have their days, goodput and cost instead of the
    MFU.
    """
    tokens = {"tokens/s/GPU": lambda row: f"{row['tokens_per_second_per_gpu'] or 0.0:,.0f}"}
    memory = {"GPU memory": lambda row: format_bytes(row["gpu_peak_bytes"])}
    if all(row.get("expected_days") is None for row in rows):
        return {**tokens, "MFU": lambda row: format_percent(row["mfu_fraction"], ""), **memory}
    is_priced = any(row.get("run_money") is not None for row in rows)
    cost = "run_money" if is_priced else "run_gpu_hours"
    return {
        **tokens,
        **memory,
        "days": lambda row: format_amount(row.get("expected_days")),
        "goodput": lambda row: format_percent(row.get("goodput_fraction"), ""),
        "cost" if is_priced else "GPU-hours": lambda row: format_amount(row.get(cost)),
    }


def points_figure(sweep_result: SweepResult) -> Figure:
    """Tokens per second and GPU over GB of the fullest GPU, one mark per point. Open marks do not fit."""
    figure = Figure(layout(460, hovermode="closest"))
    for name, fits, symbol in (("fits", True, "circle"), ("does not fit", False, "circle-open")):
        rows = [row for row in sweep_result.rows if row["status"] == "ok" and row["fits"] is fits]
        figure.add_scatter(
            name=name, mode="markers", marker={"color": COMMUNICATION.color, "symbol": symbol, "size": 9},
            x=[row["gpu_peak_bytes"] / 1e9 for row in rows],
            y=[row["tokens_per_second_per_gpu"] or 0.0 for row in rows],
            hovertext=["<br>".join(_values(row, sweep_result.study.keys)) for row in rows], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero")
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="tozero", automargin=True)
    return figure
