"""An Nsight Systems export (`nsys export --type sqlite`) as Recordings: durations, streams, NVTX ranges.

NCCL's kernels state their kind and dtype but not their size. Sizes are only in NVTX payloads that are not
decoded here, so collectives have 0 bytes, and their group is taken to be all ranks. One file may contain all
processes of a node. Each process that used a GPU is a rank.

Source: NVIDIA, "SQLite Export Schema Reference" and its examples (Nsight Systems 2022.4). Tables exist only
if they are needed and differ by version, so each is checked first.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.readers.kineto.file import DeviceEvent, KinetoFile, add_range, is_synchronize
from zsim.trace.readers.kineto.recording import fill_recording, rank_in_name
from zsim.trace.readers.recording import Recording

_PROCESS = 0x1000000  # globalTid is globalPid + tid
_COPY_KINDS = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
_STEP = re.compile(
    r"^(?:ProfilerStep#|(?:train(?:ing)?[ _])?(?:step|iteration|iter)[ _#:]*)(\d+)$", re.IGNORECASE
)
_RANGE_EVENT_TYPES = (59, 60)  # push/pop and start/end
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def read_nsys(path: Path) -> list[Recording]:
    """A recording of each process that ran kernels. Raises InputError for a damaged file or one without
    kernels."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with sqlite3.connect(uri, uri=True) as database:
            database.row_factory = sqlite3.Row
            return _recordings(path, database)
    except sqlite3.Error as error:
        raise InputError(
            f"{path}: cannot be read as an export of `nsys export --type sqlite`: {error}"
        ) from None


def _recordings(path: Path, database: sqlite3.Connection) -> list[Recording]:
    columns = _columns(database)
    if _KERNELS not in columns:
        raise InputError(
            f"{path}: has no table {_KERNELS} (it has {', '.join(sorted(columns)[:5]) or 'none'}); expected "
            "an export of a report that was recorded with `nsys profile --trace=cuda,nvtx`"
        )
    strings = {row["id"]: row["value"] for row in _rows(database, columns, "StringIds")}
    base = next((row["utcEpochNs"] for row in _rows(database, columns, "TARGET_INFO_SESSION_START_TIME")), 0)
    files: dict[int, KinetoFile] = {}
    devices: dict[int, int] = {}
    for row in _rows(database, columns, _KERNELS):
        process = _value_or_default(row, "globalPid", 0)
        file = files.setdefault(process, KinetoFile(path, {}, base))
        devices.setdefault(process, row["deviceId"])
        name = str(
            strings.get(
                _value_or_default(row, "demangledName", None),
                strings.get(_value_or_default(row, "shortName", 0), ""),
            )
        )
        file.device_events.append(_device_event("kernel", name, row, {}))
    for table, kind in (("MEMCPY", "memcpy"), ("MEMSET", "memset")):
        for row in _rows(database, columns, f"CUPTI_ACTIVITY_KIND_{table}"):
            process_file = files.get(_value_or_default(row, "globalPid", 0))
            if process_file is not None:
                name = (
                    _COPY_KINDS.get(_value_or_default(row, "copyKind", 0), "Memcpy")
                    if kind == "memcpy"
                    else "Memset"
                )
                args = {"bytes": _value_or_default(row, "bytes", 0)}
                process_file.device_events.append(_device_event(kind, name, row, args))
    _add_host(database, columns, strings, files)
    order = sorted(files, key=lambda process: (devices[process], process))
    first = rank_in_name(path) if len(files) == 1 else 0
    recordings = []
    for rank, process in enumerate(order, first):
        recording = Recording(path, rank, max(len(files), first + 1), "nccl")
        recordings.append(fill_recording(recording, files[process]))
    return recordings


def _device_event(kind: str, name: str, row: sqlite3.Row, args: dict[str, Any]) -> DeviceEvent:
    return DeviceEvent(
        kind, name, row["deviceId"], row["streamId"], row["start"], row["end"], row["correlationId"], -1, args
    )


def _add_host(
    database: sqlite3.Connection,
    columns: dict[str, set[str]],
    strings: dict[int, str],
    files: dict[int, KinetoFile],
) -> None:
    """Add launches, waits and ranges of the processes that used a GPU."""
    for row in _rows(database, columns, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        thread = row["globalTid"]
        file = _file_of(files, thread)
        if file is None:
            continue
        start, end, name = row["start"], row["end"], str(strings.get(_value_or_default(row, "nameId", 0), ""))
        file.launches[row["correlationId"]] = start, end, (None, thread)
        call = name.partition("_v")[0]
        if is_synchronize(call):
            file.blocks.append((start, end, (None, thread)))
        elif call.endswith("StreamWaitEvent"):
            file.waits.setdefault((None, thread), []).append(start)
    for row in _rows(database, columns, "NVTX_EVENTS"):
        file = _file_of(files, row["globalTid"])
        name = _value_or_default(row, "text", None) or strings.get(
            _value_or_default(row, "textId", None) or -1, ""
        )
        if file is None or not name or row["end"] is None or row["eventType"] not in _RANGE_EVENT_TYPES:
            continue
        step = _STEP.match(str(name).strip())
        title = f"ProfilerStep#{step[1]}" if step else str(name).partition(", op_id")[0]
        add_range(file, (None, row["globalTid"]), title, row["start"], row["end"])


def _file_of(files: dict[int, KinetoFile], thread: int) -> KinetoFile | None:
    """The file of a thread's process, or the only file if kernels do not state their process (older
    exports).
    """
    return files.get(thread // _PROCESS * _PROCESS) or files.get(0)


def _columns(database: sqlite3.Connection) -> dict[str, set[str]]:
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')} for table in tables}


def _rows(database: sqlite3.Connection, columns: dict[str, set[str]], table: str) -> Iterator[sqlite3.Row]:
    if table in columns:
        yield from database.execute(f'SELECT * FROM "{table}"')


def _value_or_default(row: sqlite3.Row, name: str, default: Any) -> Any:
    return row[name] if name in row.keys() else default  # noqa: SIM118 - a Row is no mapping
