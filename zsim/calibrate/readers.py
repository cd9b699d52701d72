"""Files of measurements, recognised by their content.

| file | from |
|---|---|
| JSON with `format` and `measurements` | `python -m validation.microbench` |
| text with a `busbw` column | nccl-tests, rccl-tests |
| text with `comm op: ... \\| time (ms): ...` | DeepSpeed's `comms_logger`, verbose |
| JSON with `fio version` | `fio --output-format=json` |
| folder of text files with `E2E Read Speed` | DeepSpeed's `ds_io` and `ds_nvme_tune` |
| trace, or folder of traces of all ranks | what `zsim.read_trace` reads |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.calibrate.checked_table import MAXIMUM, CheckedTable, excerpt
from zsim.calibrate.measurements import GIB, Measurement, Measurements
from zsim.calibrate.microbench import microbench_measurements
from zsim.calibrate.trace_rows import looks_like_trace, trace_measurements
from zsim.errors import InputError
from zsim.reading import parse_json, read_text

_MAX_BYTES = 64_000_000
_KINDS = {
    "all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter", "all_reduce": "all_reduce", "allreduce": "all_reduce",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "sendrecv": "send",
}  # fmt: skip
_UNITS = {
    "B": 1,
    "KB": 2**10,
    "MB": 2**20,
    "GB": 2**30,
    "TB": 2**40,
}  # DeepSpeed's convert_size divides by 1024


def read_measurements(path: Path, *, ranks: int | None = None, nodes: int | None = None) -> Measurements:
    """The measurements of one file or folder.

    `ranks` and `nodes` are those of the collectives in a log that does not state them. Raises InputError if
    the file cannot be read or has none of the formats.
    """
    if looks_like_trace(path):
        return trace_measurements(path, nodes)
    if os.path.isdir(path):
        return _ds_io(path)
    text = _text(path)
    if text.lstrip().startswith("{"):
        return _json(path, text)
    if "busbw" in text and re.search(r"^[ \t]*\d+[ \t]+\d+[ \t]+\w", text, re.MULTILINE):
        return _nccl_tests(path, text, ranks, nodes)
    if "comm op:" in text:
        return _comms_logger(path, text, ranks, nodes)
    if _DS_IO.search(text):
        return _ds_io(path)
    raise InputError(
        f"{path.name}: not a file of measurements that zsim knows; expected JSON of validation.microbench or "
        "fio, a recorded trace, the output of nccl-tests, or a log of DeepSpeed's comms_logger, ds_io or "
        "ds_nvme_tune"
    )


def _text(path: Path) -> str:
    try:
        text = read_text(path, _MAX_BYTES, errors="replace")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InputError(f"{path.name}: the file is empty")
    return text


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
    """Rows of nccl-tests: out-of-place times in microseconds. Ranks and nodes come from the `# Rank`
    lines.
    """
    hosts = re.findall(r"^#\s+Rank\s+\d+.*? on\s+(\S+) device", text, re.MULTILINE)
    num_ranks, num_nodes = ranks or len(hosts), nodes or len(set(hosts)) or 1
    name_match = re.search(r"\b(\w+)_perf", text) or re.search(r"Collective test starting: (\w+)", text)
    kind = _KINDS.get(name_match.group(1).lower()) if name_match else None
    if kind is None:
        kind = _KINDS.get(path.stem.lower().replace("-", "_").removesuffix("_perf"))
    if kind is None:
        raise InputError(
            f"{path.name}: which collective? Neither the text nor the file's name says (all_gather_perf ...)"
        )
    if num_ranks < 2:
        raise InputError(f"{path.name}: how many ranks? No '# Rank' lines; say it with --ranks")
    rows = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 8 or not cells[0].isdigit() or not cells[1].isdigit():
            continue
        size, microseconds = int(_number(path, cells[0])), _number(path, cells[5])
        if size > 0 and microseconds > 0:
            rows.append(_collective(path, kind, size, microseconds * 1e-6, num_ranks, num_nodes))
    if not rows:
        raise InputError(f"{path.name}: no row of sizes and times; is the output cut short?")
    return Measurements(tuple(rows), (f"{num_ranks} ranks on {num_nodes} nodes",), (), (path.name,))


_COMM = re.compile(
    r"comm op: (\w+)(?: \| \[Caller Func: [^\]]*\])? \| time \(ms\): ([\d.]+) \| msg size: ([\d.]+) (\w+)"
)


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
        kind = _KINDS.get(word) or _KINDS.get(word.removesuffix("_into_tensor"))
        size, seconds = round(_number(path, number) * _UNITS.get(unit, 0)), _number(path, milliseconds) * 1e-3
        if kind is None or not size or seconds <= 0:
            unknown += 1
            continue
        full = size * ranks if kind == "all_gather" else size  # shard in, full tensor out
        rows.append(_collective(path, kind, full, seconds, ranks, nodes or 1))
    if not rows:
        raise InputError(f"{path.name}: no collective that zsim knows in {unknown} lines of comms_logger")
    notes = (f"{path.name}: {unknown} lines of other operations or empty times left out",) if unknown else ()
    return Measurements(tuple(rows), (), notes, (path.name,))


def _collective(path: Path, kind: str, size: int, seconds: float, ranks: int, nodes: int) -> Measurement:
    parameters = {"kind": kind, "bytes": size, "ranks": ranks, "nodes": nodes}
    return Measurement("collective", parameters, seconds, path.name, bytes=float(size))


# ---- drives ------------------------------------------------------------------------------------------------

_DS_IO = re.compile(r"E2E (Read|Write) Speed\s*[=:]\s*([\d.]+)")


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
                block = _size(str(options.content.get("bs", "4k")), f"{options.path_text}: bs")
                depth = _count(options, "iodepth") * _count(options, "numjobs")
                rows.append(_rate(path, op, block, depth, rate))
    if not rows:
        raise InputError(f"{path.name}: no job of fio that moved bytes")
    return Measurements(tuple(rows), (), (), (path.name,))


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
        text = _text(file)
        name = re.search(r"_t(\d+)_p(\d+)_d(\d+)_bs(\w+?)(?:_|\.|$)", file.name)
        threads, depth, block = (
            (int(name[1]), int(name[3]), _size(name[4], file.name)) if name else (1, 32, 2**20)
        )
        for way, gigabytes in _DS_IO.findall(text):
            yield _rate(file, way.lower(), block, depth * threads, _number(file, gigabytes) * GIB)


def _rate(path: Path, op: str, block: int, depth: int, rate: float) -> Measurement:
    parameters = {"op": op, "block_bytes": block, "depth": depth, "direct": True}
    return Measurement("file", parameters, 0.0, path.name, rate_bytes_per_second=rate)


def _count(options: CheckedTable, key: str) -> int:
    """A whole number, which fio writes as text. 1 if it is left out."""
    count_value = options.content.get(key, 1)
    if not re.fullmatch(r"[1-9]\d{0,8}", str(count_value)):
        raise InputError(
            f"{options.path_text}: {key}: found {excerpt(count_value)}, expected a whole number above 0"
        )
    return int(count_value)


def _number(path: Path, text: str) -> float:
    """A number from a log, where there may also be other text."""
    try:
        number_value = float(text)
    except ValueError:
        number_value = MAXIMUM
    if not number_value < MAXIMUM:
        raise InputError(f"{path.name}: found {text[:40]!r}, expected a number below {MAXIMUM:g}")
    return number_value


def _size(text: str, where: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([kKmMgG]?)(?:i?[bB])?", text.split(",")[0].strip())
    if match is None:
        raise InputError(f"{where}: found {excerpt(text)}, expected a block size, a number with k, m or g")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[match[2].lower()]
