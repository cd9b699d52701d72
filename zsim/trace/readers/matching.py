"""Matches the collectives of one step over the ranks that took part.

# [Note: waiting is not transfer]
A collective's kernel runs from when its rank reaches it until all have the data, so its length contains the
wait for the slowest rank: 72 ms on a rank for a transfer of 11.7 ms. The transfer follows from all ranks. The
last to arrive does not wait, so no rank's kernel is shorter than the transfer, and the transfer lies between
the last arrival and the last end: min(shortest kernel, max(end) - max(start)). With some ranks missing, or
only one rank recorded, the shortest repeat of the same collective bounds it from above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from zsim.errors import InputError
from zsim.trace.readers.recording import Recording
from zsim.trace.trace import COLLECTIVES, SpanInfo

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
                f"{_call(first_info)} on "
                f"rank {recordings[first].rank} ({recordings[first].path}); expected traces of one run and "
                "the same steps"
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
