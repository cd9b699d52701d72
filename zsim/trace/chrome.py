"""A trace as Chrome JSON in the shape that torch.profiler (Kineto) writes, one file per rank.

Launches stand on the host thread, spans on their tracks, and levels are counters. Times are rounded to
nanoseconds before durations are computed, so that spans that touch do not overlap.

It opens in ui.perfetto.dev and chrome://tracing, and tools made for recorded traces read it: Holistic Trace
Analysis, traceinsight.

`Trace.metadata` may hold "backend" ("nccl"), "groups" (name -> (size, stride)), "group_members" (name ->
ranks of each communicator), "roles" (rank -> name of its program), "host_ahead_seconds" (rank -> seconds that
its host had worked on the step before it began), "gpu", "gpu_memory_bytes", "sm_count" and "gpus_per_node".
Text in it is copied into the file.

Several ranks may also stand in one file on one clock: a pipeline for the eye. Every rank has a process for
its GPU and one for its host, in the order given. Tools that read recorded traces expect one rank per file
(`zsim.trace.chrome`).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zsim.arrays import Floats
from zsim.files import make_folder, write_atomically
from zsim.trace.collective_names import collective_metadata, group_ranks, kernel_name, process_groups
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace, drive_rates

Event = dict[str, Any]

_FIRST_STREAM, _SECOND_STREAM, _STREAM_STRIDE = 7, 20, 4  # the default stream is 7 in recorded traces
_OFF_GPU_KINDS = frozenset({"cpu", "nvme_read", "nvme_write", "host"})
ALLOCATOR = "allocator"  # the category of the allocator's events
_ALLOCATOR_LABEL = "torch's allocator runs short"
_COPIES = {"h2d": "Memcpy HtoD (Pinned -> Device)", "d2h": "Memcpy DtoH (Device -> Pinned)"}
_HOST_PID = 100_000
_LAUNCH_NANOSECONDS = 5_000  # a cudaLaunchKernel's usual time; the rest of issuing an op is Python's
_FIRST_CORRELATION = (
    100_000  # traceinsight keeps ids in the narrowest integers that hold them, row numbers too
)


@dataclass
class RankEvents:
    """The events of one rank."""

    trace: Trace
    rank: int
    pid: int | None = None  # of the GPU's process; the number of the GPU in its node where left out
    first_correlation: int = _FIRST_CORRELATION
    tracks: dict[tuple[str, int], int] = field(default_factory=dict)  # (stream, lane) -> tid

    def __post_init__(self) -> None:
        trace, metadata = self.trace, self.trace.metadata
        self.backend = str(metadata.get("backend", "nccl"))
        self.device = self.rank % int(metadata.get("gpus_per_node", 1))
        if self.pid is not None:
            self.device = self.pid
        self.host = _HOST_PID + self.rank
        rank_indices = set(trace.info_indices.tolist())
        self.groups = process_groups(
            info for number, info in enumerate(trace.infos) if number in rank_indices
        )
        self.group_sizes = {info.group: info.group_size for info in trace.infos if info.kind in COLLECTIVES}
        self.starts = _nanoseconds(trace.start_seconds)
        self.ends = _nanoseconds(trace.end_seconds)
        self.indices = trace.info_indices.tolist()
        time_order = sorted(range(len(trace)), key=lambda i: (self.starts[i], self.ends[i]))
        self.order = [span for span in time_order if self._info(span).kind != "host"]
        self.host_spans = [span for span in time_order if self._info(span).kind == "host"]
        self.correlations = {
            span: number for number, span in enumerate(self._launch_order(), self.first_correlation)
        }
        self.span_metadata = self._attached_metadata()
        self.tids = self._assign_tracks()

    def _launch_order(self) -> list[int]:
        """Spans that the host launched on the GPU, in the order of launch. A span of unknown launch counts by
        its start.
        """
        issue = self.trace.issue_seconds
        launched = [i for i in self.order if is_on_gpu(self._info(i))]
        return sorted(launched, key=lambda i: self.starts[i] if math.isnan(issue[i]) else issue[i] * 1e9)

    def _info(self, span: int) -> SpanInfo:
        info: SpanInfo = self.trace.infos[self.indices[span]]
        return info

    def ranks_of(self, group: str) -> list[int]:
        return group_ranks(group, self.group_sizes[group], self.rank, self.trace.metadata)

    def _attached_metadata(self) -> dict[int, Event]:
        ranks = {group: self.ranks_of(group) for group in self.groups}
        sequence = dict.fromkeys(self.groups, 0)
        metadata: dict[int, Event] = {}
        for span in self.correlations:
            info = self._info(span)
            if info.kind in COLLECTIVES:
                index, number = self.groups[info.group], sequence[info.group]
                metadata[span] = collective_metadata(info, index, ranks[info.group], number)
                sequence[info.group] += 1
        return metadata

    def _assign_tracks(self) -> dict[int, int]:
        """A track per stream. Spans that overlap on one stream are put on additional tracks."""
        track_ends: dict[str, list[int]] = {}
        tids: dict[int, int] = {}
        compute_first = sorted(self.order, key=lambda i: self._info(i).stream != "compute")
        for span in compute_first:
            info = self._info(span)
            ends = track_ends.setdefault(info.stream, [])
            sub_track = next((n for n, end in enumerate(ends) if end <= self.starts[span]), len(ends))
            ends[sub_track : sub_track + 1] = [self.ends[span]]
            count = len(self.tracks)
            number = _FIRST_STREAM if not count else _SECOND_STREAM + _STREAM_STRIDE * (count - 1)
            tids[span] = self.tracks.setdefault((info.stream, sub_track), number)
        return tids

    def _track_ids(self, span: int) -> tuple[int, int]:
        is_gpu_span = is_on_gpu(self._info(span))
        return (self.device, self.tids[span]) if is_gpu_span else (self.host, self.host + self.tids[span])

    def steps(self, step: int) -> Iterator[Event]:
        begin = self.trace.begins.get(self.rank, 0.0)
        start, end = round(begin * 1e9), round((begin + self.trace.step_seconds) * 1e9)
        yield _complete_event(
            "user_annotation", f"ProfilerStep#{step}", self.host, self.host, start, end, {"External id": 0}
        )

    def spans(self) -> Iterator[Event]:
        for span in self.order:
            pid, tid = self._track_ids(span)
            yield self._span(span, self._info(span), pid, tid)

    def _span(self, span: int, info: SpanInfo, pid: int, tid: int) -> Event:
        start, end = self.starts[span], self.ends[span]
        args: Event = {"kind": info.kind, "phase": info.phase, "module": info.module}
        if not is_on_gpu(info):
            return _complete_event("cpu_op", info.name, pid, tid, start, end, args | {"bytes": info.bytes})
        number = self.correlations[span]
        args |= {"External id": number, "device": self.device, "stream": tid, "correlation": number}
        if info.kind in COLLECTIVES:
            args |= {"op": info.name, **self.span_metadata[span]}
            return _complete_event("kernel", kernel_name(info, self.backend), pid, tid, start, end, args)
        if info.kind in _COPIES:
            args |= {"op": info.name, "bytes": info.bytes}
            return _complete_event("gpu_memcpy", _COPIES[info.kind], pid, tid, start, end, args)
        args |= {"flops": info.flops, "bytes": round(info.hbm_bytes)}
        return _complete_event("kernel", info.name, pid, tid, start, end, args)

    def phases(self) -> Iterator[Event]:
        """`## forward ##` and so on: segments of the compute stream. Recomputation is part of backward."""
        tid = self.tracks.get(("compute", 0))
        if tid is None:
            return
        runs: list[tuple[str, int, int]] = []
        for span in self.order:
            info = self._info(span)
            if self.tids[span] != tid or not is_on_gpu(info):
                continue
            phase = "backward" if info.phase == "recompute" else info.phase or "step"
            if runs and runs[-1][0] == phase:
                runs[-1] = (phase, runs[-1][1], self.ends[span])
            else:
                runs.append((phase, self.starts[span], self.ends[span]))
        for phase, start, end in runs:
            yield _complete_event(
                "gpu_user_annotation", f"## {phase} ##", self.device, tid, start, end, {"External id": 0}
            )

    def launches(self) -> Iterator[Event]:
        """The host thread: the issue of each op with its launch, and the waits, [Note: host time]."""
        cursor = 0
        for start, end, span, name in self._host_program():
            begin = min(max(start, cursor), end)
            cursor = max(cursor, end)
            if span is None:
                yield _complete_event(
                    "cuda_runtime", name, self.host, self.host, begin, end, {"External id": 0}
                )
                continue
            number, info = self.correlations[span], self._info(span)
            args: Event = {"External id": number, **self.span_metadata.get(span, {})}
            op = "record_param_comms" if info.kind in COLLECTIVES else info.name
            yield _complete_event("cpu_op", op, self.host, self.host, begin, end, args)
            args = {"External id": number, "correlation": number}
            launch = max(begin, end - _LAUNCH_NANOSECONDS)
            yield _complete_event("cuda_runtime", name, self.host, self.host, launch, end, args)
            pid, tid = self._track_ids(span)
            flow = {
                "ph": "s",
                "id": number,
                "cat": "ac2g",
                "name": "ac2g",
                "pid": self.host,
                "tid": self.host,
            }
            yield {**flow, "ts": launch / 1000}
            yield {**flow, "ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": self.starts[span] / 1000}

    def _host_program(self) -> list[tuple[int, int, int | None, str]]:
        """The host's work in order: (start, end, the span that it launched, name).

        # [Note: host time]
        A trace has the time when an op was issued, which is the end of the host's work for it. That work
        began when the host had finished its previous work. The launch itself is the last few microseconds of
        it. Of two that ended at one time the one with a known start comes first: a wait, then the op it
        delayed.
        """
        program: list[tuple[int, int, int | None, str]] = []
        issue = self.trace.issue_seconds
        for span in self.correlations:
            if not math.isnan(issue[span]):
                name = "cudaMemcpyAsync" if self._info(span).kind in _COPIES else "cudaLaunchKernel"
                program.append((0, round(issue[span] * 1e9), span, name))
        for span in self.host_spans:
            is_issue_known = not math.isnan(issue[span])
            start, end = (
                (0, round(issue[span] * 1e9)) if is_issue_known else (self.starts[span], self.ends[span])
            )
            program.append((start, end, None, self._info(span).name))
        program += [
            (round(start * 1e9), round(end * 1e9), None, "cudaStreamSynchronize")
            for _, start, end, _info in self.trace.host_blocks
        ]
        return sorted(program, key=lambda row: (row[1], row[0] == 0, row[0]))

    def allocator_spans(self) -> Iterator[Event]:
        """The times in which the host thread was in torch's allocator, which had run short."""
        for _, start, end in self.trace.allocator_blocks:
            begin, end_nanoseconds = round(start * 1e9), round(end * 1e9)
            yield _complete_event(
                ALLOCATOR, _ALLOCATOR_LABEL, self.host, self.host, begin, end_nanoseconds, {"External id": 0}
            )

    def memory(self) -> Iterator[Event]:
        """One counter per device, with a series per category, [Note: peaks within an instant]."""
        for device, time, levels in self._memory_levels():
            pid = self.device if device == "gpu" else self.host
            yield {
                "ph": "C",
                "name": f"{device} memory",
                "pid": pid,
                "tid": 0,
                "ts": time / 1000,
                "args": levels,
            }

    def _memory_levels(self) -> Iterator[tuple[str, int, dict[str, int]]]:
        """(device, nanoseconds, bytes by category) in the order in which memory changed.

        # [Note: peaks within an instant]
        Several changes may have the same time. When memory is freed after an allocation at the same time, the
        levels before it are written too: without them the peak is lost. Within a run of allocations each
        category only grows, so its end has the maximum of every category and of the sum.
        """
        events = self.trace.memory
        if events is None:
            return
        rank_changes = [i for i, rank in enumerate(events.ranks.tolist()) if rank == self.rank]
        categories = sorted(set(events.categories))
        levels = {device: dict.fromkeys(categories, 0) for device in sorted(set(events.devices))}
        last: dict[str, tuple[int, bool]] = {}  # device -> time and whether it grew then; not yet written
        deltas, seconds = events.deltas.tolist(), _nanoseconds(events.stream_seconds)
        now = 0
        for i in rank_changes:
            device, change = events.devices[i], deltas[i]
            now = max(now, seconds[i])
            if device in last:
                time, has_grown = last[device]
                if time < now or (has_grown and change < 0):
                    yield device, time, dict(levels[device])
            levels[device][events.categories[i]] += change
            last[device] = now, change > 0
        for device, (time, _) in last.items():
            yield device, time, dict(levels[device])


def is_on_gpu(info: SpanInfo) -> bool:
    return info.kind not in _OFF_GPU_KINDS


def _nanoseconds(seconds: Floats) -> list[int]:
    nanoseconds: list[int] = np.rint(seconds * 1e9).astype(np.int64).tolist()
    return nanoseconds


def _complete_event(
    category: str, name: str, pid: int, tid: int, start: int, end: int, args: Mapping[str, Any]
) -> Event:
    """A complete event, with times in nanoseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": dict(args),
    }


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
