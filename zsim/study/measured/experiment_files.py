"""Write the rows of a table of one's own runs as experiment files, of which `zsim run` predicts the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import make_folder, write_atomically
from zsim.specs.formats.toml import experiment_toml
from zsim.study.measured.experiment_table import OUTCOMES, ExperimentRun, read_experiment_runs

_NAME = r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}"


@dataclass(frozen=True)
class WrittenRuns:
    """The files that were written."""

    files: Mapping[str, Path]
    """By row."""

    def lines(self, folder: Path) -> Iterator[str]:
        """The lines for a terminal."""
        count = len(self.files)
        yield f"{count:,} experiment{'s' * (count != 1)} in {folder}"

    def to_dict(self) -> dict[str, Any]:
        """The content of `--json`."""
        return {"written": {row: str(path) for row, path in self.files.items()}}


def write_run_experiments(tables: Sequence[Path], folder: Path) -> WrittenRuns:
    """Write `ROW_ID.toml` for every row of the tables, with what was measured as a comment.

    Raises InputError for a wrong table, before any file is written, for a name that no file can have, and for
    two rows of one name in different tables."""
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
    return WrittenRuns(files)


def row_comment(run: ExperimentRun) -> str:
    """The name of the row, its source, and its outcomes by the names of their columns."""
    values = {name: getattr(run, name) for name in OUTCOMES}
    measured = [f"{name} = {_text(value)}" for name, value in values.items() if value is not None]
    return f"{run.row_id}, of {run.source}\nmeasured: {', '.join(measured) or 'nothing'}"


def _text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value!r}"
