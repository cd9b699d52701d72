"""Expected maximum over a class of ranks under jitter, where one simulated rank represents the class.

# [Note: the slowest of many]
A simulated rank that draws jitter for itself is a typical rank. But a step waits for the slowest of thousands
of ranks, which is another rank at every collective. The largest factor for every kernel would be far too
slow, because no rank is the slowest everywhere. One rank's sum over the step would be too fast, because ranks
wait for each other in between.

So jitter is drawn for all ranks of the class, and all run through the program at once, without a clock. Each
rank's kernels take their drawn time. A collective starts when the last member of its group arrives and takes
as long as without jitter. A message starts when both sides have arrived. For the kernels between collectives
the envelope's work is E = max of the ends - max of the starts over the class. A simulated rank with that work
arrives at every collective when the slowest rank of the class does.

The segments between collectives are sums of kernels, so they are nearly normal. Ranks whose factor over the
whole run is more than five standard deviations faster than the slowest are never the slowest and are left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from heapq import heapify, heappop, heappush

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass
from zsim.engine.executor import Executor
from zsim.engine.jitter.draw import lognormal
from zsim.engine.jitter.segments import JitterSegment, segments_of, typical_sigma
from zsim.engine.prepare import Prepared, Seconds
from zsim.fabric.messages import Pairs

_FAR = 5.0  # standard deviations
_FEWEST = 256

Times = Floats | float


@dataclass(slots=True)
class _Groups:
    """The communicators of one group over the drawn ranks of a program."""

    order: Ints
    """Sorts the ranks by communicator."""
    starts: Ints
    """First index of each communicator in `order`."""
    of_rank: Ints
    """Per rank, the index of its communicator among these."""
    rows: Ints
    """Per rank, the number of its communicator in the group."""

    @staticmethod
    def of(rows: Ints) -> _Groups:
        names, of_rank = np.unique(rows, return_inverse=True)
        order = np.argsort(of_rank, kind="stable")
        starts = np.searchsorted(of_rank[order], np.arange(len(names)))
        return _Groups(order, starts, of_rank, rows)

    def last(self, times: Times) -> Times:
        """Per rank, the arrival time of the last rank of its communicator."""
        if isinstance(times, float):
            return times
        if len(self.starts) == 1:
            return float(times.max())
        found: Floats = np.maximum.reduceat(times[self.order], self.starts)[self.of_rank]
        return found


@dataclass
class _Drawn:
    """The drawn ranks of a program, in order."""

    ranks: Ints
    of_rank: Ints
    """Per rank, the index of its class among the program's."""
    members: list[Ints]
    """Per class, the indices of its ranks."""
    classes: list[int]
    """The numbers of the classes among all classes."""
    factors: Floats
    groups: dict[str, _Groups]

    def each(self, seconds: Floats) -> Times:
        """Per rank, the seconds of its class."""
        return float(seconds[0]) if (seconds == seconds[0]).all() else seconds[self.of_rank]


