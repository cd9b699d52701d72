"""Measurements in a recorded trace: its collectives and copies, which state their bytes. Kernels do not.

A collective's transfer counts, not its wait for the last rank, so all ranks of a group are needed.
Kernels that overlapped a collective lengthened it (`zsim.calibrate.interference`): links come out as in a
step.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zsim.calibrate.measurements import Measurement, Measurements
from zsim.errors import InputError
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
        yield _row("collective", parameters, size, times, source)


def _copies(trace: Trace, source: str) -> Iterator[Measurement]:
    seconds_per_key: dict[tuple[str, bool, int], list[float]] = {}
    spans = (trace.end_seconds - trace.start_seconds).tolist()
    for index, seconds in zip(trace.info_indices.tolist(), spans, strict=True):
        info = trace.infos[index]
        if info.kind in ("h2d", "d2h") and info.bytes > 0 and seconds > 0:
            is_pinned = "pageable" not in info.name.lower()
            seconds_per_key.setdefault((info.kind, is_pinned, info.bytes), []).append(seconds)
    for (way, is_pinned, size), times in sorted(seconds_per_key.items()):
        yield _row("host_copy", {"way": way, "pinned": is_pinned, "bytes": size}, size, times, source)


def _row(
    family: str, parameters: dict[str, object], size: int, times: list[float], source: str
) -> Measurement:
    median_seconds = statistics.median(times)
    low, high = np.percentile(times, [10, 90])
    relative_deviation = max(float(high) - median_seconds, median_seconds - float(low)) / median_seconds
    return Measurement(
        family, parameters, median_seconds, source, bytes=float(size), relative_deviation=relative_deviation
    )
