r"""Files of measurements, recognised by their content.

| file | from |
|---|---|
| JSON with `format` and `measurements` | `python -m validation.microbench` |
| text with a `busbw` column | nccl-tests, rccl-tests |
| text with `comm op: ... \| time (ms): ...` | DeepSpeed's `comms_logger`, verbose |
| text with `Comm. Op`, `Message Size` ... | its `log_summary()` |
| text with `---- Performance of ...` | DeepSpeed's `ds_bench` |
| JSON with `fio version` | `fio --output-format=json` |
| folder of text files with `E2E Read Speed` | DeepSpeed's `ds_io` and `ds_nvme_tune` |
| trace, or folder of traces of all ranks | what `zsim.read_trace` reads |

The JSON of `python -m validation.microbench`: every row is checked against the declaration of its
family.

Measurements in a recorded trace: its collectives and copies, which state their bytes. Kernels do not.

A collective's transfer counts, not its wait for the last rank, so all ranks of a group are needed.
Kernels that overlapped a collective lengthened it (`validation/interference.py`): links come out as in a
step.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zsim.calibrate.measurements import (
    COLLECTIVE_KINDS,
    COUNT,
    FLAG,
    TEXT,
    CheckedTable,
    Measurement,
    Measurements,
    block_bytes,
    collective_row,
    drive_row,
    excerpt,
    framework_logs,
    log_number,
    log_text,
)
from zsim.errors import InputError, did_you_mean
from zsim.reading import parse_json
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import Trace

_HEADS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"')
_SUFFIXES = (".gz", ".sqlite", ".jsonl")


def looks_like_trace(path: Path) -> bool:
    """Whether `path` is a folder of traces, a compressed file, or begins as a Kineto JSON."""
    if os.path.isdir(path):
        return any(file.name.endswith((".json", *_SUFFIXES)) for file in path.iterdir())
    if path.name.endswith(_SUFFIXES):
        return True
    try:
        with path.open("rb") as file:
            return any(head in file.read(4096) for head in _HEADS)
    except OSError:
        return False


def trace_measurements(path: Path, nodes: int | None) -> Measurements:
    """One row per kind and size: the median of its calls.

    `nodes` is the number of nodes of the ranks, which no trace states. On several, groups of a part of the
    ranks are left out, because the trace does not state their nodes either.

    Raises InputError for a trace that cannot be read, that lacks the other ranks, or in which nothing states
    its bytes.
    """
    trace = read_trace(path)
    if trace.metadata.get("transfers_bounded"):
        raise InputError(
            f"{path.name}: too few ranks to tell transfer from waiting; expected every rank of a group"
        )
    nodes = nodes or 1
    rows = [*_collectives(trace, path.name, nodes), *_copies(trace, path.name)]
    if not rows:
        raise InputError(f"{path.name}: no collective and no copy that says its bytes")
    machine = str(trace.metadata.get("machine") or f"{trace.world_size} ranks")
    notes = [f"{path.name}: kernels are left out, their shapes are not in the trace"]
    if nodes > 1 and any(1 < info.group_size < trace.world_size for info in trace.infos):
        notes.append(f"{path.name}: groups of a part of the ranks are left out, on which nodes is not said")
    return Measurements(tuple(rows), (machine,), tuple(notes), (path.name,))


def _collectives(trace: Trace, source: str, nodes: int) -> Iterator[Measurement]:
    if trace.transfer_seconds is None:
        return
    seconds_per_key: dict[tuple[str, int, int], list[float]] = {}
    for index, seconds in zip(trace.info_indices.tolist(), trace.transfer_seconds.tolist(), strict=True):
        info = trace.infos[index]
        is_known = nodes == 1 or info.group_size == trace.world_size
        if is_known and info.group_size > 1 and info.bytes > 0 and np.isfinite(seconds) and seconds > 0:
            seconds_per_key.setdefault((info.kind, info.bytes, info.group_size), []).append(seconds)
    for (kind, size, ranks), times in sorted(seconds_per_key.items()):
        parameters = {"kind": kind, "bytes": size, "ranks": ranks, "nodes": nodes}
        yield _collective_row("collective", parameters, size, times, source)


def _copies(trace: Trace, source: str) -> Iterator[Measurement]:
    seconds_per_key: dict[tuple[str, bool, int], list[float]] = {}
    spans = (trace.end_seconds - trace.start_seconds).tolist()
    for index, seconds in zip(trace.info_indices.tolist(), spans, strict=True):
        info = trace.infos[index]
        if info.kind in ("h2d", "d2h") and info.bytes > 0 and seconds > 0:
            is_pinned = "pageable" not in info.name.lower()
            seconds_per_key.setdefault((info.kind, is_pinned, info.bytes), []).append(seconds)
    for (way, is_pinned, size), times in sorted(seconds_per_key.items()):
        yield _collective_row(
            "host_copy", {"way": way, "pinned": is_pinned, "bytes": size}, size, times, source
        )


def _collective_row(
    family: str, parameters: dict[str, object], size: int, times: list[float], source: str
) -> Measurement:
    median_seconds = statistics.median(times)
    low, high = np.percentile(times, [10, 90])
    relative_deviation = max(float(high) - median_seconds, median_seconds - float(low)) / median_seconds
    return Measurement(
        family, parameters, median_seconds, source, bytes=float(size), relative_deviation=relative_deviation
    )


_FORMAT = 1
_BOTH = ("forward", "both")
_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_MODULE: Mapping[str, Any] = {"tokens": COUNT, "width": COUNT, "dtype": _DTYPES, "direction": _BOTH}

_ATTENTION: Mapping[str, Any] = {
    **dict.fromkeys(("batch", "heads", "length", "head_dim"), COUNT),
    "dtype": _DTYPES,
    "direction": _BOTH,
}


class BenchFamily(NamedTuple):
    """Declaration of a family's rows."""

    parameters: Mapping[str, str | tuple[str, ...]]
    """By name, each a kind of value or the words to choose from."""
    work: str = ""
    """The key (`flops`, `bytes`, `calls`) that their seconds need to be of use."""


