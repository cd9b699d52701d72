"""Bubbles: the time in which a pipeline rank's compute stream is idle because another stage has not delivered
yet.

# [Note: what is a bubble]
A gap of the compute stream is followed by an op. If that op waits, directly or through ops of other streams
or a block of the host, for messages of another pipeline rank, then the gap is a bubble until the last of
their other sides has arrived (a message moves when both sides have, see `PointToPoint`). At a pipeline's
beginning this is the lead-in, later the gaps. Communication that runs meanwhile does not end a bubble. The
rest of the gap, in which the messages are transferred, is none.

A rank that has done its last forward or backward is in the drain until the last rank of its pipeline has done
so too. All time of the drain without kernels is a bubble, the reductions of gradients that run in it
included. Work that comes after it, such as the collectives at the end of the step, is none.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from zsim.plan.builder import COMPUTE
from zsim.plan.by_type import pipeline_rank_of
from zsim.plan.ops import Kernels, Plan, Program
from zsim.report.breakdown import Breakdown
from zsim.report.critical.path import Peers
from zsim.report.critical.predecessors import Predecessors, predecessors
from zsim.report.lanes import LaneTimes, StepTimes
from zsim.report.pipeline.schedule import COMPUTING
from zsim.report.waits import Wait, Waits
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

Interval = tuple[float, float]
_KERNELS = frozenset({"compute", "optimizer"})  # the parts of a breakdown that are no waits
_SAME_INSTANT = 1e-9  # of the step


def is_pipeline(plan: Plan) -> bool:
    """Whether the ranks have several programs and send each other messages."""
    stages = {pipeline_rank_of(plan, number) for number in range(len(plan.programs))}
    return len(stages) > 1 and plan.has_messages


class Bubbles:
    """The bubbles of the ranks of a simulated step. See [Note: what is a bubble].

    `trace` is the step of `plan`, with one span per op with work. `peers` gives, by (rank, op) of a call with
    messages, the (rank, op) of the calls at the other side. `connections` is the number of hardware queues
    that the streams share.
    """

    def __init__(
        self, plan: Plan, trace: Trace, peers: Peers, connections: int = DEFAULT_CONNECTIONS
    ) -> None:
        self._plan, self._trace, self._peers = plan, trace, peers
        self._parts = [program.once(predecessors, connections) for program in plan.programs]
        first_info = list(accumulate((len(part.numbers) for part in self._parts), initial=0))
        self._times = StepTimes(trace, plan, first_info)
        self._tolerance = _SAME_INSTANT * trace.step_seconds
        self._found: dict[int, list[Interval]] = {}
        self._ends: dict[int, float] = {}  # of each rank's forwards and backwards
        self._neighbours: dict[int, set[int]] = {}
        for (rank, _), others in peers.items():
            found = (peer for peer, _ in others if self._stage(peer) != self._stage(rank))
            self._neighbours.setdefault(rank, set()).update(found)

    def of(self, rank: int) -> list[Interval]:
        """The bubbles of `rank`, disjoint and in order, on the trace's clock."""
        if rank not in self._found:
            self._found[rank] = self._of(rank)
        return self._found[rank]

    def _of(self, rank: int) -> list[Interval]:
        lane, part = self._times.of(rank), self._part(rank)
        begin = self._trace.begins.get(rank, 0.0)
        arrivals = self._arrivals(rank)
        found: list[Interval] = []
        free = begin
        for place in self._program(rank).once(_places_on_compute_stream):
            start = lane.start[place]
            if start > free + self._tolerance:
                until = self._delivered(place, free, lane, part, arrivals)
                found.append((free, min(until, start)))
            if place in arrivals:  # a message on the compute stream itself
                found.append((start, min(arrivals[place], lane.end[place])))
            free = max(free, lane.end[place])
        drained = min(self._drained(rank), begin + self._trace.step_seconds)
        found += self._idle(rank, self._last_computed(rank), drained)
        return _union([(start, end) for start, end in found if end > start + self._tolerance])

    def cut_from(self, breakdown: Breakdown, rank: int) -> Breakdown:
        """The breakdown of `rank`, on the clock of the rank's step, with its bubbles."""
        begin = self._trace.begins.get(rank, 0.0)
        over = max(self._times.of(rank).end, default=begin) - begin - self._tolerance
        bubbles = [(start - begin, end - begin) for start, end in self.of(rank)]
        return with_bubbles(breakdown, bubbles, over)

    def _delivered(
        self,
        place: int,
        since: float,
        lane: LaneTimes,
        part: Predecessors,
        arrivals: Mapping[int, float],
    ) -> float:
        """When the other side of the last message had arrived that the op at `position` waits for and that
        was not over at `since`. 0 without one.
        """
        waiting, seen = [place], {place}
        until = 0.0
        for number in range(bisect_right(lane.blocks, since, key=itemgetter(0)), len(lane.blocks)):
            _, start, blocking = lane.blocks[number]
            if start >= lane.issue[place]:
                break
            if blocking not in seen:
                seen.add(blocking)
                waiting.append(blocking)
        while waiting:
            one = waiting.pop()
            until = max(until, arrivals.get(one, 0.0) if one != place else 0.0)
            before = part.of(one)
            ahead = part.ahead.get(one, -1)
            while ahead >= 0 and lane.start[ahead] > since:  # held up by launches in the same queue
                before += part.of(ahead)
                ahead = part.ahead.get(ahead, -1)
            for other in before:
                if other not in seen and lane.end[other] > since:
                    seen.add(other)
                    waiting.append(other)
        return until

    def _arrivals(self, rank: int) -> dict[int, float]:
        """By position of a call with messages of other programs' ranks, when the last of these ranks had
        arrived.
        """
        program, found = self._program(rank), dict[int, float]()
        places = {number: place for place, number in enumerate(self._part(rank).numbers)}
        for number in program.calls_with_messages:
            starts = [
                self._times.of(peer).start[self._place(peer, op)]
                for peer, op in self._peers.get((rank, number), ())
                if self._stage(peer) != self._stage(rank)
            ]
            if starts:
                found[places[number]] = max(starts)
        return found

    def _place(self, rank: int, op: int) -> int:
        return self._program(rank).once(_place_of)[op]

    def _drained(self, rank: int) -> float:
        """When the last rank of `rank`'s pipeline has done its last forward or backward."""
        members, waiting = {rank}, [rank]
        while waiting:
            for other in sorted(self._neighbours.get(waiting.pop(), ())):
                if other not in members:
                    members.add(other)
                    waiting.append(other)
        return max(self._last_computed(member) for member in sorted(members))

    def _last_computed(self, rank: int) -> float:
        """When `rank` has done its last kernel of a forward or backward."""
        if rank not in self._ends:
            lane = self._times.of(rank)
            places = self._program(rank).once(_places_of_kernels)
            computing = [lane.end[place] for place, phase in places if phase in COMPUTING]
            self._ends[rank] = max(computing, default=self._trace.begins.get(rank, 0.0))
        return self._ends[rank]

    def _idle(self, rank: int, start: float, end: float) -> Iterator[Interval]:
        """The parts of an interval in which `rank` runs no kernels."""
        lane = self._times.of(rank)
        for place, _ in self._program(rank).once(_places_of_kernels):
            if lane.start[place] >= end:
                break
            if lane.start[place] > start:
                yield start, lane.start[place]
            start = max(start, lane.end[place])
        if end > start:
            yield start, end

    def _stage(self, rank: int) -> int:
        return pipeline_rank_of(self._plan, int(self._plan.program_of[rank]))

    def _program(self, rank: int) -> Program:
        return self._plan.program_on(rank)

    def _part(self, rank: int) -> Predecessors:
        return self._parts[int(self._plan.program_of[rank])]


