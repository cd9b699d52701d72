"""A trace as Chrome JSON in the shape that torch.profiler (Kineto) writes, one file per rank.

It opens in ui.perfetto.dev and chrome://tracing, and tools made for recorded traces read it: Holistic Trace
Analysis, traceinsight.

`Trace.metadata` may hold "backend" ("nccl"), "groups" (name -> (size, stride)), "group_members" (name ->
ranks of each communicator), "roles" (rank -> name of its program), "host_ahead_seconds" (rank -> seconds that
its host had worked on the step before it began), "gpu", "gpu_memory_bytes", "sm_count" and "gpus_per_node".
Text in it is copied into the file.

Several ranks of a trace in one file of Chrome JSON, on one clock: a pipeline for the eye.

It opens in ui.perfetto.dev and chrome://tracing. Every rank has a process for its GPU and one for its host,
in the order given. Tools that read recorded traces expect one rank per file (`zsim.trace.chrome.write`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zsim.files import make_folder, write_atomically
from zsim.trace.chrome.events import Event, RankEvents, is_on_gpu
from zsim.trace.drives import drive_rates
from zsim.trace.trace import Trace

_SCHEMA_VERSION = 1
_GPU_SORT_INDEX = 5_000_000


def write_chrome_trace(trace: Trace, path: str | Path, rank: int | None = None) -> Path:
    """Write `rank` (default: the first rank of the trace) to `path`, gzipped if it ends in `.gz`. The same
    trace gives the same bytes.
    """
    return write_document(chrome_trace(trace, rank), Path(path))


def write_document(document: dict[str, Any], path: Path) -> Path:
    """Write a JSON object of events to `path`, gzipped if it ends in `.gz`."""
    text = format_document(document).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, compresslevel=6, mtime=0)
    return write_atomically(path, text)


def write_chrome_traces(trace: Trace, directory: str | Path) -> list[Path]:
    """Write one `rank<N>.json.gz` for each rank in the trace."""
    directory = make_folder(Path(directory))
    ranks = np.unique(trace.ranks).tolist()
    return [write_chrome_trace(trace, directory / f"rank{rank}.json.gz", rank) for rank in ranks]


def chrome_trace(trace: Trace, rank: int | None = None, step: int = 1) -> dict[str, Any]:
    """The JSON object of one rank (default: the first of the trace)."""
    if rank is None:
        rank = int(trace.ranks[0]) if len(trace) else 0
    events = RankEvents(trace.select_rank(rank), rank)
    timed_events = [
        *events.steps(step),
        *events.launches(),
        *events.allocator_spans(),
        *events.phases(),
        *events.spans(),
        *events.memory(),
        *_drives(trace, events),
    ]
    timed_events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    text_metadata = {key: value for key, value in trace.metadata.items() if isinstance(value, str)}
    return {
        **text_metadata,
        "source": f"zsim, {trace.source}",
        "schemaVersion": _SCHEMA_VERSION,
        "deviceProperties": [_device_properties(events)],
        "distributedInfo": _distributed_info(events),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        **_host_ahead(trace, rank),
        "traceEvents": [*process_names(events), *timed_events],
    }


def _host_ahead(trace: Trace, rank: int) -> dict[str, float]:
    seconds = trace.metadata.get("host_ahead_seconds", {}).get(rank)
    return {} if seconds is None else {"host_ahead_seconds": round(seconds, 9)}


def _drives(trace: Trace, events: RankEvents) -> Iterator[Event]:
    """A counter of the rates of the drives of the rank's node, summed over all its ranks."""
    rates = drive_rates(trace, events.rank)
    if rates is None:
        return
    changes = zip(rates.seconds.tolist(), rates.read.tolist(), rates.write.tolist(), strict=True)
    for seconds, read, write in changes:
        yield {
            "ph": "C",
            "name": "drives of the node (GB/s)",
            "pid": events.host,
            "tid": 0,
            "ts": round(seconds * 1e9) / 1000,
            "args": {"read": round(read / 1e9, 3), "write": round(write / 1e9, 3)},
        }


def format_document(document: dict[str, Any]) -> str:
    """JSON with one line per head entry and per event, as traceinsight searches for the rank line by line."""
    head = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)},\n"
        for key, value in document.items()
        if key != "traceEvents"
    ]
    events = json.dumps(document["traceEvents"], separators=(",", ":"), allow_nan=False)
    # Every event begins with its "ph", and a quote within a string would stand behind a backslash.
    lines = events[1:-1].replace('},{"ph":', '},\n{"ph":')
    return "{\n" + "".join(head) + f'"traceEvents": [\n{lines}\n]}}\n'


def _device_properties(events: RankEvents) -> Event:
    metadata = events.trace.metadata
    properties = {
        "name": metadata.get("gpu"),
        "totalGlobalMem": metadata.get("gpu_memory_bytes"),
        "numSms": metadata.get("sm_count"),
    }
    return {"id": events.device, **{key: value for key, value in properties.items() if value is not None}}


