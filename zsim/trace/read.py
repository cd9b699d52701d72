"""`zsim.read_trace`: recorded files of whatever kind in, a Trace out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.flight_recorder import read_flight_recorder
from zsim.trace.json_stream import EXPECTED, WRONG_VALUE, JsonStream, beginning, wrong_value
from zsim.trace.kineto_recording import read_kineto
from zsim.trace.nsys import read_nsys
from zsim.trace.ranks import join
from zsim.trace.recording import Recording
from zsim.trace.span_log import read_span_log
from zsim.trace.spans import Trace

_SQLITE = b"SQLite format 3\x00"
_HEAD = 4096
_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".sqlite")
_NOT_TRACES = frozenset({"summary.json", "report.json"})


def read_trace(source: str | Path | Iterable[str | Path], *, whole: bool = False) -> Trace:
    """What a run did, from its files: one path, a folder with one file per rank, or a list of paths.

    Reads torch.profiler's JSON (Kineto, 2021 to now; CUDA, ROCm, gloo), Flight Recorder dumps as JSON, span
    logs of validation.record, `nsys export --type sqlite`, and what zsim writes itself; gzipped or not. The
    Trace holds the whole steps that all ranks have; `trace.typical_step()` is one of them. `whole` takes
    each file for one step. Ranks that are missing are allowed, and noted in `metadata["notes"]`.

    Raises InputError for files that are damaged, of another kind, without steps, or not of one run.
    """
    paths = _paths(source)
    recordings = [recording for path in paths for recording in _read_one(path)]
    try:
        trace = join(recordings, whole=whole)
    except OverflowError as error:
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise wrong_value(where, "holds a number of more than 64 bits", error) from error
    return replace(trace, metadata={**trace.metadata, **_summary(paths)})


def _paths(source: str | Path | Iterable[str | Path]) -> list[Path]:
    given = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    if not given:
        raise InputError("no trace files are given; expected a file per rank, or a folder of them")
    paths: list[Path] = []
    for path in given:
        if os.path.isdir(path):
            paths += _in_folder(path)
        elif os.path.exists(path):
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return paths


def _in_folder(folder: Path) -> list[Path]:
    """The traces in a folder. Where ranks have a span log and a profile, the logs: they hold whole steps."""
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name.endswith(_SUFFIXES) and path.name not in _NOT_TRACES
    )
    if not files:
        raise InputError(f"{folder}: has no trace in it; expected a file per rank ({', '.join(_SUFFIXES)})")
    logs = [path for path in files if ".jsonl" in path.name]
    return logs or files


def _summary(paths: list[Path]) -> dict[str, Any]:
    """What validation.record found out about the machine, from the summary beside its files."""
    try:
        summary = json.loads((paths[0].parent / "summary.json").read_text("utf-8"))
        return {"foreign_cpu_fraction": float(summary["step_seconds"]["foreign_cpu_fraction"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_one(path: Path) -> list[Recording]:
    kind = _kind_of(path)
    try:
        return _read_as(kind, path)
    except WRONG_VALUE as error:  # readers check what they take up; the rest is in the error's cause
        raise wrong_value(path, f"is damaged, or no {kind} trace that zsim knows", error) from error


def _read_as(kind: str, path: Path) -> list[Recording]:
    if kind == "nsys":
        return read_nsys(path)
    if kind == "span log":
        return [read_span_log(path)]
    if kind == "flight recorder":
        return [read_flight_recorder(path, JsonStream(path))]
    return [read_kineto(path, JsonStream(path))]


def _kind_of(path: Path) -> str:
    """By what the file begins with, whatever it is called."""
    try:
        with path.open("rb") as file:
            first = file.read(16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if first == _SQLITE:
        return "nsys"
    if first.startswith(b"\x80"):
        raise InputError(f"{path}: is a pickle, which can run code when it is read; {EXPECTED}")
    text = beginning(path)
    if '"traceEvents"' in text[:_HEAD]:
        return "kineto"
    if '"entries"' in text[:_HEAD]:
        return "flight recorder"
    return "span log" if _is_header(text.partition("\n")[0]) else "kineto"


def _is_header(line: str) -> bool:
    """Whether a line is the first of a span log."""
    try:
        header = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(header, dict) and {"rank", "world_size"} <= set(header)
