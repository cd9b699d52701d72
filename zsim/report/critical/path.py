"""The critical path of a step: the chain of work that determines its end, read backwards.

# [Note: reading the chain backwards]
An op begins when the last of three things has happened: the previous op on its stream ended, an op that it
depends on ended, the host issued it. The one that happened last is the previous link of the chain. An op in a
shared hardware queue may be held up by a waiting launch before it; it begins when that launch does, so the
chain goes on with the predecessors of that launch (`zsim.plan.passes.queues`). A link of the host goes back
to the last time that the host was blocked, and from there to the op that it waited for. A collective begins
when its last rank has arrived, so the chain goes on at that rank; a message begins when both sides have
arrived, and a call with several messages ends with the one that began last. The chain covers the whole step
without gaps: its parts add up to the step's time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.plan.ops import Collective, Plan, PointToPoint, Program
from zsim.report.critical.predecessors import Predecessors, predecessors
from zsim.report.lanes import LaneTimes, StepTimes
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

_SAME_INSTANT = 1e-9  # of the step
_new = tuple.__new__  # of a link: without the call of the named tuple's own, which takes as long again
Peers = Mapping[tuple[int, int], Sequence[tuple[int, int]]]
# In place of an op number: the host issuing work; a wait whose cause is not in this trace; the host in
# torch's allocator, which has run short and gets memory from the driver and gives it back.
HOST, OTHERS, ALLOCATOR = -1, -2, -3


class Link(NamedTuple):
    """One link of the chain: an op of the plan on a rank, or the rank's host (`HOST`, `ALLOCATOR`), or a wait
    of unknown cause (`OTHERS`)."""

    rank: int
    op: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def critical_path(
    plan: Plan,
    trace: Trace,
    meetings: Mapping[tuple[str, int], int] | None = None,
    connections: int = DEFAULT_CONNECTIONS,
    peers: Peers | None = None,
) -> list[Link]:
    """The chain from the step's beginning to its end, in that order; see [Note: reading the chain
    backwards]. `trace` must be the simulated trace of `plan`, with one span per op with work. `meetings`: by
    (group, rank), a number that is equal for ranks that wait for each other; by default the ranks of a group
    do. `connections`: number of hardware queues that the streams share. `peers`: by (rank, op) of a call with
    messages, the (rank, op) of the calls at the other side."""
    return _Walk(plan, trace, meetings or {}, connections, peers or {}).links()


class _Walk:
    def __init__(
        self,
        plan: Plan,
        trace: Trace,
        meetings: Mapping[tuple[str, int], int],
        connections: int,
        peers: Peers,
    ) -> None:
        self.plan, self.trace, self.meetings, self.peers = plan, trace, meetings, peers
        self.tolerance = _SAME_INSTANT * trace.step_seconds
        self.begin = max(0.0, *trace.begins.values()) if trace.begins else 0.0  # of the last rank to begin
        self.parts = [program.once(predecessors, connections) for program in plan.programs]
        self.part_of: dict[int, Predecessors] = {}
        first_info = list(accumulate((len(part.numbers) for part in self.parts), initial=0))
        self.times = StepTimes(trace, plan, first_info)
        self.calls = [program.once(_places_of_calls, connections) for program in plan.programs]
        self.is_alone = len(self.times.ranks) == 1 and not self.peers  # waits for no other traced rank
        self.rows: dict[str, dict[int, list[int]]] = {}
        self.communicators: dict[str, Ints] = {}
        self.found: list[Link] = []

    def links(self) -> list[Link]:
        end = self.begin + self.trace.step_seconds
        rank, place = self.times.last()
        at: tuple[int, int] | None = (rank, place)
        last = self.times.of(rank).end[place]
        if end - last > self.tolerance:
            at = self._host(rank, end, len(self._part(rank).numbers))
        while at is not None:
            at = self._ops(*at)
        self.found.reverse()
        return self.found

    def _ops(self, rank: int, place: int) -> tuple[int, int] | None:
        """Add the op at `place` and those that it waited for in turn, up to one that waited for the host;
        return the (rank, place) that the host waited for. None at the step's beginning."""
        lane, part, tolerance = self.times.of(rank), self._part(rank), self.tolerance
        starts, ends, issues, numbers = lane.start, lane.end, lane.issue, part.numbers
        while True:
            end = ends[place]
            if not self.is_alone:
                came, place = self._last_to_come(rank, place)
                if came != rank:
                    rank, lane, part = came, self.times.of(came), self._part(came)
                    starts, ends, issues, numbers = lane.start, lane.end, lane.issue, part.numbers
            start = starts[place]
            self._add(rank, numbers[place], start, end)
            if start <= self.begin + tolerance:
                return None
            place, previous = self._behind_which(lane, part, place)
            waited = ends[previous] if previous >= 0 else 0.0
            issued = min(issues[place], start)
            if waited < issued or previous < 0:
                break
            if start - waited > tolerance:  # a wait of unknown cause: the chain has no gaps
                self._add(rank, OTHERS, waited, start)
            place = previous
        if start - issued > tolerance:
            self._add(rank, OTHERS, issued, start)
        return self._host(rank, issued, place)

    def _behind_which(self, lane: LaneTimes, part: Predecessors, place: int) -> tuple[int, int]:
        """Place of the launch that held up the one at `place` in their hardware queue (`place` itself where
        none did), and of that launch's last predecessor (-1 without any)."""
        start, ends = lane.start[place], lane.end
        while True:
            previous, ready = -1, 0.0
            for before in part.of(place):
                end = ends[before]
                if previous < 0 or end > ready or (end == ready and before > previous):
                    previous, ready = before, end
            ahead = part.ahead.get(place, -1)
            if ahead < 0:
                return place, previous
            ready = max(lane.issue[place], ready)
            if start - ready <= self.tolerance or start - lane.start[ahead] > self.tolerance:
                return place, previous
            place = ahead

    def _host(self, rank: int, until: float, before: int) -> tuple[int, int] | None:
        """Add the link of the host that ends at `until`, and return the op that it was last blocked on; only
        places below `before`, since ops shorter than the tolerance end at the same instant."""
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
        """Add the host's interval, with the parts in torch's allocator as separate links."""
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

    def _part(self, rank: int) -> Predecessors:
        part = self.part_of.get(rank)
        if part is None:
            part = self.part_of[rank] = self.parts[int(self.plan.program_of[rank])]
        return part

    def _last_to_come(self, rank: int, place: int) -> tuple[int, int]:
        """The simulated rank that was the last to arrive at the same collective or message, and the place of
        its call; `rank` and `place` for other work."""
        number = self._part(rank).numbers[place]
        work = self.plan.program_on(rank).ops[number].work
        times = self.times
        if isinstance(work, PointToPoint):
            return self._last_side(rank, number, place)
        if not isinstance(work, Collective) or len(times.ranks) == 1:
            return rank, place
        rows = self._rows_at(work.group, self._meeting(work.group, rank))
        places: int | list[int] = place
        if len(self.parts) > 1:
            call = self.calls[self.plan.program_of[rank]][work.group].index(place)
            programs = self.plan.program_of[[times.ranks[row] for row in rows]].tolist()
            places = [self.calls[program][work.group][call] for program in programs]
        starts = times.start[rows, places]
        latest = int(np.argmax(starts))
        if times.start[times.row_of[rank], place] == starts[latest]:
            return rank, place
        return times.ranks[rows[latest]], places if isinstance(places, int) else places[latest]

    def _last_side(self, rank: int, number: int, place: int) -> tuple[int, int]:
        found = (self.times.of(rank).start[place], rank, place)
        for peer, op in self.peers.get((rank, number), ()):
            at = bisect_left(self._part(peer).numbers, op)
            start = self.times.of(peer).start[at]
            if start > found[0]:
                found = (start, peer, at)
        return found[1:]

    def _rows_at(self, group: str, meeting: int) -> list[int]:
        """Rows of the simulated ranks that wait for each other in this meeting of the group."""
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
        if start < self.begin:
            start = self.begin
        if end > start:
            self.found.append(_new(Link, (rank, op, start, end)))


def _places_of_calls(program: Program, connections: int) -> dict[str, list[int]]:
    """Places of the calls of each group, by group."""
    found: dict[str, list[int]] = {}
    for place, number in enumerate(program.once(predecessors, connections).numbers):
        work = program.ops[number].work
        if isinstance(work, Collective):
            found.setdefault(work.group, []).append(place)
    return found