@dataclass
class ClassOfRanks:
    """All ranks of a job, run through its programs without a clock."""

    prepared: Prepared
    base: Executor
    """A run without jitter."""
    rank_factors: Floats
    """Per rank, the factor on its kernels over the whole run."""
    kernel_sigma: float
    _segments: list[JitterSegment] = field(init=False)
    _drawn: list[_Drawn] = field(init=False)
    _peers: dict[tuple[int, str, bool], tuple[int, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._segments = segments_of(self.prepared, self.base, self.kernel_sigma)
        self._drawn = [self._draw(number) for number in range(len(self.prepared.programs))]

    def _draw(self, program: int) -> _Drawn:
        """The ranks of a program that may be the slowest at some collective."""
        classes, plan = self.prepared.classes, self.prepared.plan
        typical = typical_sigma(self._segments, program)
        numbers = [number for number, own in enumerate(self.prepared.program_of) if own == program]
        kept = []
        for number in numbers:
            members = np.flatnonzero(classes.of_rank == number)
            own = self.rank_factors[members]
            least = float(own.max()) * np.exp(-_FAR * typical)
            order = np.argsort(-own, kind="stable")
            count = max(int((own >= least).sum()), min(_FEWEST, len(members)))
            kept.append(members[order[:count]])
        ranks = np.sort(np.concatenate(kept))
        of_rank = np.searchsorted(numbers, classes.of_rank[ranks])
        return _Drawn(
            ranks,
            of_rank,
            [np.flatnonzero(of_rank == place) for place in range(len(numbers))],
            numbers,
            self.rank_factors[ranks],
            {name: _Groups.of(group.row_of(plan.world_size)[ranks]) for name, group in plan.groups.items()},
        )

    def step(self, generator: np.random.Generator) -> list[Seconds]:
        """Draw one step: per class, the kernels' seconds of its envelope. See [Note: the slowest of many]."""
        return _Step(self, generator).found


class _Step:
    """One drawn step of all ranks. Of the segments that can start the first is run, so that the segments of
    one program run in order.
    """

    def __init__(self, ranks_of_class: ClassOfRanks, generator: np.random.Generator) -> None:
        self.ranks_of_class, self.generator = ranks_of_class, generator
        self.segments = ranks_of_class._segments
        self.found: list[Seconds] = [list(own) for own in ranks_of_class.prepared.kernel_seconds]
        self.ends: dict[int, Times] = {}
        self.begins: dict[int, Times] = {}  # of segments that wait for partners
        self.missing = [len(one.before) for one in self.segments]
        self.absent = [len(one.partners) for one in self.segments]
        self.after: list[list[int]] = [[] for _ in self.segments]
        for number, one in enumerate(self.segments):
            for before in one.before:
                self.after[before].append(number)
        self.uses = [len(after) for after in self.after]
        self.ready = [number for number, count in enumerate(self.missing) if not count]
        heapify(self.ready)
        num_passed = 0
        while self.ready:
            self._reach(heappop(self.ready))
            num_passed += 1
        assert num_passed == len(self.segments), "a stretch never begins"

    def _reach(self, number: int) -> None:
        one = self.segments[number]
        begin = _latest([self.ends[before] for before in one.before])
        if not one.partners and not one.partner_of:
            self._pass(number, begin)
            return
        self.begins[number] = begin
        for other in one.partner_of:
            self.absent[other] -= 1
            if not self.absent[other] and other in self.begins and other != number:
                self._pass(other, self._with_partners(other))
        if not self.absent[number]:
            self._pass(number, self._with_partners(number))

    def _pass(self, number: int, begin: Times) -> None:
        one = self.segments[number]
        drawn = self.ranks_of_class._drawn[one.program]
        if one.is_kernels:
            normal = self.generator.standard_normal(len(drawn.factors))
            factor: Floats = drawn.factors * lognormal(normal, one.sigma)
            end: Times = begin + factor * one.seconds[drawn.of_rank]
            self._keep_envelope(one, drawn, begin, end)
        elif one.group is not None and not one.partners:
            end = drawn.groups[one.group].last(begin) + drawn.each(one.seconds)
        else:
            end = begin + drawn.each(one.seconds)
        self.ends[number] = end
        for before in one.before:
            self.uses[before] -= 1
            if not self.uses[before]:
                self.ends.pop(before)
        for after in self.after[number]:
            self.missing[after] -= 1
            if not self.missing[after]:
                heappush(self.ready, after)

    def _with_partners(self, number: int) -> Times:
        """Per rank, the time at which its collective or messages can start, when all partners have
        arrived."""
        one = self.segments[number]
        return self._last_of_groups(number) if one.group is not None else self._last_of_sides(number)

    def _last_of_groups(self, number: int) -> Times:
        one = self.segments[number]
        assert one.group is not None
        last = np.full(len(self.ranks_of_class.prepared.plan.groups[one.group].members), -np.inf)
        for member in (number, *(partner.segment for partner in one.partners)):
            rows = self.ranks_of_class._drawn[self.segments[member].program].groups[one.group].rows
            np.maximum.at(last, rows, self.begins[member])
        found: Floats = last[self.ranks_of_class._drawn[one.program].groups[one.group].rows]
        return found

    def _last_of_sides(self, number: int) -> Times:
        one = self.segments[number]
        begin = np.full(len(self.ranks_of_class._drawn[one.program].ranks), self.begins[number])
        for partner in one.partners:
            places = self._peer_places(number, partner.segment, partner.pair, partner.is_sent)
            theirs = np.broadcast_to(
                self.begins[partner.segment],
                len(self.ranks_of_class._drawn[self.segments[partner.segment].program].ranks),
            )
            begin = np.maximum(begin, np.where(places >= 0, theirs[places], -np.inf))
        return begin

    def _peer_places(self, number: int, partner: int, pair: str, is_sent: bool) -> Ints:
        """Per rank, the index of its peer among the drawn ranks of the peer's program. It is -1 if the peer
        is not drawn.
        """
        program, theirs = self.segments[number].program, self.segments[partner].program
        key = program, pair, is_sent
        if key not in self.ranks_of_class._peers:
            pairs = self.ranks_of_class.prepared.fabric.groups[pair]
            assert isinstance(pairs, Pairs)
            world = self.ranks_of_class.prepared.job.world_size
            own, other = self.ranks_of_class._drawn[program].ranks, self.ranks_of_class._drawn[theirs].ranks
            place_of = np.full(world, -1, dtype=np.int64)
            place_of[other] = np.arange(len(other))
            rows = (pairs.row_of(world) if is_sent else pairs.receiving_row_of(world))[own]
            self.ranks_of_class._peers[key] = theirs, place_of[pairs.members[rows, 1 if is_sent else 0]]
        return self.ranks_of_class._peers[key][1]

    def _keep_envelope(self, one: JitterSegment, drawn: _Drawn, begin: Times, end: Times) -> None:
        assert not isinstance(end, float)
        for place, members in enumerate(drawn.members):
            began = begin if isinstance(begin, float) else float(begin[members].max())
            work = float(end[members].max()) - began
            scale = work / float(one.seconds[place]) if one.seconds[place] > 0 else 1.0
            own = self.found[drawn.classes[place]]
            assert isinstance(own, list)
            for op in one.ops:
                own[op] = own[op] * scale


def _latest(times: Sequence[Times]) -> Times:
    latest: Times = 0.0
    for other in times:
        latest = np.maximum(latest, other)
    return latest
