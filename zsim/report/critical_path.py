"""The critical path of a step: the chain of work that its end waited for, read backwards.

# [Note: reading the chain backwards]
An op begins when the last of three things has happened: the op before it on its stream ended, an op that it
comes after ended, the host issued it. Whichever ended at that instant is the link of the chain before it. One
that shares a hardware queue may stand behind a launch that waits; it begins with that, so its link is the
other's (`zsim.plan.passes.queues`). The
host's part goes back to the last time that it was blocked, and from there to the op that it waited for. A
collective begins for all when its last rank has come, so the chain goes on there. What the chain covers is
the whole step, without gaps: its parts add up to the step's time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.plan.ops import Collective, Plan
from zsim.plan.passes.queues import behind
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

_SAME_INSTANT = 1e-9  # of the step
_Block = tuple[float, float, int]
# In place of an op: the host issuing; something that this trace does not show; the host asking the driver for
# memory and giving it back, because torch's allocator has run short.
HOST, OTHERS, ALLOCATOR = -1, -2, -3


class Link(NamedTuple):
    """One stretch of the chain: an op of the plan on a rank, or that rank's host (`HOST`, `ALLOCATOR`)."""

    rank: int
    op: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class _Lane:
    """One rank's times by position among the ops that have work, and when its host was blocked, by the end
    of that: (end, start, place of what it waited for); `allocator`: when it was in an allocator that is
    short."""

    def __init__(
        self,
        issue: Floats,
        start: Floats,
        end: Floats,
        blocks: list[_Block],
        allocator: list[tuple[float, float]],
    ) -> None:
        self.issue: list[float] = issue.tolist()
        self.start: list[float] = start.tolist()
        self.end: list[float] = end.tolist()
        self.blocks = sorted(blocks)
        self.allocator = sorted(allocator)


class _Times:
    """The trace as one row per rank and one column per op that has work. The chain visits few ranks: a lane
    is made when it does."""

    def __init__(self, trace: Trace) -> None:
        self.ranks: list[int] = np.unique(trace.ranks).tolist()
        order = np.lexsort((trace.info_indices, trace.ranks))
        self._issue, self.start, self._end = (
            seconds[order].reshape(len(self.ranks), -1)
            for seconds in (trace.issue_seconds, trace.start_seconds, trace.end_seconds)
        )
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self._blocks: dict[int, list[_Block]] = {}
        for rank, start, end, place in trace.host_blocks:
            self._blocks.setdefault(rank, []).append((end, start, place))
        self._allocator: dict[int, list[tuple[float, float]]] = {}
        for rank, start, end in trace.allocator_blocks:
            self._allocator.setdefault(rank, []).append((start, end))
        self._lanes: dict[int, _Lane] = {}

    def of(self, rank: int) -> _Lane:
        if rank not in self._lanes:
            row = self.row_of[rank]
            times = self._issue[row], self.start[row], self._end[row]
            self._lanes[rank] = _Lane(*times, self._blocks.get(rank, []), self._allocator.get(rank, []))
        return self._lanes[rank]

    def last(self) -> tuple[int, int]:
        """The rank that ends last, and at which place: of equal ones the first rank, the last place."""
        row = int(np.argmax(self._end.max(axis=1)))
        ends = self._end[row]
        return self.ranks[row], int(np.flatnonzero(ends == ends.max())[-1])


def critical_path(
    plan: Plan,
    trace: Trace,
    meetings: Mapping[tuple[str, int], int] | None = None,
    connections: int = DEFAULT_CONNECTIONS,
) -> list[Link]:
    """The chain from the step's beginning to its end, in that order; see [Note: reading the chain
    backwards]. `trace` must be the simulated one of `plan`, with one span per op that has work. `meetings`:
    by (group, rank), a number that is equal for ranks that wait for each other; without it the ranks of a
    group do. `connections`: the hardware queues that its streams shared."""
    return _Walk(plan, trace, meetings or {}, connections).links()


