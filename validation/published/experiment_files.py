"""Write published runs as experiment files, with the row's measurements as comments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.published.job import RowExperiment, row_experiment, row_job
from validation.published.predict import measured_seconds
from validation.published.table import PublishedRun
from zsim.errors import InputError, ZsimError
from zsim.files import make_folder, write_atomically
from zsim.specs.formats.toml import experiment_toml

_MAX_REASONS = 10
_MEASURED = {
    "mem_alloc_gb": "allocated",
    "mem_active_gb": "active",
    "mem_reserved_gb": "reserved",
    "mem_other_gb": "other",
}


@dataclass(frozen=True)
class WrittenExperiments:
    """The written files by row, and the reasons for rows that are not simulated."""

    files: dict[str, Path]
    refused: dict[str, str]

    def lines(self, folder: Path) -> Iterator[str]:
        """The lines for a terminal."""
        yield f"{len(self.files):,} of {len(self.files) + len(self.refused):,} rows are in {folder}"
        for reason, count in Counter(self.refused.values()).most_common(_MAX_REASONS):
            yield f"  {count:,} not simulated: {reason}"

    def to_dict(self) -> dict[str, Any]:
        """The content of `--json`."""
        return {"written": {row: str(path) for row, path in self.files.items()}, "refused": self.refused}


def write_experiments(runs: Sequence[PublishedRun], folder: Path) -> WrittenExperiments:
    """Write `row_id.toml` for every row that zsim simulates.

    Raises InputError for two rows of the same name, and for names that no file can have.
    """
    written = WrittenExperiments({}, {})
    for run in runs:
        try:
            row_job(run)
            row = row_experiment(run)
        except ZsimError as error:
            written.refused[run.row_id] = str(error)
            continue
        except Exception as error:  # of zsim, on what one row says
            written.refused[run.row_id] = f"an error of zsim: {type(error).__name__}: {error}"
            continue
        path = folder / f"{_file_name(run)}.toml"
        if run.row_id in written.files:
            raise InputError(
                f"{run.where}: row_id '{run.row_id}' stands there twice; expected one file a row"
            )
        make_folder(folder)
        write_atomically(path, experiment_toml(row.experiment, row_comment(run, row)))
        written.files[run.row_id] = path
    return written


def _file_name(run: PublishedRun) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}", run.row_id):
        raise InputError(
            f"{run.where}: row_id '{run.row_id[:60]}' is no file's name; expected letters, digits, '.', "
            "'_' or '-'"
        )
    return run.row_id


def row_comment(run: PublishedRun, row: RowExperiment) -> str:
    """The source of the row, its measurements, and what it leaves open."""
    lines = [f"{run.row_id}, of {run.source}"]
    lines += [text for column in ("source_ref", "software") if (text := _one_line(run.text(column)))]
    seconds = measured_seconds(run)
    measured = [] if seconds is None else [f"step {seconds:g} s"]
    measured += [
        f"memory {name} {run.text(column)} GB" for column, name in _MEASURED.items() if run.text(column)
    ]
    if run.text("status") == "oom":
        measured.append("out of memory")
    lines.append(f"measured: {', '.join(measured) or 'nothing'}")
    if row.assumptions:
        lines.append(f"assumed: {'; '.join(row.assumptions)}")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)
