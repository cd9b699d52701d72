"""Run a step once, or many times with jitter.

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
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.engine.executor import Executor
from zsim.engine.jitter.segments import JitterSegment, lognormal, read_segments, typical_sigma
from zsim.engine.prepare import PreparedJob, Seconds
from zsim.engine.priced_program import scale_seconds
from zsim.engine.record import make_trace, step_seconds
from zsim.fabric.messages import Pairs
from zsim.specs.experiment.jitter import JitterConfig
from zsim.trace.trace import Trace


@dataclass(frozen=True)
class ProgramRun:
    """One run of a job's programs: the executor, and the time at which the last op ended."""

    prepared: PreparedJob
    executor: Executor
    end_seconds: float

    @property
    def step_seconds(self) -> float:
        return step_seconds(self.prepared.plan, self.executor, self.end_seconds)

    @cached_property
    def trace(self) -> Trace:
        """The run as a trace."""
        return make_trace(self.prepared.job, self.prepared.plan, self.executor, self.end_seconds)


@dataclass(frozen=True)
class JitterRun:
    """Steps drawn with jitter."""

    jitter: JitterConfig
    steps: tuple[Trace, ...]
    """Traces of the first simulated rank."""
    median: Trace
    """Trace of all simulated ranks of the step of median length."""
    plain_seconds: float
    """Of the step without jitter."""
    events: int


def run_once(prepared: PreparedJob, kernel_seconds: Sequence[Seconds] | None = None) -> ProgramRun:
    """Run the prepared programs once, from now on."""
    executor = prepared.executor(kernel_seconds)
    return ProgramRun(prepared, executor, executor.run())