class _Walk:
    def __init__(
        self, plan: Plan, trace: Trace, meetings: Mapping[tuple[str, int], int], connections: int
    ) -> None:
        self.plan, self.trace, self.meetings = plan, trace, meetings
        self.tolerance = _SAME_INSTANT * trace.step_seconds
        self.begin = max(0.0, *trace.begins.values()) if trace.begins else 0.0  # of the last rank to begin
        self.numbers = [number for number, op in enumerate(plan.ops) if op.work is not None]
        self.before = Predecessors(plan, self.numbers, connections)
        self.times = _Times(trace)
        self.rows: dict[str, dict[int, list[int]]] = {}
        self.communicators: dict[str, Ints] = {}
        self.found: list[Link] = []

    def links(self) -> list[Link]:
        end = self.begin + self.trace.step_seconds
        rank, place = self.times.last()
        at: tuple[int, int] | None = (rank, place)
        last = self.times.of(rank).end[place]
        if end - last > self.tolerance:
            at = self._host(rank, end, len(self.numbers))
        while at is not None:
            at = self._op(*at)
        self.found.reverse()
        return self.found

    def _op(self, rank: int, place: int) -> tuple[int, int] | None:
        """Add the op at `place`, and return what it waited for; None at the beginning."""
        end = self.times.of(rank).end[place]
        rank = self._last_to_come(rank, place)
        lane = self.times.of(rank)
        start = lane.start[place]
        self._add(rank, self.numbers[place], start, end)
        if start <= self.begin + self.tolerance:
            return None
        place, previous = self._behind_which(lane, place)
        waited = lane.end[previous] if previous >= 0 else 0.0
        issued = min(lane.issue[place], start)
        if waited >= issued and previous >= 0:
            if start - waited > self.tolerance:  # nothing that is known of: the chain stays whole
                self._add(rank, OTHERS, waited, start)
            return rank, previous
        if start - issued > self.tolerance:
            self._add(rank, OTHERS, issued, start)
        return self._host(rank, issued, place)

    def _behind_which(self, lane: _Lane, place: int) -> tuple[int, int]:
        """The launch that held this one up in their queue, and the last op that it came after; this one's own
        where none did."""
        start = lane.start[place]
        while True:
            previous = max(self.before.of(place), key=lambda p: (lane.end[p], p), default=-1)
            ready = max(lane.issue[place], lane.end[previous] if previous >= 0 else 0.0)
            ahead = self.before.ahead.get(place, -1)
            if start - ready <= self.tolerance or ahead < 0 or start - lane.start[ahead] > self.tolerance:
                return place, previous
            place = ahead

    def _host(self, rank: int, until: float, before: int) -> tuple[int, int] | None:
        """Add the host's stretch that ends at `until`, and return what it had been blocked on: an op `before`
        the one that it issued then (in a long step, one that is shorter than an instant ends in the same)."""
        blocks = self.times.of(rank).blocks
        number = bisect_right(blocks, until + self.tolerance, key=itemgetter(0)) - 1
        while number >= 0 and blocks[number][2] >= before:
            number -= 1
        if number < 0:
            self._add_host(rank, self.begin, until)
            return None
        ended, _, place = blocks[number]
        self._add_host(rank, min(ended, until), until)
        return rank, place

    def _add_host(self, rank: int, start: float, end: float) -> None:
        """The host's stretch, and apart what of it torch's allocator took."""
        blocks = self.times.of(rank).allocator
        for number in range(bisect_left(blocks, end, key=itemgetter(0)) - 1, -1, -1):
            asked, answered = blocks[number]
            if answered <= start:
                break
            answered = min(answered, end)
            self._add(rank, HOST, answered, end)
            self._add(rank, ALLOCATOR, max(asked, start), answered)
            end = max(asked, start)
        self._add(rank, HOST, start, end)

    def _last_to_come(self, rank: int, place: int) -> int:
        """Of the simulated ranks in the same collective, the one that came last; `rank` otherwise."""
        work = self.plan.ops[self.numbers[place]].work
        times = self.times
        if not isinstance(work, Collective) or len(times.ranks) == 1:
            return rank
        rows = self._rows_at(work.group, self._meeting(work.group, rank))
        starts = times.start[rows, place]
        latest = int(np.argmax(starts))
        if times.start[times.row_of[rank], place] == starts[latest]:
            return rank
        return times.ranks[rows[latest]]

    def _rows_at(self, group: str, meeting: int) -> list[int]:
        """Of the simulated ranks, those that wait for each other there."""
        if group not in self.rows:
            rows: dict[int, list[int]] = {}
            for row, rank in enumerate(self.times.ranks):
                rows.setdefault(self._meeting(group, rank), []).append(row)
            self.rows[group] = rows
        return self.rows[group][meeting]

    def _meeting(self, group: str, rank: int) -> int:
        found = self.meetings.get((group, rank))
        if found is not None:
            return found
        if group not in self.communicators:
            self.communicators[group] = self.plan.groups[group].row_of(self.plan.world_size)
        return int(self.communicators[group][rank])

    def _add(self, rank: int, op: int, start: float, end: float) -> None:
        start = max(start, self.begin)
        if end > start:
            self.found.append(Link(rank, op, start, end))


class Predecessors:
    """The ops with work that must end before one may start, as places among the ops with work. Ops without
    work (waits, hooks) hand on what they wait for. `ahead[place]`: the launch right before it in a hardware
    queue that streams share."""

    def __init__(self, plan: Plan, numbers: list[int], connections: int = DEFAULT_CONNECTIONS) -> None:
        self._ops, self._numbers = plan.ops, numbers
        self._place_of = {number: place for place, number in enumerate(numbers)}
        last_on_stream: dict[str, int] = {}
        self._on_stream: list[int] = []
        for place, number in enumerate(numbers):
            stream = plan.ops[number].stream
            self._on_stream.append(last_on_stream.get(stream, -1))
            last_on_stream[stream] = place
        self.ahead: dict[int, int] = {}
        for number, held in enumerate(behind(plan.ops, connections) or ()):
            if held >= 0:
                self.ahead[self._place_of[held]] = self._place_of[number]

    def of(self, place: int) -> list[int]:
        on_stream = self._on_stream[place]
        found = [on_stream] if on_stream >= 0 else []
        waiting = list(self._ops[self._numbers[place]].after)
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            known = self._place_of.get(number)
            if known is not None:
                found.append(known)
            elif number not in seen:
                seen.add(number)
                waiting.extend(self._ops[number].after)
        return found