def _distributed_info(events: RankEvents) -> Event:
    configs = [
        {
            "pg_name": str(index),
            "pg_desc": group or "default_pg",
            "backend_config": f"cuda:{events.backend}",
            "pg_size": events.group_sizes[group],
            "ranks": events.ranks_of(group),
        }
        for group, index in events.groups.items()
    ]
    return {
        "backend": events.backend,
        "rank": events.rank,
        "world_size": events.trace.world_size,
        "pg_count": len(configs),
        "pg_config": configs,
    }


def process_names(events: RankEvents) -> Iterator[Event]:
    """Names and sort order of processes and threads."""
    role = events.trace.metadata.get("roles", {}).get(events.rank, "")
    for pid, label, index in (
        (events.host, "CPU", events.host),
        (events.device, f"GPU {events.device}", _GPU_SORT_INDEX + events.device),
    ):
        name = ", ".join(word for word in (f"zsim rank {events.rank}", role) if word)
        yield _name_event("process_name", pid, 0, "name", name)
        yield _name_event("process_labels", pid, 0, "labels", label)
        yield _name_event("process_sort_index", pid, 0, "sort_index", index)
    yield _name_event("thread_name", events.host, events.host, "name", "host program")
    host_streams = {info.stream for info in events.trace.infos if not is_on_gpu(info)}
    for (stream, sub_track), number in events.tracks.items():
        pid, tid = (events.host, events.host + number) if stream in host_streams else (events.device, number)
        label = stream if stream in host_streams else f"stream {number} {stream}"
        yield _name_event(
            "thread_name", pid, tid, "name", label + (f" ({sub_track + 1})" if sub_track else "")
        )
        yield _name_event("thread_sort_index", pid, tid, "sort_index", number)


def _name_event(event: str, pid: int, tid: int, key: str, value: str | int) -> Event:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "ts": 0.0, "args": {key: value}}


_CORRELATIONS_PER_RANK = 10_000_000  # of one rank
_MARKS_THREAD = "schedule"


class RankMarks(NamedTuple):
    """A rank with the intervals that are drawn above its streams, as (name, start, end) on the
    trace's clock.
    """

    rank: int
    marks: Sequence[tuple[str, float, float]]


def write_rank_traces(trace: Trace, ranks: Sequence[RankMarks], path: str | Path) -> Path:
    """Write `ranks` to `path`, gzipped if it ends in `.gz`. The same trace gives the same bytes."""
    return write_document(merged_rank_traces(trace, ranks), Path(path))


def merged_rank_traces(trace: Trace, ranks: Sequence[RankMarks]) -> dict[str, Any]:
    """The JSON object of `ranks`, which are named by their roles (`Trace.metadata`)."""
    name_events: list[Event] = []
    timed_events: list[Event] = []
    earliest = min(0.0, *trace.begins.values()) if trace.begins else 0.0
    for index, (rank, marks) in enumerate(ranks):
        rank_trace = _select_rank(trace, rank, earliest)
        first_correlation = (index + 1) * _CORRELATIONS_PER_RANK
        events = RankEvents(rank_trace, rank, pid=rank, first_correlation=first_correlation)
        name_events += _sort_processes(process_names(events), index)
        name_events.append(_thread_name(events))
        timed_events += [*events.launches(), *events.allocator_spans(), *events.spans(), *events.memory()]
        timed_events += [_mark(events, name, start - earliest, end - earliest) for name, start, end in marks]
    timed_events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    text_metadata = {key: value for key, value in trace.metadata.items() if isinstance(value, str)}
    return {
        **text_metadata,
        "source": f"zsim, {trace.source}, {len(ranks)} ranks",
        "displayTimeUnit": "ms",
        "traceEvents": [*name_events, *timed_events],
    }


def _select_rank(trace: Trace, rank: int, begin: float) -> Trace:
    """The spans and memory of one rank, on a clock that starts at `begin`."""
    memory = trace.memory
    if memory is not None:
        memory = replace(memory, stream_seconds=memory.stream_seconds - begin)
    return replace(trace, begins={rank: begin}, memory=memory).rank_view(rank)


def _sort_processes(names: Iterator[Event], index: int) -> Iterator[Event]:
    """The names with the processes sorted by `index`: the GPU of a rank, then its host."""
    for event in names:
        if event["name"] == "process_sort_index":
            is_host = event["args"]["sort_index"] < _FIRST_GPU_SORT_INDEX
            event = {**event, "args": {"sort_index": 2 * index + is_host}}
        yield event


_FIRST_GPU_SORT_INDEX = 5_000_000  # the first sort index of a GPU's process in a file of one rank


def _thread_name(events: RankEvents) -> Event:
    args = {"name": _MARKS_THREAD}
    return {"ph": "M", "name": "thread_name", "pid": events.device, "tid": 0, "ts": 0.0, "args": args}


def _mark(events: RankEvents, name: str, start: float, end: float) -> Event:
    start_nanoseconds, end_nanoseconds = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": name,
        "pid": events.device,
        "tid": 0,
        "ts": start_nanoseconds / 1000,
        "dur": (end_nanoseconds - start_nanoseconds) / 1000,
        "args": {},
    }
