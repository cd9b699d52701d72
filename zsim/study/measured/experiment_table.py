"""Tables of one's own measured runs, whose columns are keys of the experiment file.

    row_id,source,model,cluster,nodes,training.micro_batch_size,strategy.kind,step_seconds,gpu_bytes,fits
    llama-1,march,llama-3-8b,dgx-h100,4,2,fsdp2,1.93,51200000000,true

A key is dotted, and its cell is written as `--set` takes it. An empty cell leaves its key out. Paths are
relative to the table.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, unreadable_reason
from zsim.explain.job import step_work
from zsim.files import make_folder, write_atomically
from zsim.reading import read_bytes
from zsim.specs.cluster.files import check_hardware_key
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, parse_setting, resolve_paths
from zsim.specs.experiment.overrides import set_dotted_key
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.toml import experiment_toml
from zsim.specs.key_index import first_unknown_segment, keys_at, nearest_key
from zsim.study.measured.prediction import RowResult, predict_job

ROW_ID = "row_id"
SOURCE = "source"
OUTCOMES: Mapping[str, str] = {
    "step_seconds": "seconds of an optimizer step",
    "tokens_per_second_per_gpu": "the same as throughput, where there is no step_seconds",
    "gpu_bytes": "the peak of the fullest GPU, as `peak_bytes.gpu.total` of --json",
    "fits": "whether it ran: true, or false for out of memory",
}
"""The columns of outcomes and their meaning. Any of their cells may be empty."""
_COLUMNS = (ROW_ID, SOURCE, *OUTCOMES)
_PUBLISHED = frozenset(("n_layers", "n_gpus"))  # of tables in the columns of published runs
_IN_FILES = ("model.", "cluster.", "gpu.", "strategy.config.")  # keys inside files that an experiment names
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class ExperimentRun:
    """One row of a table."""

    row_id: str
    source: str
    experiment: Experiment
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    gpu_bytes: int | None = None
    fits: bool | None = None


def is_experiment_table(columns: Iterable[str]) -> bool:
    """Whether a header line is that of a table of measured runs, and not of another kind."""
    return {ROW_ID, "cluster"} <= set(columns)


def is_published_table(columns: Iterable[str]) -> bool:
    """Whether a header line is that of published runs, whose columns are not keys of the experiment file."""
    return set(columns) >= _PUBLISHED


def read_experiment_runs(path: Path) -> list[ExperimentRun]:
    """The rows of a table, in order.

    Raises InputError for a file that is no such table, an unknown column, a cell of another type than its
    key's, and a row_id that is missing or stands there twice.
    """
    runs: dict[str, ExperimentRun] = {}
    for where, cells in read_csv_rows(path, lambda columns: _check_columns(path, columns)):
        run = _read_run(path, where, cells)
        if run.row_id in runs:
            raise InputError(f"{where}: row_id '{run.row_id}' stands there twice; expected one per row")
        runs[run.row_id] = run
    return list(runs.values())


def predict_run(run: ExperimentRun) -> RowResult:
    """zsim's prediction of a row, or the reason why the row is skipped."""
    measured = RowResult(
        run.row_id,
        run.source,
        "skipped",
        measured_seconds=run.step_seconds,
        measured_memory_bytes=run.gpu_bytes,
        memory_kind="total",
        measured_fits=run.fits,
        measured_memory={} if run.gpu_bytes is None else {"total": run.gpu_bytes},
    )
    try:
        job = resolve(run.experiment)
    except InputError as error:  # an impossible shape
        return replace(measured, reason=str(error))
    measured = replace(measured, measured_seconds=_measured_seconds(run, job))
    try:
        return predict_job(measured, job)
    except NotSimulatedError as error:
        return replace(measured, reason=str(error))
    except Exception as error:  # of zsim, on one row: that row's, not the end of the table
        return replace(measured, reason=f"an error of zsim: {type(error).__name__}: {error}")


def _measured_seconds(run: ExperimentRun, job: Job) -> float | None:
    """Seconds of one step: measured, or derived from the throughput. None without either."""
    if run.step_seconds or not run.tokens_per_second_per_gpu:
        return run.step_seconds
    return step_work(job).tokens_per_gpu / run.tokens_per_second_per_gpu


# -- columns ----------------------------------------------------------------------------------------------


def _check_columns(path: Path, columns: list[str]) -> None:
    if is_published_table(columns):
        raise InputError(
            f"{path.name}: has the columns of published runs, not keys of the experiment file; in the source "
            f"checkout `python -m validation.published {path}` predicts it"
        )
    check_names(path.name, columns)
    for column in columns:
        if column not in _COLUMNS:
            _check_key(path.name, column)
    if ROW_ID not in columns:
        raise InputError(
            f"{path.name}: no column {ROW_ID}; expected a CSV table of measured runs with a header line: "
            f"{ROW_ID}, keys of the experiment file, and outcomes ({', '.join(OUTCOMES)})"
        )


