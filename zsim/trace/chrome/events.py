"""The events of one rank in Kineto's shape: launches on the host thread, spans on their tracks, counters.

Times are rounded to nanoseconds before durations are computed, so that spans that touch do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zsim.arrays import Floats
from zsim.trace.collective_names import collective_metadata, group_ranks, kernel_name, process_groups
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace

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
