"""Joins the recordings of one or more ranks into a Trace, on one clock.

Matches the collectives of one step over the ranks that took part.

# [Note: waiting is not transfer]
A collective's kernel runs from when its rank reaches it until all have the data, so its length contains the
wait for the slowest rank: 72 ms on a rank for a transfer of 11.7 ms. The transfer follows from all ranks. The
last to arrive does not wait, so no rank's kernel is shorter than the transfer, and the transfer lies between
the last arrival and the last end: min(shortest kernel, max(end) - max(start)). With some ranks missing, or
only one rank recorded, the shortest repeat of the same collective bounds it from above.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from zsim.errors import InputError
from zsim.trace.readers.recording import UNKNOWN, Recording
from zsim.trace.trace import COLLECTIVES, MemoryEvents, SpanInfo, SpanInfos, Step, Trace

_POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
_MAY_DIFFER = frozenset({"all_to_all", "gather", "scatter"})  # in size, between ranks
_MIN_OFFSET = 10_000  # nanoseconds; ends of one collective differ by as much on equal clocks
Match = dict[int, int]  # place of the recording -> its span


def match_collectives(recordings: Sequence[Recording], steps: Sequence[Sequence[int]]) -> list[Match]:
    """Per collective, in order, the span of each rank. `steps` has the step of each span (negative: none).

    Raises InputError if the ranks' collectives differ in number, kind or size.
    """
    tables = [_collectives_per_group(recording, steps[index]) for index, recording in enumerate(recordings)]
    matches: list[Match] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        step, group = key
        member_indices = [
            index
            for index, recording in enumerate(recordings)
            if isinstance(group, str) or recording.rank in group
        ]
        counts = {index: len(tables[index].get(key, ())) for index in member_indices}
        longest = max(member_indices, key=lambda index: counts[index])
        for number in range(counts[longest]):
            match = {index: tables[index][key][number] for index in member_indices if number < counts[index]}
            _check_identical(recordings, match, step, number)
            if len(match) < len(member_indices):
                _raise_missing(recordings, member_indices, counts, match, step, number)
            matches.append(match)
    return matches


def _collectives_per_group(
    recording: Recording, steps: Sequence[int]
) -> dict[tuple[int, tuple[int, ...] | str], list[int]]:
    """(step, group) -> its collectives in the order of issue. A group is its ranks if they are known."""
    table: dict[tuple[int, tuple[int, ...] | str], list[int]] = {}
    for span, step in enumerate(steps):
        info = recording.info(span)
        if step >= 0 and info.kind in COLLECTIVES and info.kind not in _POINT_TO_POINT:
            ranks = recording.groups.get(info.group) or info.group
            if not isinstance(ranks, str) and recording.rank not in ranks:
                raise InputError(
                    f"{recording.path}: is of rank {recording.rank} and does '{info.name}' of group "
                    f"'{info.group}', which has the ranks {', '.join(map(str, ranks[:8]))}"
                )
            table.setdefault((step, ranks), []).append(span)
    return table


def _check_identical(recordings: Sequence[Recording], match: Match, step: int, number: int) -> None:
    (first, span), *other_matches = match.items()
    first_info = recordings[first].info(span)
    for index, other_span in other_matches:
        other_info = recordings[index].info(other_span)
        same_size = first_info.bytes == other_info.bytes or first_info.kind in _MAY_DIFFER
        if first_info.kind != other_info.kind or not same_size:
            raise InputError(
                f"{recordings[index].path}: collective {number + 1} of step {step} in group "
                f"'{other_info.group}' is {_call(other_info)} on rank {recordings[index].rank}, but "
                f"{_call(first_info)} on rank {recordings[first].rank} ({recordings[first].path}); expected "
                "traces of one run and the same steps"
            )


def _raise_missing(
    recordings: Sequence[Recording],
    members: list[int],
    counts: dict[int, int],
    match: Match,
    step: int,
    number: int,
) -> None:
    short = next(index for index in members if index not in match)
    long, span = next(iter(match.items()))
    info = recordings[long].info(span)
    raise InputError(
        f"{recordings[short].path}: rank {recordings[short].rank} has {counts[short]} collectives in group "
        f"'{info.group}' in step {step}, but rank {recordings[long].rank} has {counts[long]}: number "
        f"{number + 1} ({_call(info)}) is missing; expected traces of one run and the same steps"
    )


def _call(info: SpanInfo) -> str:
    return f"{info.kind} of {info.bytes:,} B"


def clock_offsets(recordings: Sequence[Recording], matches: Iterable[Match]) -> list[int]:
    """Nanoseconds to add to each recording's clock, so that collectives end at one time on all. 0 for the
    first.

    Ranks leave a collective at about the same time, so the median difference of their ends is the difference
    of their clocks. It is applied only if it exceeds the scatter of the ends, or if without it a rank would
    leave a collective before another rank had entered it.
    """
    pairs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for match in matches:
        indices = sorted(match)
        for second in indices[1:]:
            pairs.setdefault((indices[0], second), []).append(
                _end_difference(recordings, match, indices[0], second)
            )
    offsets: dict[int, int] = {0: 0}
    changed = True
    while changed:
        changed = False
        for (first, second), rows in pairs.items():
            if (first in offsets) == (second in offsets):
                continue
            changed = True
            offset = 0 if _has_shared_clock(recordings[first], recordings[second]) else _offset(rows)
            if first in offsets:
                offsets[second] = offsets[first] + offset
            else:
                offsets[first] = offsets[second] - offset
    return [offsets.get(index, 0) for index in range(len(recordings))]


def _has_shared_clock(first: Recording, second: Recording) -> bool:
    """Whether both read the same machine's monotonic clock, whose zero is then the same time for both."""
    first_zero, second_zero = first.clock_zero, second.clock_zero
    return first_zero is not None and second_zero is not None and abs(first_zero - second_zero) < 10**9


