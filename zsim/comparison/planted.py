"""Faults planted in a trace, to test that a check catches and names them.

Each function takes a trace and returns a wrong one. `number` counts the rank's collectives in issue order,
from 0. Only the spans that the fault touches change, so a dropped call leaves a gap. For a recording of
several steps the typical one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zsim.arrays import Floats
from zsim.trace.trace import COLLECTIVES, MemoryEvents, SpanInfos, Trace


def drop_call(trace: Trace, number: int, rank: int | None = None) -> Trace:
    """The trace without one collective."""
    trace = trace.typical_step()
    keep = np.ones(len(trace), dtype=bool)
    keep[_nth_call_span(trace, number, rank)] = False
    return trace.select_spans(keep)


def double_message(trace: Trace, number: int, rank: int | None = None) -> Trace:
    """The trace with twice the bytes in one collective, as when a bucket is sent in a type twice as wide."""
    trace = trace.typical_step()
    span = _nth_call_span(trace, number, rank)
    info = trace.infos[trace.info_indices[span]]
    indices = trace.info_indices.copy()
    indices[span] = len(trace.infos)
    return replace(
        trace, infos=SpanInfos((*trace.infos, info._replace(bytes=2 * info.bytes))), info_indices=indices
    )


def swap_calls(trace: Trace, number: int, rank: int | None = None) -> Trace:
    """The trace with a collective and the next one swapped: each runs at the time of the other."""
    trace = trace.typical_step()
    first_span, second_span = _nth_call_span(trace, number, rank), _nth_call_span(trace, number + 1, rank)
    indices = trace.info_indices.copy()
    indices[[first_span, second_span]] = indices[[second_span, first_span]]
    return replace(trace, info_indices=indices)


def slow_link(trace: Trace, factor: float, group_size: int | None = None) -> Trace:
    """The trace with collectives (over `group_size` ranks) `factor` times as long, and all later spans
    delayed."""
    trace = trace.typical_step()
    is_slow = np.array(
        [info.kind in COLLECTIVES and group_size in (None, info.group_size) for info in trace.infos],
        dtype=bool,
    )
    issues, starts, ends = trace.issue_seconds.copy(), trace.start_seconds.copy(), trace.end_seconds.copy()
    transfers = None if trace.transfer_seconds is None else trace.transfer_seconds.copy()
    step_seconds = trace.step_seconds
    for rank in np.unique(trace.ranks).tolist():
        spans = np.flatnonzero(trace.ranks == rank)
        slow = spans[is_slow[trace.info_indices[spans]]]
        moments = trace.end_seconds[slow]
        extra = (factor - 1.0) * (moments - trace.start_seconds[slow])
        shift = _added_delay(trace.start_seconds[spans], moments, extra)
        issues[spans] += _added_delay(trace.issue_seconds[spans], moments, extra)
        starts[spans] += shift
        ends[spans] += shift
        ends[slow] += extra
        if transfers is not None:
            transfers[slow] *= factor
        step_seconds = max(step_seconds, trace.step_seconds + float(extra.sum()))
    return replace(
        trace,
        issue_seconds=issues,
        start_seconds=starts,
        end_seconds=ends,
        step_seconds=step_seconds,
        transfer_seconds=transfers,
        steps=(),
    )


def leak(trace: Trace, category: str = "buffers", device: str = "gpu") -> Trace:
    """The trace without the largest free of memory of `category`. Raises ValueError where nothing is
    freed."""
    trace = trace.typical_step()
    events = trace.memory
    if events is None:
        raise ValueError("the trace has no memory events")
    frees = [
        index
        for index, (event_device, event_category) in enumerate(
            zip(events.devices, events.categories, strict=True)
        )
        if (event_device, event_category) == (device, category) and events.deltas[index] < 0
    ]
    if not frees:
        raise ValueError(f"nothing of {category} is freed on {device}")
    largest_free = min(frees, key=lambda index: int(events.deltas[index]))
    return replace(trace, memory=_remove_event(events, largest_free))


def _remove_event(events: MemoryEvents, removed_index: int) -> MemoryEvents:
    keep = [index for index in range(len(events.deltas)) if index != removed_index]
    return MemoryEvents(
        ranks=events.ranks[keep],
        host_seconds=events.host_seconds[keep],
        stream_seconds=events.stream_seconds[keep],
        devices=_select(events.devices, keep),
        categories=_select(events.categories, keep),
        deltas=events.deltas[keep],
        names=_select(events.names, keep) if events.names else (),
    )


def _select(values: Sequence[str], keep: Sequence[int]) -> tuple[str, ...]:
    return tuple(values[index] for index in keep)


def _added_delay(times: Floats, moments: Floats, extra: Floats) -> Floats:
    """Sum of the `extra` seconds, added at `moments`, that come before each of `times`."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(extra[order])])
    delays: Floats = sums[np.searchsorted(moments[order], times, side="right")]
    return delays


def _nth_call_span(trace: Trace, number: int, rank: int | None) -> int:
    """The span of the rank's collective number `number`. Raises IndexError where there are fewer."""
    rank = int(trace.ranks[0]) if rank is None else rank
    return int(trace.calls(rank)[number])