def _check_key(name: str, column: str) -> None:
    """Raise InputError, with the nearest key, unless the column is a key of the experiment file."""
    segments = column.split(".")
    if segments[0] in ("cluster", "gpu") and len(segments) > 1:
        check_hardware_key(column, f"{name}: ")
        return
    index = first_unknown_segment(segments, Experiment)
    if index is None:
        return
    key, options = segments[index], keys_at(segments[:index], Experiment)
    hint = nearest_key(key, None, options if index else [*options, *_COLUMNS], Experiment)
    expected = "a key of the experiment file, dotted (training.micro_batch_size), or one of "
    raise InputError(
        f"{name}: unknown column '{column}'{hint or f'; expected {expected}' + ', '.join(_COLUMNS)}"
    )


# -- cells ------------------------------------------------------------------------------------------------


def _read_run(path: Path, where: str, cells: Mapping[str, str]) -> ExperimentRun:
    if not cells[ROW_ID]:
        raise InputError(f"{where}: no {ROW_ID}; expected a name of the row")
    settings = dict(
        parse_setting(f"{column}={text}") for column, text in cells.items() if text and column not in _COLUMNS
    )
    return ExperimentRun(
        cells[ROW_ID],
        cells.get(SOURCE) or path.stem,
        _experiment(path.parent, where, settings),
        _number(where, cells, "step_seconds"),
        _number(where, cells, "tokens_per_second_per_gpu"),
        _count(where, cells, "gpu_bytes"),
        _flag(where, cells, "fits"),
    )


def _experiment(folder: Path, where: str, settings: Mapping[str, Any]) -> Experiment:
    data: dict[str, Any] = {}
    in_files = {key: value for key, value in settings.items() if key.startswith(_IN_FILES)}
    try:
        for key, value in settings.items():
            if key not in in_files:
                set_dotted_key(data, key, value)
        return build_experiment(resolve_paths(data, folder), in_files, origin=where)
    except NotSimulatedError:
        raise
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


def _number(where: str, cells: Mapping[str, str], column: str) -> float | None:
    """The cell as a number, or None if it is empty. Raises InputError for anything else."""
    text = cells.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: column '{column}': found {text!r}, expected a number above 0, or nothing")
    return value


def _count(where: str, cells: Mapping[str, str], column: str) -> int | None:
    value = _number(where, cells, column)
    if value is not None and value != int(value):
        raise InputError(f"{where}: column '{column}': found {cells[column]!r}, expected a whole number")
    return None if value is None else int(value)


def _flag(where: str, cells: Mapping[str, str], column: str) -> bool | None:
    text = cells.get(column, "")
    if text and text.lower() not in _FLAGS:
        raise InputError(f"{where}: column '{column}': found {text!r}, expected true, false or nothing")
    return _FLAGS.get(text.lower())


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


# -- Rows as experiment files, of which `zsim run` predicts the same --------------------------------------


_NAME = r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}"


def write_run_experiments(tables: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Write `ROW_ID.toml` for every row of the tables, with what was measured as a comment. Returns the files
    by row.

    Raises InputError for a wrong table, before any file is written, for a name that no file can have, and for
    two rows of one name in different tables.
    """
    runs: dict[str, ExperimentRun] = {}
    for table in tables:
        for run in read_experiment_runs(table):
            if not re.fullmatch(_NAME, run.row_id):
                raise InputError(
                    f"{table.name}: row_id '{run.row_id[:60]}' is no file's name; expected letters, digits, "
                    "'.', '_' or '-'"
                )
            if run.row_id in runs:
                raise InputError(
                    f"{table.name}: row_id '{run.row_id}' is in another table too; expected one file a row"
                )
            runs[run.row_id] = run
    make_folder(folder)
    files = {}
    for name, run in runs.items():
        files[name] = folder / f"{name}.toml"
        write_atomically(files[name], experiment_toml(run.experiment, row_comment(run)))
    return files


def row_comment(run: ExperimentRun) -> str:
    """The name of the row, its source, and its outcomes by the names of their columns."""
    values = {name: getattr(run, name) for name in OUTCOMES}
    measured = [f"{name} = {_toml_text(value)}" for name, value in values.items() if value is not None]
    return f"{run.row_id}, of {run.source}\nmeasured: {', '.join(measured) or 'nothing'}"


def _toml_text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value!r}"
