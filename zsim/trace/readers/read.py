"""`zsim.read_trace`: recorded files of any supported kind -> a Trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

from zsim.errors import InputError
from zsim.reading import parse_json, read_text
from zsim.trace.readers.content import (
    EXPECTED,
    WRONG_VALUE,
    Content,
    JsonStream,
    is_tar,
    read_members,
    wrong_value,
)
from zsim.trace.readers.flight_recorder import read_flight_recorder
from zsim.trace.readers.join_ranks import join
from zsim.trace.readers.kineto.recording import read_kineto
from zsim.trace.readers.nsys import read_nsys
from zsim.trace.readers.recording import Recording
from zsim.trace.readers.span_log import read_span_log
from zsim.trace.trace import Trace

_SQLITE = b"SQLite format 3\x00"
_HEAD = 4096
_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".sqlite")
_NOT_TRACES = frozenset({"summary.json", "report.json"})
_Name = TypeVar("_Name", bound=PurePath)


def read_trace(source: str | Path | Iterable[str | Path], *, whole: bool = False) -> Trace:
    """The Trace of a recorded run: one path, a folder with one file per rank, or a list of paths.

    Reads torch.profiler's JSON (Kineto, 2021 to now: CUDA, ROCm, gloo), Flight Recorder dumps as JSON, span
    logs of validation.record, `nsys export --type sqlite`, and zsim's exports. Files may be gzipped, and a
    folder's files may also be in a `.tar` or `.tar.gz`.

    The Trace holds the complete steps that all ranks have. `trace.typical_step()` is one of them. `whole`
    takes each file as one step. Ranks may be missing, which `metadata["notes"]` says.

    Raises InputError for files that are damaged, of another kind, without steps, or not of one run.
    """
    paths = _paths(source)
    recordings = [recording for path in paths for recording in _read_file(path)]
    try:
        trace = join(recordings, is_one_step=whole)
    except OverflowError as error:
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise wrong_value(where, "holds a number of more than 64 bits", error) from error
    return replace(trace, metadata={**trace.metadata, **_summary(paths)})


def _paths(source: str | Path | Iterable[str | Path]) -> list[Path]:
    sources = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    if not sources:
        raise InputError("no trace files are given; expected a file per rank, or a folder of them")
    paths: list[Path] = []
    for path in sources:
        if os.path.isdir(path):
            paths += _folder_traces(path)
        elif os.path.exists(path):
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return paths


def _folder_traces(folder: Path) -> list[Path]:
    """The traces in a folder. If ranks have both a span log and a profile, these are the logs, which hold
    full steps.
    """
    return _select_traces(folder, [path for path in folder.iterdir() if path.is_file()])


def _select_traces(source: Path, names: Iterable[_Name]) -> list[_Name]:
    files = sorted(
        name
        for name in names
        if name.name.endswith(_SUFFIXES) and name.name not in _NOT_TRACES and not name.name.startswith(".")
    )
    if not files:
        raise InputError(f"{source}: has no trace in it; expected a file per rank ({', '.join(_SUFFIXES)})")
    logs = [name for name in files if ".jsonl" in name.name]
    return logs or files


def _summary(paths: list[Path]) -> dict[str, Any]:
    """validation.record's finding about the machine, from the summary in the folder of the traces."""
    try:
        path = paths[0].parent / "summary.json"
        summary = parse_json(read_text(path), path)
        return {"foreign_cpu_fraction": float(summary["step_seconds"]["foreign_cpu_fraction"])}
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return {}


def _read_file(path: Path) -> Iterator[Recording]:
    content = Content(path)
    if not is_tar(content.beginning):
        yield from _read(content)
        return
    for member in read_members(path, lambda names: _select_traces(path, names)):
        if member.beginning.startswith(_SQLITE):
            raise InputError(f"{member.path}: is read from a file of its own; unpack {path.name} first")
        yield from _read(member)


def _read(content: Content) -> list[Recording]:
    kind = _kind_of(content)
    try:
        return _read_kind(kind, content)
    except WRONG_VALUE as error:  # readers check the values that they use; the rest is in the error's cause
        where = f"is damaged, or no {kind} trace that zsim knows"
        raise wrong_value(content.path, where, error) from error


def _read_kind(kind: str, content: Content) -> list[Recording]:
    path = content.path
    if kind == "nsys":
        return read_nsys(path)
    if kind == "span log":
        return [read_span_log(content)]
    if kind == "flight recorder":
        return [read_flight_recorder(path, JsonStream(content))]
    return [read_kineto(path, JsonStream(content))]


def _kind_of(content: Content) -> str:
    """The kind of file by its beginning, whatever its name."""
    first = content.beginning
    if first.startswith(_SQLITE):
        return "nsys"
    if first.startswith(b"\x80"):
        raise InputError(f"{content.path}: is a pickle, which can run code when it is read; {EXPECTED}")
    text = first.decode("utf-8", errors="replace")
    if '"traceEvents"' in text[:_HEAD]:
        return "kineto"
    if '"entries"' in text[:_HEAD]:
        return "flight recorder"
    return "span log" if _is_header(text.partition("\n")[0]) else "kineto"


def _is_header(line: str) -> bool:
    """Whether a line is the header of a span log."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and {"rank", "world_size"} <= set(header)
