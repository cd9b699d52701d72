"""The logs of DeepSpeed's `comms_logger`, `ds_io` and `ds_nvme_tune`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zsim.calibrate.logs import (
    COLLECTIVE_KINDS,
    FrameworkLogs,
    block_bytes,
    collective_row,
    drive_row,
    log_number,
    log_text,
)
from zsim.calibrate.measurements import GIB, Measurement, Measurements
from zsim.errors import InputError

# DeepSpeed's convert_size divides by 1024.
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_COMM = re.compile(
    r"comm op: (\w+)(?: \| \[Caller Func: [^\]]*\])? \| time \(ms\): ([\d.]+) \| msg size: ([\d.]+) (\w+)"
)
_DS_IO = re.compile(r"E2E (Read|Write) Speed\s*[=:]\s*([\d.]+)")


class DeepSpeedLogs(FrameworkLogs):
    """Collectives of a verbose `comms_logger`, and rates of drives."""

    noun = "a log of DeepSpeed's comms_logger, ds_io or ds_nvme_tune"
    short_noun = "logs of DeepSpeed's comms_logger or ds_nvme_tune"
    has_folders = True

    def recognises(self, text: str) -> bool:
        return "comm op:" in text or _DS_IO.search(text) is not None

    def read(self, path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
        return _comms_logger(path, text, ranks, nodes) if "comm op:" in text else _ds_io(path)

    def read_folder(self, path: Path) -> Measurements:
        return _ds_io(path)


def _comms_logger(path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
    """Rows of a verbose log. Each op is synchronised, so these times contain no overlap. Sizes are of a
    rank's input.
    """
    if not ranks:
        raise InputError(
            f"{path.name}: comms_logger does not say how many ranks there are; say it with --ranks"
        )
    rows, unknown = [], 0
    for name, milliseconds, number, unit in _COMM.findall(text):
        word = re.sub(r"_(into_tensor|tensor|base|coalesced|single|fn)$", "", name.strip("_"))
        kind = COLLECTIVE_KINDS.get(word) or COLLECTIVE_KINDS.get(word.removesuffix("_into_tensor"))
        size, seconds = (
            round(log_number(path, number) * _UNITS.get(unit, 0)),
            log_number(path, milliseconds) * 1e-3,
        )
        if kind is None or not size or seconds <= 0:
            unknown += 1
            continue
        full = size * ranks if kind == "all_gather" else size  # shard in, full tensor out
        rows.append(collective_row(path, kind, full, seconds, ranks, nodes or 1))
    if not rows:
        raise InputError(f"{path.name}: no collective that zsim knows in {unknown} lines of comms_logger")
    notes = (f"{path.name}: {unknown} lines of other operations or empty times left out",) if unknown else ()
    return Measurements(tuple(rows), (), notes, (path.name,))


def _ds_io(path: Path) -> Measurements:
    """Every log of a sweep. Block size and queue depth are in the file's name (`..._d16_bs1M...`)."""
    files = sorted(path.rglob("*.txt")) if os.path.isdir(path) else [path]
    rows = list(_ds_io_rows(files))
    if not rows:
        raise InputError(
            f"{path}: no trace, and no log of ds_io or ds_nvme_tune with an 'E2E Read Speed' in it"
        )
    return Measurements(tuple(rows), (), (), (path.name,))


def _ds_io_rows(files: list[Path]) -> Iterator[Measurement]:
    for file in files:
        text = log_text(file)
        name = re.search(r"_t(\d+)_p(\d+)_d(\d+)_bs(\w+?)(?:_|\.|$)", file.name)
        threads, depth, block = (
            (int(name[1]), int(name[3]), block_bytes(name[4], file.name)) if name else (1, 32, 2**20)
        )
        for way, gigabytes in _DS_IO.findall(text):
            yield drive_row(file, way.lower(), block, depth * threads, log_number(file, gigabytes) * GIB)


LOGS = DeepSpeedLogs()
