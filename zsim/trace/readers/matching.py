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
_LEAST_OFFSET = 10_000  # nanoseconds; ends of one collective differ by as much on equal clocks
Match = dict[int, int]  # place of the recording -> its span


def match_collectives(recordings: Sequence[Recording], steps: Sequence[Sequence[int]]) -> list[Match]:
    """Per collective, in order, the span of each rank. `steps` has the step of each span (negative: none).

    Raises InputError if the ranks' collectives differ in number, kind or size.
    """
    tables = [_by_group(recording, steps[place]) for place, recording in enumerate(recordings)]
    matches: list[Match] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        step, group = key
        members = [
            place
            for place, recording in enumerate(recordings)
            if isinstance(group, str) or recording.rank in group
        ]
        counts = {place: len(tables[place].get(key, ())) for place in members}
        most = max(members, key=lambda place: counts[place])
        for number in range(counts[most]):
            match = {place: tables[place][key][number] for place in members if number < counts[place]}
            _check_same(recordings, match, step, number)
            if len(match) < len(members):
                _say_missing(recordings, members, counts, match, step, number)
            matches.append(match)
    return matches


def _by_group(
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


def _check_same(recordings: Sequence[Recording], match: Match, step: int, number: int) -> None:
    (first, span), *others = match.items()
    mine = recordings[first].info(span)
    for place, other in others:
        theirs = recordings[place].info(other)
        same_size = mine.bytes == theirs.bytes or mine.kind in _MAY_DIFFER
        if mine.kind != theirs.kind or not same_size:
            raise InputError(
                f"{recordings[place].path}: collective {number + 1} of step {step} in group "
                f"'{theirs.group}' is {_call(theirs)} on rank {recordings[place].rank}, but {_call(mine)} on "
                f"rank {recordings[first].rank} ({recordings[first].path}); expected traces of one run and "
                "the same steps"
            )


def _say_missing(
    recordings: Sequence[Recording],
    members: list[int],
    counts: dict[int, int],
    match: Match,
    step: int,
    number: int,
) -> None:
    short = next(place for place in members if place not in match)
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
        places = sorted(match)
        for other in places[1:]:
            pairs.setdefault((places[0], other), []).append(_difference(recordings, match, places[0], other))
    offsets: dict[int, int] = {0: 0}
    changed = True
    while changed:
        changed = False
        for (one, other), rows in pairs.items():
            if (one in offsets) == (other in offsets):
                continue
            changed = True
            offset = 0 if _share_a_clock(recordings[one], recordings[other]) else _offset(rows)
            if one in offsets:
                offsets[other] = offsets[one] + offset
            else:
                offsets[one] = offsets[other] - offset
    return [offsets.get(place, 0) for place in range(len(recordings))]


def _share_a_clock(one: Recording, other: Recording) -> bool:
    """Whether both read the same machine's monotonic clock, whose zero is then the same time for both."""
    a, b = one.clock_zero, other.clock_zero
    return a is not None and b is not None and abs(a - b) < 10**9


def _difference(recordings: Sequence[Recording], match: Match, one: int, other: int) -> tuple[int, int, int]:
    """(difference of the ends, minimum and maximum offset of `second` at which the two spans overlap)."""
    a, b = recordings[one], recordings[other]
    i, j = match[one], match[other]
    return a.end[i] - b.end[j], a.start[i] - b.end[j], a.end[i] - b.start[j]


def _offset(rows: list[tuple[int, int, int]]) -> int:
    differences = [row[0] for row in rows]
    middle = round(median(differences))
    scatter = median(abs(value - middle) for value in differences)
    is_possible = max(row[1] for row in rows) <= 0 <= min(row[2] for row in rows)
    if is_possible and abs(middle) <= max(3 * scatter, _LEAST_OFFSET):
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
        for place, span in match.items():
            matched[place].add(span)
        place, span = next(iter(match.items()))
        if len(match) < min(recordings[place].info(span).group_size, world_size):
            partial.append(match)
            continue
        length = _transfer(recordings, match, offsets)
        for place, span in match.items():
            transfers[place][span] = length
    for place, recording in enumerate(recordings):
        partial += [
            {place: span}
            for span in range(len(recording))
            if recording.info(span).kind in COLLECTIVES and span not in matched[place]
        ]
    for match in partial:
        key, length = _repeat_key(recordings, match), _shortest(recordings, match)
        shortest[key] = min(shortest.get(key, length), length)
    for match in partial:
        bound = min(shortest[_repeat_key(recordings, match)], _shortest(recordings, match))
        num_bounds += len(match)
        for place, span in match.items():
            transfers[place][span] = bound
    return transfers, num_bounds


def _transfer(recordings: Sequence[Recording], match: Match, offsets: Sequence[int]) -> int:
    last_start = max(recordings[place].start[span] + offsets[place] for place, span in match.items())
    last_end = max(recordings[place].end[span] + offsets[place] for place, span in match.items())
    together = last_end - last_start
    shortest = _shortest(recordings, match)
    return min(shortest, together) if together > 0 else shortest


def _shortest(recordings: Sequence[Recording], match: Match) -> int:
    return min(recordings[place].end[span] - recordings[place].start[span] for place, span in match.items())


def _repeat_key(recordings: Sequence[Recording], match: Match) -> tuple[object, ...]:
    place, span = next(iter(match.items()))
    info = recordings[place].info(span)
    return info.kind, info.bytes, info.dtype, info.group, info.group_size