def draw_steps(prepared: PreparedJob, plain: ProgramRun, jitter: JitterConfig) -> JitterRun:
    """Draw `jitter.steps` steps. `plain` is the run without jitter.

    A class of one rank draws its factors, a larger class the envelope of its slowest members.
    """
    from zsim.engine.jitter.segments import class_generator, op_seconds, rank_factors

    factors = rank_factors(jitter, prepared.job.world_size)
    ranks, sizes = prepared.classes.representatives, prepared.classes.sizes.tolist()
    seconds = [
        scale_seconds(kernels, float(factors[rank]))
        for kernels, rank in zip(prepared.kernel_seconds, ranks, strict=True)
    ]
    concentration = [np.array(priced.concentration) for priced in prepared.programs]
    program_of = prepared.program_of
    is_alone = all(size == 1 for size in sizes)
    ensemble = None if is_alone else RankEnsemble(prepared, plain.executor, factors, jitter.kernel_sigma)
    traces: list[Trace] = []
    events = 0
    for step in range(jitter.steps):
        envelope_seconds = ensemble.step(class_generator(jitter, step)) if ensemble is not None else seconds
        drawn = [
            op_seconds(jitter, step, rank, seconds[number], concentration[program_of[number]])
            if size == 1
            else envelope_seconds[number]
            for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True))
        ]
        run = run_once(prepared, drawn)
        events += run.executor.num_events
        traces.append(run.trace)
    by_length = sorted(range(jitter.steps), key=lambda number: (traces[number].step_seconds, number))
    median = traces[by_length[(jitter.steps - 1) // 2]]
    first_rank_steps = tuple(trace.select_rank(ranks[0]) for trace in traces)
    return JitterRun(jitter, first_rank_steps, median, plain.trace.step_seconds, events)


_FAR = 5.0  # standard deviations
_FEWEST = 256

Times = Floats | float


@dataclass(slots=True)
class _GroupIndex:
    """The communicators of one group over the drawn ranks of a program."""

    order: Ints
    """Sorts the ranks by communicator."""
    starts: Ints
    """First index of each communicator in `order`."""
    communicator_of_rank: Ints
    """Per rank, the index of its communicator among these."""
    rows: Ints
    """Per rank, the number of its communicator in the group."""

    @staticmethod
    def of(rows: Ints) -> _GroupIndex:
        names, communicator_of_rank = np.unique(rows, return_inverse=True)
        order = np.argsort(communicator_of_rank, kind="stable")
        starts = np.searchsorted(communicator_of_rank[order], np.arange(len(names)))
        return _GroupIndex(order, starts, communicator_of_rank, rows)

    def last(self, times: Times) -> Times:
        """Per rank, the arrival time of the last rank of its communicator."""
        if isinstance(times, float):
            return times
        if len(self.starts) == 1:
            return float(times.max())
        last_times: Floats = np.maximum.reduceat(times[self.order], self.starts)[self.communicator_of_rank]
        return last_times


@dataclass
class _DrawnRanks:
    """The drawn ranks of a program, in order."""

    ranks: Ints
    class_of_rank: Ints
    """Per rank, the index of its class among the program's."""
    members: list[Ints]
    """Per class, the indices of its ranks."""
    classes: list[int]
    """The numbers of the classes among all classes."""
    factors: Floats
    groups: dict[str, _GroupIndex]

    def rank_seconds(self, seconds: Floats) -> Times:
        """Per rank, the seconds of its class."""
        return float(seconds[0]) if (seconds == seconds[0]).all() else seconds[self.class_of_rank]


@dataclass
class RankEnsemble:
    """All ranks of a job, run through its programs without a clock."""

    prepared: PreparedJob
    base: Executor
    """A run without jitter."""
    rank_factors: Floats
    """Per rank, the factor on its kernels over the whole run."""
    kernel_sigma: float
    _segments: list[JitterSegment] = field(init=False)
    _drawn: list[_DrawnRanks] = field(init=False)
    _peers: dict[tuple[int, str, bool], tuple[int, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._segments = read_segments(self.prepared, self.base, self.kernel_sigma)
        self._drawn = [self._draw(number) for number in range(len(self.prepared.programs))]

    def _draw(self, program: int) -> _DrawnRanks:
        """The ranks of a program that may be the slowest at some collective."""
        classes, plan = self.prepared.classes, self.prepared.plan
        typical = typical_sigma(self._segments, program)
        numbers = [
            number
            for number, class_program in enumerate(self.prepared.program_of)
            if class_program == program
        ]
        members_of_classes = []
        for number in numbers:
            members = np.flatnonzero(classes.class_of_rank == number)
            factors = self.rank_factors[members]
            threshold = float(factors.max()) * np.exp(-_FAR * typical)
            order = np.argsort(-factors, kind="stable")
            count = max(int((factors >= threshold).sum()), min(_FEWEST, len(members)))
            members_of_classes.append(members[order[:count]])
        ranks = np.sort(np.concatenate(members_of_classes))
        class_of_rank = np.searchsorted(numbers, classes.class_of_rank[ranks])
        return _DrawnRanks(
            ranks,
            class_of_rank,
            [np.flatnonzero(class_of_rank == index) for index in range(len(numbers))],
            numbers,
            self.rank_factors[ranks],
            {
                name: _GroupIndex.of(group.row_per_rank(plan.world_size)[ranks])
                for name, group in plan.groups.items()
            },
        )

    def step(self, generator: np.random.Generator) -> list[Seconds]:
        """Draw one step: per class, the kernels' seconds of its envelope. See [Note: the slowest of many]."""
        return _DrawnStep(self, generator).kernel_seconds


class _DrawnStep:
    """One drawn step of all ranks. Of the segments that can start the first is run, so that the segments of
    one program run in order.
    """

    def __init__(self, ensemble: RankEnsemble, generator: np.random.Generator) -> None:
        self.ensemble, self.generator = ensemble, generator
        self.segments = ensemble._segments
        self.kernel_seconds: list[Seconds] = [list(seconds) for seconds in ensemble.prepared.kernel_seconds]
        self.ends: dict[int, Times] = {}
        self.begins: dict[int, Times] = {}  # of segments that wait for partners
        self.missing = [len(segment.predecessors) for segment in self.segments]
        self.absent = [len(segment.partners) for segment in self.segments]
        self.successors: list[list[int]] = [[] for _ in self.segments]
        for number, segment in enumerate(self.segments):
            for predecessor in segment.predecessors:
                self.successors[predecessor].append(number)
        self.uses = [len(successors) for successors in self.successors]
        self.ready = [number for number, count in enumerate(self.missing) if not count]
        heapify(self.ready)
        num_passed = 0
        while self.ready:
            self._begin_segment(heappop(self.ready))
            num_passed += 1
        assert num_passed == len(self.segments), "a segment never begins"

    def _begin_segment(self, number: int) -> None:
        segment = self.segments[number]
        begin = _latest([self.ends[predecessor] for predecessor in segment.predecessors])
        if not segment.partners and not segment.partner_of:
            self._run_segment(number, begin)
            return
        self.begins[number] = begin
        for dependent in segment.partner_of:
            self.absent[dependent] -= 1
            if not self.absent[dependent] and dependent in self.begins and dependent != number:
                self._run_segment(dependent, self._partners_arrival(dependent))
        if not self.absent[number]:
            self._run_segment(number, self._partners_arrival(number))

    def _run_segment(self, number: int, begin: Times) -> None:
        segment = self.segments[number]
        drawn = self.ensemble._drawn[segment.program]
        if segment.is_kernels:
            normal = self.generator.standard_normal(len(drawn.factors))
            factor: Floats = drawn.factors * lognormal(normal, segment.sigma)
            end: Times = begin + factor * segment.seconds[drawn.class_of_rank]
            self._keep_envelope(segment, drawn, begin, end)
        elif segment.group is not None and not segment.partners:
            end = drawn.groups[segment.group].last(begin) + drawn.rank_seconds(segment.seconds)
        else:
            end = begin + drawn.rank_seconds(segment.seconds)
        self.ends[number] = end
        for predecessor in segment.predecessors:
            self.uses[predecessor] -= 1
            if not self.uses[predecessor]:
                self.ends.pop(predecessor)
        for successor in self.successors[number]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                heappush(self.ready, successor)

    def _partners_arrival(self, number: int) -> Times:
        """Per rank, the time at which its collective or messages can start, when all partners have
        arrived."""
        segment = self.segments[number]
        return (
            self._last_of_collective(number) if segment.group is not None else self._last_of_messages(number)
        )

    def _last_of_collective(self, number: int) -> Times:
        segment = self.segments[number]
        assert segment.group is not None
        last = np.full(len(self.ensemble.prepared.plan.groups[segment.group].members), -np.inf)
        for member in (number, *(partner.segment for partner in segment.partners)):
            rows = self.ensemble._drawn[self.segments[member].program].groups[segment.group].rows
            np.maximum.at(last, rows, self.begins[member])
        last_times: Floats = last[self.ensemble._drawn[segment.program].groups[segment.group].rows]
        return last_times

    def _last_of_messages(self, number: int) -> Times:
        segment = self.segments[number]
        begin = np.full(len(self.ensemble._drawn[segment.program].ranks), self.begins[number])
        for partner in segment.partners:
            indices = self._peer_indices(number, partner.segment, partner.pair, partner.is_sent)
            peer_begins = np.broadcast_to(
                self.begins[partner.segment],
                len(self.ensemble._drawn[self.segments[partner.segment].program].ranks),
            )
            begin = np.maximum(begin, np.where(indices >= 0, peer_begins[indices], -np.inf))
        return begin

    def _peer_indices(self, number: int, partner: int, pair: str, is_sent: bool) -> Ints:
        """Per rank, the index of its peer among the drawn ranks of the peer's program. It is -1 if the peer
        is not drawn.
        """
        program, peer_program = self.segments[number].program, self.segments[partner].program
        key = program, pair, is_sent
        if key not in self.ensemble._peers:
            pairs = self.ensemble.prepared.fabric.groups[pair]
            assert isinstance(pairs, Pairs)
            world = self.ensemble.prepared.job.world_size
            ranks, peers = self.ensemble._drawn[program].ranks, self.ensemble._drawn[peer_program].ranks
            index_of_rank = np.full(world, -1, dtype=np.int64)
            index_of_rank[peers] = np.arange(len(peers))
            rows = (pairs.row_per_rank(world) if is_sent else pairs.receiving_row_of(world))[ranks]
            self.ensemble._peers[key] = peer_program, index_of_rank[pairs.members[rows, 1 if is_sent else 0]]
        return self.ensemble._peers[key][1]

    def _keep_envelope(self, segment: JitterSegment, drawn: _DrawnRanks, begin: Times, end: Times) -> None:
        assert not isinstance(end, float)
        for index, members in enumerate(drawn.members):
            began = begin if isinstance(begin, float) else float(begin[members].max())
            work = float(end[members].max()) - began
            scale = work / float(segment.seconds[index]) if segment.seconds[index] > 0 else 1.0
            class_seconds = self.kernel_seconds[drawn.classes[index]]
            assert isinstance(class_seconds, list)
            for op in segment.ops:
                class_seconds[op] = class_seconds[op] * scale


def _latest(times: Sequence[Times]) -> Times:
    latest: Times = 0.0
    for time in times:
        latest = np.maximum(latest, time)
    return latest