def _end_difference(
    recordings: Sequence[Recording], match: Match, first: int, second: int
) -> tuple[int, int, int]:
    """(difference of the ends, minimum and maximum offset of `second` at which the two spans overlap)."""
    first_recording, second_recording = recordings[first], recordings[second]
    first_span, second_span = match[first], match[second]
    return (
        first_recording.end[first_span] - second_recording.end[second_span],
        first_recording.start[first_span] - second_recording.end[second_span],
        first_recording.end[first_span] - second_recording.start[second_span],
    )


def _offset(rows: list[tuple[int, int, int]]) -> int:
    differences = [row[0] for row in rows]
    middle = round(median(differences))
    scatter = median(abs(value - middle) for value in differences)
    is_possible = max(row[1] for row in rows) <= 0 <= min(row[2] for row in rows)
    if is_possible and abs(middle) <= max(3 * scatter, _MIN_OFFSET):
        return 0
    return middle


def transfer_times(
    recordings: Sequence[Recording], matches: Iterable[Match], offsets: Sequence[int], world_size: int
) -> tuple[list[dict[int, int]], int]:
    """Per recording: span -> nanoseconds of a collective's transfer, and how many of these are only upper
    bounds.

    See [Note: waiting is not transfer].
    """
    transfers: list[dict[int, int]] = [{} for _ in recordings]
    shortest: dict[tuple[object, ...], int] = {}
    partial: list[Match] = []
    matched = [set[int]() for _ in recordings]
    num_bounds = 0
    for match in matches:
        for index, span in match.items():
            matched[index].add(span)
        index, span = next(iter(match.items()))
        if len(match) < min(recordings[index].info(span).group_size, world_size):
            partial.append(match)
            continue
        length = _transfer(recordings, match, offsets)
        for index, span in match.items():
            transfers[index][span] = length
    for index, recording in enumerate(recordings):
        partial += [
            {index: span}
            for span in range(len(recording))
            if recording.info(span).kind in COLLECTIVES and span not in matched[index]
        ]
    for match in partial:
        key, length = _repeat_key(recordings, match), _shortest(recordings, match)
        shortest[key] = min(shortest.get(key, length), length)
    for match in partial:
        bound = min(shortest[_repeat_key(recordings, match)], _shortest(recordings, match))
        num_bounds += len(match)
        for index, span in match.items():
            transfers[index][span] = bound
    return transfers, num_bounds


def _transfer(recordings: Sequence[Recording], match: Match, offsets: Sequence[int]) -> int:
    last_start = max(recordings[index].start[span] + offsets[index] for index, span in match.items())
    last_end = max(recordings[index].end[span] + offsets[index] for index, span in match.items())
    overlap = last_end - last_start
    shortest = _shortest(recordings, match)
    return min(shortest, overlap) if overlap > 0 else shortest


def _shortest(recordings: Sequence[Recording], match: Match) -> int:
    return min(recordings[index].end[span] - recordings[index].start[span] for index, span in match.items())


def _repeat_key(recordings: Sequence[Recording], match: Match) -> tuple[object, ...]:
    index, span = next(iter(match.items()))
    info = recordings[index].info(span)
    return info.kind, info.bytes, info.dtype, info.group, info.group_size


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
