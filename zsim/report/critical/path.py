"""The critical path of a step: the chain of work that determines its end, read backwards.

# [Note: reading the chain backwards]
An op begins when the last of three things has happened: the previous op on its stream ended, an op that it
depends on ended, the host issued it. The one that happened last is the previous link of the chain. An op in a
shared hardware queue may be held up by a waiting launch before it. It begins when that launch does, so the
chain goes on with the predecessors of that launch (`zsim.plan.passes.queues`). A link of the host goes back
to the last time that the host was blocked, and from there to the op that it waited for.

A collective begins when its last rank has arrived, so the chain goes on at that rank. A message begins when
both sides have arrived, and a call with several messages ends with the one that began last. The chain covers
the whole step without gaps: its parts add up to the step's time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Floats, Ints, distinct
from zsim.plan.ops import Collective, Plan, PointToPoint, Program
from zsim.report.critical.chain import ALLOCATOR, HOST, OTHERS, Chain
from zsim.report.critical.predecessors import Predecessors, predecessors
from zsim.report.lanes import StepTimes
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

_SAME_INSTANT = 1e-9  # of the step
Peers = Mapping[tuple[int, int], Sequence[tuple[int, int]]]


def critical_path(
    plan: Plan,
    trace: Trace,
    meetings: Mapping[tuple[str, int], int] | None = None,
    connections: int = DEFAULT_CONNECTIONS,
    peers: Peers | None = None,
) -> Chain:
    """The chain from the step's beginning to its end, in that order. See [Note: reading the chain backwards].

    `trace` must be the simulated trace of `plan`, with one span per op with work. `communicators` gives, by
    (group, rank), a number that is equal for ranks that wait for each other. By default the ranks of a group
    do. `connections` is the number of hardware queues that the streams share. `peers` gives, by (rank, op) of
    a call with messages, the (rank, op) of the calls at the other side.
    """
    return _Walk(plan, trace, meetings or {}, connections, peers or {}).links()


class _Lane(NamedTuple):
    """A rank's ops with work, by position."""

    part: Predecessors
    start: Floats
    """When each started."""
    end: Floats
    """When each ended."""
    held: Ints
    """The launch that held it up in their hardware queue, itself where none did."""
    previous: Ints
    """The predecessor of that launch that ended last. -1 without any."""
    waited: Floats
    """When that predecessor ended. 0 without any."""
    issued: Floats
    """When the host issued that launch."""
    onward: list[int]
    """That predecessor, where the chain goes on with it and nothing else is to be checked, else -1."""


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
        first_info = list(accumulate((len(part.numbers) for part in self.parts), initial=0))
        self.times = StepTimes(trace, plan, first_info)
        self.connections = connections
        self.is_alone = len(self.times.ranks) == 1 and not self.peers  # waits for no other traced rank
        self.lanes: dict[int, _Lane] = {}
        self.rows: dict[str, dict[int, list[int]]] = {}
        self.communicators: dict[str, Ints] = {}
        # The chain: ranks, and places of their ops (below 0: -1 - the place in `others`, the other links)
        self.ranks: list[int] = []
        self.places: list[int] = []
        self.others: list[tuple[int, float, float]] = []

    def links(self) -> Chain:
        end = self.begin + self.trace.step_seconds
        rank, place = self.times.last()
        at: tuple[int, int] | None = (rank, place)
        if end - float(self._lane(rank).end[place]) > self.tolerance:
            at = self._host(rank, end, len(self._lane(rank).end))
        while at is not None:
            at = self._ops(*at)
        return self._found()

    def _ops(self, rank: int, place: int) -> tuple[int, int] | None:
        """Add the op at `position` and those that it waited for in turn, up to one that waited for the host.

        Returns the (rank, position) that the host waited for. None at the step's beginning.
        """
        lane = self._lane(rank)
        while True:
            first = len(self.places)
            while (before := lane.onward[place]) >= 0:
                self.places.append(place)
                place = before
            self.ranks += [rank] * (len(self.places) - first)
            came, at = (rank, place) if self.is_alone else self._last_to_come(rank, place)
            if came == rank:
                self.ranks.append(rank)
                self.places.append(place)
            else:
                end, rank, place, lane = float(lane.end[place]), came, at, self._lane(came)
                self._add(rank, lane.part.numbers[place], float(lane.start[place]), end)
            start = float(lane.start[place])
            if start <= self.begin + self.tolerance:
                return None
            waited, issued = float(lane.waited[place]), float(lane.issued[place])
            if waited < issued or lane.previous[place] < 0:
                break
            if start - waited > self.tolerance:  # a wait of unknown cause: the chain has no gaps
                self._add(rank, OTHERS, waited, start)
            place = int(lane.previous[place])
        if start - issued > self.tolerance:
            self._add(rank, OTHERS, issued, start)
        return self._host(rank, issued, int(lane.held[place]))

    def _host(self, rank: int, until: float, before: int) -> tuple[int, int] | None:
        """Add the link of the host that ends at `until`, and return the op that it was last blocked on.

        Only positions below `end_position` count, since ops shorter than the tolerance end at the same
        instant.
        """
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

    def _lane(self, rank: int) -> _Lane:
        lane = self.lanes.get(rank)
        if lane is None:
            lane = self.lanes[rank] = self._made_lane(rank)
        return lane

    def _made_lane(self, rank: int) -> _Lane:
        part, tolerance = self._part(rank), self.tolerance
        issue, start, end = self.times.columns(rank)
        lasts, ends = part.last_ended(end), np.append(end, 0.0)  # 0 where nothing was waited for
        held = part.held_by(start, np.maximum(issue, ends[lasts]), tolerance)
        previous = lasts[held]
        waited, issued = ends[previous], np.minimum(issue[held], start)
        goes_on = (previous >= 0) & (waited >= issued) & (start - waited <= tolerance)
        goes_on &= start > self.begin + tolerance
        if not self.is_alone:
            goes_on &= ~self._program(rank).once(_are_calls, self.connections)
        onward = np.where(goes_on, previous, -1).tolist()
        return _Lane(part, start, end, held, previous, waited, issued, onward)

    def _part(self, rank: int) -> Predecessors:
        return self.parts[int(self.plan.program_of[rank])]

    def _program(self, rank: int) -> Program:
        return self.plan.program_on(rank)

    def _last_to_come(self, rank: int, place: int) -> tuple[int, int]:
        """The simulated rank that was the last to arrive at the same collective or message, and the position
        of its call. For other work they are `rank` and `position`.
        """
        number = self._part(rank).numbers[place]
        work = self._program(rank).ops[number].work
        times = self.times
        if isinstance(work, PointToPoint):
            return self._last_side(rank, number, place)
        if not isinstance(work, Collective) or len(times.ranks) == 1:
            return rank, place
        rows = self._rows_at(work.group, self._meeting(work.group, rank))
        places: int | list[int] = place
        if len(self.parts) > 1:
            call = self._calls(rank, work.group).index(place)
            places = [self._calls(times.ranks[row], work.group)[call] for row in rows]
        starts = times.start[rows, places]
        latest = int(np.argmax(starts))
        if times.start[times.row_of[rank], place] == starts[latest]:
            return rank, place
        return times.ranks[rows[latest]], places if isinstance(places, int) else places[latest]

    def _calls(self, rank: int, group: str) -> list[int]:
        """Positions of the rank's calls of a group."""
        return self._program(rank).once(_places_of_calls, self.connections)[group]

    def _last_side(self, rank: int, number: int, place: int) -> tuple[int, int]:
        found = (float(self._lane(rank).start[place]), rank, place)
        for peer, op in self.peers.get((rank, number), ()):
            at = bisect_left(self._part(peer).numbers, op)
            start = float(self._lane(peer).start[at])
            if start > found[0]:
                found = (start, peer, at)
        return found[1:]

    def _rows_at(self, group: str, meeting: int) -> list[int]:
        """Rows of the simulated ranks that wait for each other in this communicator of the group."""
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
        """Add a link that is not an op whose times are in the trace."""
        self.ranks.append(rank)
        self.others.append((op, start, end))
        self.places.append(-len(self.others))

    def _found(self) -> Chain:
        """The chain in order, from the step's beginning on."""
        ranks, places = np.array(self.ranks[::-1], np.int64), np.array(self.places[::-1], np.int64)
        are_ops = places >= 0
        ops, starts, ends = np.empty_like(places), np.empty(len(places)), np.empty(len(places))
        others = np.array(self.others, np.float64).reshape(-1, 3)[-1 - places[~are_ops]]
        ops[~are_ops], starts[~are_ops], ends[~are_ops] = others.T
        for rank in distinct(ranks[are_ops]):
            own, lane = are_ops & (ranks == rank), self.lanes[rank]
            at = places[own]
            ops[own], starts[own], ends[own] = lane.part.numbers_of[at], lane.start[at], lane.end[at]
        starts = np.maximum(starts, self.begin)
        lasts = ends > starts
        return Chain(ranks[lasts], ops[lasts], starts[lasts], ends[lasts])


def _are_calls(program: Program, connections: int) -> Bools:
    """Whether each op with work calls other ranks, by position."""
    numbers = program.once(predecessors, connections).numbers
    return np.array([isinstance(program.ops[n].work, Collective | PointToPoint) for n in numbers], np.bool_)


def _places_of_calls(program: Program, connections: int) -> dict[str, list[int]]:
    """Positions of the calls of each group, by group."""
    found: dict[str, list[int]] = {}
    for place, number in enumerate(program.once(predecessors, connections).numbers):
        work = program.ops[number].work
        if isinstance(work, Collective):
            found.setdefault(work.group, []).append(place)
    return found
