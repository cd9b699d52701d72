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

_CORRELATIONS = 10_000_000  # of one rank
_MARKS = "schedule"


class RankMarks(NamedTuple):
    """A rank with the intervals that are drawn above its streams, as (name, start, end) on the
    trace's clock.
    """

    rank: int
    marks: Sequence[tuple[str, float, float]]


def write_ranks_together(trace: Trace, ranks: Sequence[RankMarks], path: str | Path) -> Path:
    """Write `ranks` to `path`, gzipped if it ends in `.gz`. The same trace gives the same bytes."""
    return write_document(ranks_together(trace, ranks), Path(path))


def ranks_together(trace: Trace, ranks: Sequence[RankMarks]) -> dict[str, Any]:
    """The JSON object of `ranks`, which are named by their roles (`Trace.metadata`)."""
    named: list[Event] = []
    timed: list[Event] = []
    earliest = min(0.0, *trace.begins.values()) if trace.begins else 0.0
    for place, (rank, marks) in enumerate(ranks):
        own = _from(trace, rank, earliest)
        first = (place + 1) * _CORRELATIONS
        events = RankEvents(own, rank, pid=rank, first_correlation=first)
        named += _in_place(process_names(events), place)
        named.append(_thread_name(events))
        timed += [*events.launches(), *events.in_allocator(), *events.spans(), *events.memory()]
        timed += [_mark(events, name, start - earliest, end - earliest) for name, start, end in marks]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    words = {key: value for key, value in trace.metadata.items() if isinstance(value, str)}
    return {
        **words,
        "source": f"zsim, {trace.source}, {len(ranks)} ranks",
        "displayTimeUnit": "ms",
        "traceEvents": [*named, *timed],
    }


def _from(trace: Trace, rank: int, begin: float) -> Trace:
    """The spans and memory of one rank, on a clock that starts at `begin`."""
    memory = trace.memory
    if memory is not None:
        memory = replace(memory, stream_seconds=memory.stream_seconds - begin)
    return replace(trace, begins={rank: begin}, memory=memory).on_clock_of(rank)


def _in_place(names: Iterator[Event], place: int) -> Iterator[Event]:
    """The names with the processes sorted by `index`: the GPU of a rank, then its host."""
    for event in names:
        if event["name"] == "process_sort_index":
            is_host = event["args"]["sort_index"] < _GPUS
            event = {**event, "args": {"sort_index": 2 * place + is_host}}
        yield event


_GPUS = 5_000_000  # the first sort index of a GPU's process in a file of one rank


def _thread_name(events: RankEvents) -> Event:
    args = {"name": _MARKS}
    return {"ph": "M", "name": "thread_name", "pid": events.device, "tid": 0, "ts": 0.0, "args": args}


def _mark(events: RankEvents, name: str, start: float, end: float) -> Event:
    begin, over = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": name,
        "pid": events.device,
        "tid": 0,
        "ts": begin / 1000,
        "dur": (over - begin) / 1000,
        "args": {},
    }
