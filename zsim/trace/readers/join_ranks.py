"""Joins the recordings of one or more ranks into a Trace, on one clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from zsim.errors import InputError
from zsim.trace.readers.matching import clock_offsets, match_collectives, transfer_times
from zsim.trace.readers.recording import UNKNOWN, Recording
from zsim.trace.trace import COLLECTIVES, MemoryEvents, SpanInfo, SpanInfos, Step, Trace

_NO_STEP = -1
_Bounds = dict[int, tuple[int, int]]  # step -> (start, end)


def join(recordings: Sequence[Recording], *, is_one_step: bool = False) -> Trace:
    """One Trace of all ranks. `is_one_step` takes each recording as one step.

    Raises InputError for ranks that do not belong to one run, and for recordings without steps.
    """
    ordered = sorted(recordings, key=lambda recording: recording.rank)
    world_size = _check_ranks(ordered)
    if is_one_step:
        for recording in ordered:
            recording.steps = [(0, *_recorded_extent(recording))]
    _check_steps(ordered)
    steps = [_span_steps(recording) for recording in ordered]
    matches = match_collectives(ordered, steps)
    offsets = clock_offsets(ordered, matches)
    transfers, num_bounds = transfer_times(ordered, matches, offsets, world_size)
    bounds = [_bounds(recording, steps[index]) for index, recording in enumerate(ordered)]
    numbers = sorted(set.intersection(*(set(rank_bounds) for rank_bounds in bounds)))
    zero_time = min(bounds[index][numbers[0]][0] + offsets[index] for index in range(len(ordered)))
    shifts = [offset - zero_time for offset in offsets]
    table = _Table()
    for index, recording in enumerate(ordered):
        table.add(recording, steps[index], set(numbers), shifts[index], transfers[index])
    spans = [_step_span(ordered, bounds, shifts, number) for number in numbers]
    typical_seconds = sorted(step.seconds for step in spans)[(len(spans) - 1) // 2]
    blocks = _host_blocks(ordered, shifts, table)  # before `infos`, to which it may add
    metadata = _metadata(ordered, world_size, offsets, table)
    metadata["transfers_bounded"] = num_bounds
    return Trace(
        source="recorded",
        infos=SpanInfos(table.infos),
        world_size=world_size,
        step_seconds=typical_seconds,
        memory=_memory(ordered, shifts),
        host_blocks=blocks,
        allocator_blocks=tuple(
            (recording.rank, (start + shift) / 1e9, (end + shift) / 1e9)
            for recording, shift in zip(ordered, shifts, strict=True)
            for start, end in recording.allocator_blocks
        ),
        metadata=metadata,
        steps=tuple(spans),
        **table.arrays(),
    )


def _check_ranks(recordings: Sequence[Recording]) -> int:
    first = recordings[0]
    for previous, second in pairwise(recordings):
        if previous.rank == second.rank:
            raise InputError(
                f"{second.path}: is of rank {second.rank}, and so is {previous.path}; expected one file per "
                "rank"
            )
    for recording in recordings:
        if recording.world_size != first.world_size:
            raise InputError(
                f"{recording.path}: is of a run with {recording.world_size} ranks, but {first.path} of one "
                f"with {first.world_size}; expected the ranks of one run"
            )
        if recording.rank >= recording.world_size:
            raise InputError(
                f"{recording.path}: says it is rank {recording.rank} of {recording.world_size}; ranks start "
                "at 0"
            )
    return first.world_size


def _check_steps(recordings: Sequence[Recording]) -> None:
    for recording in recordings:
        if not recording.steps:
            raise InputError(
                f"{recording.path}: has no steps: no ProfilerStep#N and no Optimizer.step range; record with "
                "torch.profiler.schedule and profiler.step(), or take the whole recording for one step "
                "(read_trace(..., whole=True), --whole)"
            )
    common = set.intersection(*({number for number, _, _ in r.steps} for r in recordings))
    if not common:
        step_ranges = "; ".join(f"{r.path}: {_range([n for n, _, _ in r.steps])}" for r in recordings[:3])
        raise InputError(
            f"the ranks have no step in common ({step_ranges}); expected traces of the same steps"
        )


def _range(numbers: list[int]) -> str:
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {min(numbers)} to {max(numbers)}"


def _recorded_extent(recording: Recording) -> tuple[int, int]:
    """The times of the first event and of the last end."""
    issued = min((time for time in recording.issue if time != UNKNOWN), default=2**62)
    return min(issued, *recording.start), max(recording.end)


def _span_steps(recording: Recording) -> list[int]:
    """The step in which the host issued each span (by its start if the issue is not known), or -1 outside
    steps.
    """
    rows = sorted(recording.steps, key=lambda step: step[1])
    starts = [start for _, start, _ in rows]
    span_steps = []
    for span in range(len(recording)):
        time = recording.issue[span]
        if time == UNKNOWN:
            time = recording.start[span]
        row = bisect_right(starts, time) - 1
        span_steps.append(rows[row][0] if row >= 0 and time <= rows[row][2] else _NO_STEP)
    return span_steps


def _bounds(recording: Recording, steps: Sequence[int]) -> _Bounds:
    """Per step (start, end) on this rank, in nanoseconds, as `Step` defines them."""
    last_end: dict[int, int] = {}
    for span, step in enumerate(steps):
        last_end[step] = max(last_end.get(step, 0), recording.end[span])
    first = min(start for _, start, _ in recording.steps)
    previous_end = max(
        (
            recording.end[span]
            for span, step in enumerate(steps)
            if step == _NO_STEP and recording.start[span] < first
        ),
        default=0,
    )
    bounds: _Bounds = {}
    for number, start, end in sorted(recording.steps, key=lambda step: step[1]):
        begin = max(start, previous_end)
        previous_end = max(end, last_end.get(number, 0), begin)
        bounds[number] = begin, previous_end
        previous_end = max(last_end.get(number, 0), begin)
    return bounds


def _step_span(
    recordings: Sequence[Recording], bounds: Sequence[_Bounds], shifts: Sequence[int], number: int
) -> Step:
    rows = [rank_bounds[number] for rank_bounds in bounds]
    host = [next(step[1:] for step in recording.steps if step[0] == number) for recording in recordings]
    return Step(
        number,
        min(start + shift for (start, _), shift in zip(rows, shifts, strict=True)) / 1e9,
        max(end + shift for (_, end), shift in zip(rows, shifts, strict=True)) / 1e9,
        max(end - start for start, end in rows) / 1e9,
        {
            recording.rank: ((a + shift) / 1e9, (b + shift) / 1e9, (c + shift) / 1e9, (d + shift) / 1e9)
            for recording, (a, b), (c, d), shift in zip(recordings, rows, host, shifts, strict=True)
        },
    )


class _Table:
    """The columns of a Trace."""

    def __init__(self) -> None:
        self.infos: list[SpanInfo] = []
        self.num_outside = 0
        self._index_of: dict[SpanInfo, int] = {}
        self._columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "ranks", "info_indices", "issue_seconds", "start_seconds", "end_seconds", "step_numbers",
                "transfer_seconds", "follows_wait",
            )
        }  # fmt: skip

    def add(
        self,
        recording: Recording,
        steps: Sequence[int],
        numbers: set[int],
        shift: int,
        transfers: dict[int, int],
    ) -> None:
        """Add the spans of one rank in the steps `numbers`, which all ranks have."""
        columns = self._columns
        for span in range(len(recording)):
            if steps[span] not in numbers:
                self.num_outside += 1
                continue
            info = recording.info(span)
            index = self.index(info)
            issue = recording.issue[span]
            columns["ranks"].append(recording.rank)
            columns["info_indices"].append(index)
            columns["issue_seconds"].append(np.nan if issue == UNKNOWN else (issue + shift) / 1e9)
            columns["start_seconds"].append((recording.start[span] + shift) / 1e9)
            columns["end_seconds"].append((recording.end[span] + shift) / 1e9)
            columns["step_numbers"].append(steps[span])
            columns["follows_wait"].append(bool(recording.follows_wait[span]))
            transfer = transfers.get(span) if info.kind in COLLECTIVES else None
            columns["transfer_seconds"].append(np.nan if transfer is None else transfer / 1e9)

    def index(self, info: SpanInfo) -> int:
        info_index = self._index_of.setdefault(info, len(self.infos))
        if info_index == len(self.infos):
            self.infos.append(info)
        return info_index

    def arrays(self) -> dict[str, Any]:
        types = dict.fromkeys(("ranks", "info_indices", "step_numbers"), np.int64) | {
            "follows_wait": np.bool_
        }
        return {
            name: np.array(values, dtype=types.get(name, np.float64))
            for name, values in self._columns.items()
        }


def _metadata(
    recordings: Sequence[Recording], world_size: int, offsets: Sequence[int], table: _Table
) -> dict[str, Any]:
    groups: dict[str, tuple[int, int]] = {}
    for recording in recordings:
        for name, ranks in recording.groups.items():
            if ranks:
                groups[name] = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    first = recordings[0]
    notes = list(dict.fromkeys(note for recording in recordings for note in recording.notes))
    if len(recordings) < world_size:
        notes.append(
            f"{len(recordings)} of {world_size} ranks: waiting inside collectives cannot be told from "
            "transfer; the shortest of equal ones is taken"
        )
    metadata = {**first.metadata, "backend": first.backend, "groups": groups, "notes": tuple(notes)}
    metadata["group_members"] = {
        name: tuple(dict.fromkeys(r.groups[name] for r in recordings if r.groups.get(name)))
        for name in groups
    }
    ahead_key = "host_ahead_seconds"
    if any(ahead_key in recording.metadata for recording in recordings):
        metadata[ahead_key] = {r.rank: r.metadata[ahead_key] for r in recordings if ahead_key in r.metadata}
    metadata["files"] = tuple(str(recording.path) for recording in recordings)
    metadata["ranks"] = tuple(recording.rank for recording in recordings)
    metadata["clock_offsets_seconds"] = tuple(offset / 1e9 for offset in offsets)
    metadata["spans_outside_steps"] = table.num_outside
    metadata["is_timed"] = all(recording.is_timed for recording in recordings)
    return metadata


def _memory(recordings: Sequence[Recording], shifts: Sequence[int]) -> MemoryEvents | None:
    rows = [
        (recording.rank, (time + shift) / 1e9, device, category, change, name)
        for recording, shift in zip(recordings, shifts, strict=True)
        for time, device, category, change, name in recording.memory
    ]
    if not rows:
        return None
    ranks, seconds, devices, categories, changes, names = zip(*rows, strict=True)
    return MemoryEvents(
        ranks=np.array(ranks, dtype=np.int64),
        host_seconds=np.array(seconds),
        stream_seconds=np.array(seconds),
        devices=devices,
        categories=categories,
        deltas=np.array(changes, dtype=np.int64),
        names=names,
    )


def _host_blocks(
    recordings: Sequence[Recording], shifts: Sequence[int], table: _Table
) -> tuple[tuple[int, float, float, int], ...]:
    """The times in which a host waited, and the span that ended last before the wait did, most likely its
    cause.

    A span without length that began at the end of the wait is the next op.
    """
    blocks = []
    for recording, shift in zip(recordings, shifts, strict=True):
        by_end = sorted(range(len(recording)), key=lambda span: recording.end[span])
        ends = [recording.end[span] for span in by_end]
        for start, end, info in recording.host_blocks:
            index = bisect_right(ends, end) - 1
            while index >= 0 and recording.start[by_end[index]] == end:
                index -= 1
            if info is None and index >= 0:
                info = recording.info(by_end[index])
            if info is not None:
                times = (start + shift) / 1e9, (end + shift) / 1e9
                blocks.append((recording.rank, *times, table.index(info)))
    return tuple(blocks)
