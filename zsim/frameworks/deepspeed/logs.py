"""The logs of DeepSpeed's `comms_logger`, `ds_bench`, `ds_io` and `ds_nvme_tune`.

Read in DeepSpeed 0.19.8 (`utils/comms_logging.py`: `append`, `log_all`) and DeepSpeedExamples of 2025
(`benchmarks/communication/utils.py`: `print_header`, `get_bw`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zsim.calibrate.measurements import (
    COLLECTIVE_KINDS,
    GIB,
    FrameworkLogs,
    Measurement,
    Measurements,
    block_bytes,
    collective_row,
    drive_row,
    log_number,
    log_text,
    merge_measurements,
)
from zsim.errors import InputError

# DeepSpeed's convert_size divides by 1024.
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_COMM = re.compile(
    r"comm op: (\w+)(?: \| \[Caller Func: [^\]]*\])? \| time \(ms\): ([\d.]+) \| msg size: ([\d.]+) (\w+)"
)
_SUMMARY = re.compile(r"^Comm\. Op\s+Message Size\s+Count\s+Total Latency", re.MULTILINE)
_SUMMARY_END = "Breakdown with straggler effect"
# Size, count, total and average latency in milliseconds.
_SUMMARY_ROW = re.compile(r"\s+([\d.]+) ?([KMGT]?B)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s")
_BENCH = re.compile(r"---- Performance of (\w+) on (\d+) devices ---")
_BENCH_ROW = re.compile(
    r"\s*([\d.]+)(?: ?([KMGT]?B))?\s+\d+(?:x\d+)+\s+([\d.]+)(?: ?(us|ms|s))?\s+[\d.]+\s+[\d.]+"
)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DS_IO = re.compile(r"E2E (Read|Write) Speed\s*[=:]\s*([\d.]+)")


class DeepSpeedLogs(FrameworkLogs):
    """Collectives of a verbose `comms_logger`, and rates of drives."""

    noun = "a log of DeepSpeed's comms_logger, ds_bench, ds_io or ds_nvme_tune"
    has_folders = True

    def recognises(self, text: str) -> bool:
        return "comm op:" in text or any(mark.search(text) for mark in (_DS_IO, _SUMMARY, _BENCH))

    def read(self, path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
        if _BENCH.search(text):
            return _bench(path, text, nodes)
        if "comm op:" in text:
            return _comms_logger(path, text, ranks, nodes)
        return _summary(path, text, ranks, nodes) if _SUMMARY.search(text) else _ds_io(path)

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
    lines = [
        (name, _bytes(path, number, unit), log_number(path, milliseconds) * 1e-3)
        for name, milliseconds, number, unit in _COMM.findall(text)
    ]
    return _collectives(path, lines, ranks, nodes)


def _summary(path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
    """Rows of `log_summary()`: the average of an op's calls of one size, without the extremes.

    The table behind it, of stragglers, has the same ops again and is not read.
    """
    if not ranks:
        raise InputError(
            f"{path.name}: log_summary does not say how many ranks there are; say it with --ranks"
        )
    lines: list[tuple[str, int, float]] = []
    name, table = "", _SUMMARY.split(text, maxsplit=1)[1].partition(_SUMMARY_END)[0]
    for line in table.splitlines()[1:]:
        if match := _SUMMARY_ROW.match(f"{line} "):
            lines.append((name, _bytes(path, match[1], match[2]), log_number(path, match[5]) * 1e-3))
        elif re.fullmatch(r"[a-z]\w*\s*", line):
            name = line.strip()
    return _collectives(path, lines, ranks, nodes)


def _bench(path: Path, text: str, nodes: int | None) -> Measurements:
    """Tables of `ds_bench`, each of a collective and its ranks. A bare duration is in microseconds."""
    tables: list[Measurements] = []
    starts = [*_BENCH.finditer(text)]
    for head, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[head.end() : following.start() if following else len(text)]
        lines = [
            (
                head[1],
                _bytes(path, row[1], row[2] or "B"),
                log_number(path, row[3]) * _SECONDS[row[4] or "us"],
            )
            for line in body.splitlines()
            if (row := _BENCH_ROW.match(line))
        ]
        tables.append(_collectives(path, lines, int(head[2]), nodes))
    return merge_measurements(tables)


def _bytes(path: Path, number: str, unit: str) -> int:
    return round(log_number(path, number) * _UNITS.get(unit, 0))


def _collectives(
    path: Path, lines: list[tuple[str, int, float]], ranks: int, nodes: int | None
) -> Measurements:
    """Rows of (op, bytes of a rank's input, seconds)."""
    rows, unknown = [], 0
    for name, size, seconds in lines:
        word = re.sub(r"_(into_tensor|tensor|base|coalesced|single|fn)$", "", name.strip("_"))
        kind = COLLECTIVE_KINDS.get(word) or COLLECTIVE_KINDS.get(word.removesuffix("_into_tensor"))
        if kind is None or not size or seconds <= 0:
            unknown += 1
            continue
        full = size * ranks if kind == "all_gather" else size  # shard in, full tensor out
        rows.append(collective_row(path, kind, full, seconds, ranks, nodes or 1))
    if not rows:
        raise InputError(f"{path.name}: no collective that zsim knows in {unknown} lines of DeepSpeed's")
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