def with_bubbles(
    breakdown: Breakdown, bubbles: Sequence[Interval], over_seconds: float = math.inf
) -> Breakdown:
    """The breakdown with the waits within `bubbles` counted as such, both on the clock of the rank's step.

    `work_end_seconds` is when the rank has done all its work. After it the rank waits for the others'
    communication at the end of the step.
    """
    waits: list[Wait] = []
    waited: dict[tuple[str, str], list[float]] = {}
    for wait in breakdown.waits:
        for start, end, is_bubble in _cut(wait.start_seconds, wait.end_seconds, bubbles):
            cause, info = ("bubble", None) if is_bubble else (wait.cause, wait.info)
            if info is None and cause == "host_bound" and start >= over_seconds:
                cause = "exposed_communication"
            waits.append(wait._replace(start_seconds=start, end_seconds=end, cause=cause, info=info))
            waited.setdefault((wait.phase, cause), []).append(end - start)
    by_phase = {
        phase: {
            name: seconds if name in _KERNELS else math.fsum(waited.get((phase, name), ()))
            for name, seconds in row.items()
        }
        for phase, row in breakdown.by_phase.items()
    }
    seconds = {name: math.fsum(row[name] for row in by_phase.values()) for name in breakdown.seconds}
    return Breakdown(seconds, by_phase, Waits.of(waits))


def _cut(start: float, end: float, bubbles: Sequence[Interval]) -> Iterator[tuple[float, float, bool]]:
    """(start, end, whether within a bubble) of the parts of an interval."""
    for first, last in bubbles:
        if last <= start:
            continue
        if first >= end:
            break
        if first > start:
            yield start, first, False
        yield max(start, first), min(end, last), True
        start = min(end, last)
    if end > start:
        yield start, end, False


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _places_on_compute_stream(program: Program) -> list[int]:
    working = [op for op in program.ops if op.work is not None]
    return [place for place, op in enumerate(working) if op.stream == COMPUTE]


def _places_of_kernels(program: Program) -> list[tuple[int, str]]:
    """Position and phase of the kernels of the compute stream."""
    working = [op for op in program.ops if op.work is not None]
    return [
        (place, op.phase)
        for place, op in enumerate(working)
        if op.stream == COMPUTE and isinstance(op.work, Kernels)
    ]


def _place_of(program: Program) -> dict[int, int]:
    """By number of an op with work, its position among them."""
    working = (number for number, op in enumerate(program.ops) if op.work is not None)
    return {number: place for place, number in enumerate(working)}
