"""Several ranks of a trace in one file of Chrome JSON, on one clock: a pipeline for the eye.

It opens in ui.perfetto.dev and chrome://tracing. Every rank has a process for its GPU and one for its host,
in the order given. Tools that read recorded traces expect one rank per file (`zsim.trace.chrome.write`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zsim.trace.chrome.events import Event, RankEvents
from zsim.trace.chrome.write import process_names, write_document
from zsim.trace.trace import Trace

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