FAMILIES: Mapping[str, BenchFamily] = {
    "gemm": BenchFamily({"m": COUNT, "n": COUNT, "k": COUNT, "dtype": _DTYPES}, "flops"),
    "attention": BenchFamily(_ATTENTION, "flops"),
    "fused_attention": BenchFamily({**_ATTENTION, "backend": TEXT}, "flops"),
    **dict.fromkeys(("batched_gemm", "grouped_gemm", "rows_by_index", "chain"), BenchFamily({})),
    "rms_norm": BenchFamily(_MODULE, "bytes"),
    "rms_norm_eager": BenchFamily(_MODULE),
    "silu_times": BenchFamily(_MODULE, "bytes"),
    "residual": BenchFamily(_MODULE, "bytes"),
    "rotary": BenchFamily(_MODULE),
    "embedding": BenchFamily({**_MODULE, "vocab": COUNT}),
    "cross_entropy": BenchFamily({**_MODULE, "vocab": COUNT}),
    "copy": BenchFamily({}, "bytes"),
    "fill": BenchFamily({}, "bytes"),
    "adamw": BenchFamily(
        {"kind": ("fused", "foreach", "loop"), "place": ("cpu", "cuda"), "numel": COUNT, "threads": COUNT},
        "bytes",
    ),
    "host": BenchFamily({"what": TEXT}, "calls"),
    "host_copy": BenchFamily({"way": ("h2d", "d2h", "both"), "pinned": FLAG}, "bytes"),
    "gemm_beside_copy": BenchFamily({"way": ("none", "h2d", "d2h", "both")}, "flops"),
    "file": BenchFamily(
        {"op": ("read", "write"), "block_bytes": COUNT, "depth": COUNT, "direct": FLAG}, "bytes"
    ),
    "collective": BenchFamily({"kind": TEXT, "ranks": COUNT}, "bytes"),
    "interference": BenchFamily({"measured": TEXT, "beside": FLAG, "ranks": COUNT}),
}


def microbench_measurements(path: Path, data: Mapping[str, Any]) -> Measurements:
    """Every row of the file's `measurements`.

    Raises InputError for a family that zsim does not know, and for a row that lacks a value or has another
    kind of value than expected.
    """
    if data.get("format") != _FORMAT:
        raise InputError(f"{path.name}: format {data.get('format')!r}, expected {_FORMAT}")
    row_list = data["measurements"]
    if not isinstance(row_list, list):
        raise InputError(f"{path.name}: measurements: found {excerpt(row_list)}, expected a list of rows")
    rows = [_row(path, CheckedTable(row, f"{path.name}: measurement {n}")) for n, row in enumerate(row_list)]
    provenance = CheckedTable(data.get("provenance") or {}, f"{path.name}: provenance").content
    versions = CheckedTable(provenance.get("versions") or {}, f"{path.name}: provenance: versions").content
    version_text = ", ".join(f"{name} {version}" for name, version in versions.items())
    machine = (
        f"{provenance.get('machine', 'unknown machine')} ({version_text}, "
        f"{provenance.get('date', 'no date')})"
    )
    return Measurements(tuple(rows), (machine,), (), (path.name,))


def _row(path: Path, row: CheckedTable) -> Measurement:
    name = row.required("family", TEXT)
    family = FAMILIES.get(name)
    if family is None:
        family_names = ", ".join(FAMILIES)
        raise InputError(
            f"{row.path_text}: unknown family '{name}', expected {family_names}{did_you_mean(name, FAMILIES)}"
        )
    parameters, work, seconds = row.subtable("parameters"), row.subtable("work"), row.subtable("seconds")
    for key, kind in family.parameters.items():
        parameters.required(key, kind)
    median_seconds = seconds.required("median", COUNT)
    low, high = seconds.number("p10", median_seconds), seconds.number("p90", median_seconds)
    is_on_gpu = row.content.get("timed_on") == "device"
    if family.work:
        work.required(family.work, COUNT)
    return Measurement(
        family=name,
        parameters={**parameters.content, "measured_threads": row.content.get("threads")},
        seconds=float(median_seconds),
        source=path.name,
        flops=work.number("flops", 0.0),
        bytes=work.number("bytes", 0.0),
        calls=work.number("calls", 1.0),
        relative_deviation=max(abs(high - median_seconds), abs(median_seconds - low)) / median_seconds,
        # others' work on the CPU does not lengthen what a GPU's clock times
        foreign_cpu_fraction=0.0 if is_on_gpu else row.number("foreign_cpu_fraction", 0.0),
    )


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
