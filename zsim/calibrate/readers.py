"""Files of measurements, recognised by their content.

| file | from |
|---|---|
| JSON with `format` and `measurements` | `python -m validation.microbench` |
| text with a `busbw` column | nccl-tests, rccl-tests |
| text with `comm op: ... \\| time (ms): ...` | DeepSpeed's `comms_logger`, verbose |
| text with `Comm. Op`, `Message Size` ... | its `log_summary()` |
| text with `---- Performance of ...` | DeepSpeed's `ds_bench` |
| JSON with `fio version` | `fio --output-format=json` |
| folder of text files with `E2E Read Speed` | DeepSpeed's `ds_io` and `ds_nvme_tune` |
| trace, or folder of traces of all ranks | what `zsim.read_trace` reads |
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from zsim.calibrate.checked_table import CheckedTable, excerpt
from zsim.calibrate.logs import (
    COLLECTIVE_KINDS,
    block_bytes,
    collective_row,
    drive_row,
    framework_logs,
    log_number,
    log_text,
)
from zsim.calibrate.measurements import Measurements
from zsim.calibrate.microbench import microbench_measurements
from zsim.calibrate.trace_rows import looks_like_trace, trace_measurements
from zsim.errors import InputError
from zsim.reading import parse_json

# What `mpirun --tag-output` and `srun --label` put before every line.
_TAG = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:|\[\d+\]|\d+:)[ \t]?", re.MULTILINE)
_TIME_UNITS = {"(us)": 1e-6, "(ms)": 1e-3, "(s)": 1.0}
_SAME_RATIO = 0.02  # bus bandwidths are printed with two decimals


def read_measurements(path: Path, *, ranks: int | None = None, nodes: int | None = None) -> Measurements:
    """The measurements of one file or folder.

    `ranks` and `nodes` are those of the collectives in a log that does not state them. Raises InputError if
    the file cannot be read or has none of the formats.
    """
    if looks_like_trace(path):
        return trace_measurements(path, nodes)
    logs = framework_logs()
    if os.path.isdir(path):
        return next(log for log in logs if log.has_folders).read_folder(path)
    text = log_text(path)
    if text.lstrip().startswith("{"):
        return _json(path, text)
    untagged = _TAG.sub("", text)
    if "busbw" in untagged and re.search(r"^[ \t]*\d+[ \t]+\d+[ \t]+\w", untagged, re.MULTILINE):
        return _nccl_tests(path, untagged, ranks, nodes)
    for log in logs:
        if log.recognises(text):
            return log.read(path, text, ranks, nodes)
    raise InputError(
        f"{path.name}: not a file of measurements that zsim knows; expected JSON of validation.microbench or "
        f"fio, a recorded trace, the output of nccl-tests, or {' or '.join(log.noun for log in logs)}"
    )


def _json(path: Path, text: str) -> Measurements:
    try:
        data = parse_json(text, path)
    except ValueError as error:
        raise InputError(f"{path.name}: not JSON, or cut short: {error}") from None
    if "measurements" in data:
        return microbench_measurements(path, data)
    if "fio version" in data:
        return _fio(path, data)
    raise InputError(
        f"{path.name}: JSON with neither 'measurements' (validation.microbench) nor 'fio version'"
    )


# ---- collectives -------------------------------------------------------------------------------------------


def _nccl_tests(path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
    """Rows of nccl-tests: out-of-place times, in the column that the header gives. Ranks and nodes come from
    the `# Rank` lines.
    """
    hosts = re.findall(r"^#\s+Rank\s+\d+.*? on\s+(\S+) device", text, re.MULTILINE)
    num_ranks, num_nodes = ranks or len(hosts), nodes or len(set(hosts)) or 1
    columns, seconds_per_unit = _header(path, text)
    table = [
        dict(zip(columns, cells, strict=False))
        for line in text.splitlines()
        if len(cells := line.split()) >= len(columns) and cells[0].isdigit() and cells[1].isdigit()
    ]
    if num_ranks < 2:
        raise InputError(f"{path.name}: how many ranks? No '# Rank' lines; say it with --ranks")
    kind = _named_collective(path, text) or _collective_of(path, table, num_ranks)
    if kind is None:
        raise InputError(
            f"{path.name}: which collective? Neither the text nor the file's name says (all_gather_perf ...)"
        )
    rows = []
    for row in table:
        size, time = int(log_number(path, row["size"])), log_number(path, row["time"])
        if size > 0 and time > 0:
            rows.append(collective_row(path, kind, size, time * seconds_per_unit, num_ranks, num_nodes))
    if not rows:
        raise InputError(f"{path.name}: no row of sizes and times; is the output cut short?")
    return Measurements(tuple(rows), (f"{num_ranks} ranks on {num_nodes} nodes",), (), (path.name,))


def _header(path: Path, text: str) -> tuple[list[str], float]:
    """(the columns up to the first bus bandwidth, seconds of a unit of time). Releases differ: `root` came
    with 2.11, and rccl-tests has columns of its own.

    Raises InputError where there is no header, since a number's column is then unknown.
    """
    lines = [line.lstrip("# \t").split() for line in text.splitlines()]
    index = next((n for n, words in enumerate(lines) if words[:1] == ["size"] and "busbw" in words), None)
    columns = [] if index is None else lines[index][: lines[index].index("busbw") + 1]
    if index is None or "time" not in columns:
        raise InputError(
            f"{path.name}: no header of nccl-tests (size count type ... time algbw busbw), without which the "
            "column of the time is unknown"
        )
    units = [word for word in (lines[index + 1] if index + 1 < len(lines) else []) if word in _TIME_UNITS]
    return columns, _TIME_UNITS[units[0] if units else "(us)"]


def _named_collective(path: Path, text: str) -> str | None:
    name_match = re.search(r"\b([a-z_]+)_perf", text) or re.search(r"Collective test starting: (\w+)", text)
    kind = COLLECTIVE_KINDS.get(name_match.group(1).lower()) if name_match else None
    return kind or COLLECTIVE_KINDS.get(path.stem.lower().replace("-", "_").removesuffix("_perf"))


def _collective_of(path: Path, table: list[dict[str, str]], ranks: int) -> str | None:
    """The collective that reduces, by its factor from algorithm to bus bandwidth: 2 (n - 1) / n of an
    all-reduce, (n - 1) / n of a reduce-scatter (nccl-tests doc/PERFORMANCE.md). None for those that do not
    reduce, which share a factor.
    """
    reducing = [cells for cells in table if cells.get("redop") not in (None, "none")]
    ratios = {
        kind: factor * (ranks - 1) / ranks for kind, factor in (("all_reduce", 2), ("reduce_scatter", 1))
    }
    for kind, ratio in ratios.items():
        if reducing and all(
            abs(log_number(path, cells["busbw"]) - ratio * log_number(path, cells["algbw"]))
            <= _SAME_RATIO * max(1.0, log_number(path, cells["busbw"]))
            for cells in reducing
        ):
            return kind
    return None


# ---- drives ------------------------------------------------------------------------------------------------


def _fio(path: Path, data: dict[str, Any]) -> Measurements:
    rows = []
    common = CheckedTable(data.get("global options") or {}, f"{path.name}: global options").content
    jobs = data.get("jobs") or []
    if not isinstance(jobs, list):
        raise InputError(f"{path.name}: jobs: found {excerpt(jobs)}, expected a list of jobs")
    for number, job_content in enumerate(jobs):
        job = CheckedTable(job_content, f"{path.name}: job {number}")
        options = CheckedTable(
            common | job.optional_subtable("job options").content, f"{job.path_text}: options"
        )
        for op in ("read", "write"):
            rate = job.optional_subtable(op).number("bw_bytes", 0.0)
            if rate > 0:
                block = block_bytes(str(options.content.get("bs", "4k")), f"{options.path_text}: bs")
                depth = _count(options, "iodepth") * _count(options, "numjobs")
                rows.append(drive_row(path, op, block, depth, rate))
    if not rows:
        raise InputError(f"{path.name}: no job of fio that moved bytes")
    return Measurements(tuple(rows), (), (), (path.name,))


def _count(options: CheckedTable, key: str) -> int:
    """A whole number, which fio writes as text. 1 if it is left out."""
    count_value = options.content.get(key, 1)
    if not re.fullmatch(r"[1-9]\d{0,8}", str(count_value)):
        raise InputError(
            f"{options.path_text}: {key}: found {excerpt(count_value)}, expected a whole number above 0"
        )
    return int(count_value)
