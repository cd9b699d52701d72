"""Replay of recorded ranks: collectives take their recorded time, or the time that a topology's links
need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import simpy

from zsim.arrays import Ints
from zsim.dataclass import dataclass
from zsim.engine.executor import Executor
from zsim.engine.lane import Lane, worked_seconds
from zsim.engine.priced_program import PricedProgram, RecordedTimes
from zsim.fabric.fabric import Fabric
from zsim.fabric.folding.classes import JobPlacement, stable_classes
from zsim.fabric.messages import Side, pair_name
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.plan.recorded.rank import RecordedRank, as_recorded
from zsim.specs.topology.topology import Topology
from zsim.trace.trace import SpanInfo, SpanInfos, Trace

_KINDS: Mapping[str, CollectiveKind] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The hardware that a step is replayed on."""

    topology: Topology
    groups: Mapping[str, Group]
    is_folded: bool
    """Whether the replayed rank is the representative of all ranks."""
    slowdown: float
    """Factor by which kernels are slower while a collective runs."""
    blocks: Mapping[str, Ints] | None = None
    """See `Fabric`. Given where the replayed ranks represent others."""

    def is_uneven(self, step: Trace) -> bool:
        """Whether one rank represents ranks at unequal positions in the network, whose collectives in `step`
        load their links unequally.
        """
        if not self.is_folded:
            return False
        works = [collective_of(info) for info in dict.fromkeys(step.infos) if info.kind in _KINDS]
        alike = np.zeros(self.topology.world_size, dtype=np.int64)
        placed = JobPlacement(self.topology, self.groups, works, alike)
        return len(stable_classes([placed])[0].sizes) > 1


def run_replay(
    step: Trace, ranks: Mapping[int, RecordedRank], place: Place | None, num_steps: int = 1
) -> tuple[dict[int, float], Trace]:
    """Seconds of each rank's step, and the step as a trace. Of the `num_steps` steps in the programs the last
    counts.

    Without `hardware` nothing changes, and every span has its recorded time.
    """
    if place is None:
        ranks = {number: as_recorded(rank) for number, rank in ranks.items()}
    begins = [time for rank in ranks.values() for time in (rank.host_begin, *rank.stream_begins.values())]
    zero = -min([0.0, *begins])  # seconds from the clock's start to the first rank's step
    programs = [_priced(rank, zero, place) for rank in ranks.values()]
    env, fabric = simpy.Environment(), None
    if place is not None:
        works = [call for one in programs if one.recorded for call in one.recorded.calls if call is not None]
        works += [side.work for one in programs for sides in one.sides.values() for side in sides]
        own = {"is_folded": place.is_folded} if place.blocks is None else {"blocks": place.blocks}
        fabric = Fabric(env, place.topology, place.groups, works=works, **own)
    # The representative of all ranks is put at rank 0's place: the fabric may have no place of its number.
    places = [0] if place is not None and place.is_folded else list(ranks)
    seconds = [program.kernel_seconds for program in programs]
    slowdown = 1.0 if place is None else place.slowdown
    executor = Executor(env, programs, fabric, places, seconds, [slowdown] * len(programs), offload=None)
    executor.run()
    lanes = [
        _Replayed(rank, lane, zero, num_steps)
        for rank, lane in zip(ranks.values(), executor.lanes, strict=True)
    ]
    if num_steps > 1:  # as a simulated step: from the last rank's start on
        begin = max(lane.begin for lane in lanes)
        return {lane.rank: lane.end - begin for lane in lanes}, _trace(step, lanes)
    return {lane.rank: lane.step_seconds for lane in lanes}, _trace(step, lanes)


def _priced(rank: RecordedRank, zero: float, place: Place | None) -> PricedProgram:
    """The rank's program, on a clock that starts `zero` seconds before the step."""
    ops, works = rank.program.ops, rank.works
    pending, successors = [0] * len(ops), [list[int]() for _ in ops]
    ready = [-math.inf] * len(ops)
    calls: list[Collective | None] = [None] * len(ops)
    names = {} if place is None else {name: number for number, name in enumerate(place.groups)}
    meetings, counts = [-1] * len(ops), dict.fromkeys(names, 0)
    sides, messages = dict[int, tuple[Side, ...]](), Counter[tuple[str, bool]]()
    last: dict[str, int] = {}
    for number, (op, work) in enumerate(zip(ops, works, strict=True)):
        if work.is_on_host:
            continue
        before = set(op.after)
        if op.stream in last:
            before.add(last[op.stream])
        else:
            ready[number] = rank.stream_begins.get(op.stream, 0.0) + zero
        last[op.stream] = number
        for other in before:
            successors[other].append(number)
        pending[number] = len(before)
        if work.meets and place is not None and work.info is not None and work.info.messages:
            own = messages_of(work.info)
            sides[number] = tuple(_side(message, is_sent, messages) for is_sent, message in own)
        elif work.meets and place is not None:
            assert work.info is not None
            call = calls[number] = collective_of(work.info)
            meetings[number] = counts[call.group] * len(names) + names[call.group]
            counts[call.group] += 1
    times = RecordedTimes(works, ready, calls, rank.host_begin + zero, place is not None)
    none: list[float | None] = [None] * len(ops)
    return PricedProgram(
        program=rank.program,
        pending=pending,
        successors=[tuple(others) for others in successors],
        host_seconds=[],
        kernel_seconds=none,
        concentration=[],
        host_waits=[],
        meetings=meetings,
        sides=sides,
        recorded=times,
    )


def collective_of(info: SpanInfo) -> Collective:
    """The collective that a span of its kind runs."""
    return Collective(_KINDS[info.kind], info.bytes, info.dtype, info.group)


def shift_of(way: str, places: int, group_size: int) -> int:
    """The distance in the group from a message's sender to its receiver. `distance` is the one to the other
    side.
    """
    return (places if way == "send" else -places) % group_size


def messages_of(info: SpanInfo) -> list[tuple[bool, Collective]]:
    """The messages of a span as collectives of pairs, each with whether it is sent."""
    found = []
    for way, count, places in info.messages:
        pair = pair_name(info.group, shift_of(way, places, info.group_size))
        found.append((way == "send", Collective("send", count, info.dtype, pair)))
    return found


def _side(message: Collective, is_sent: bool, counts: Counter[tuple[str, bool]]) -> Side:
    """The next message of its pair. `counts` holds the numbers of those before it."""
    counts[message.group, is_sent] += 1
    return Side(message, is_sent, counts[message.group, is_sent] - 1)


class _Replayed:
    """A replayed rank: its simulated rank from the start of the step that counts, the last of `num_steps`."""

    def __init__(self, rank: RecordedRank, lane: Lane, zero: float, num_steps: int) -> None:
        self.rank, self.lane, self.works = rank.rank, lane, rank.works
        self.recorded_ahead = rank.host_ahead
        self.first = len(self.works) * (num_steps - 1) // num_steps
        self.begin = max(self._shown_ends(0, self.first)) if self.first else rank.begin + zero

    def _shown_ends(self, first: int, end: int) -> list[float]:
        return [self.lane.ended[op] for op in range(first, end) if self.works[op].info is not None]

    @property
    def end(self) -> float:
        """The end of the step that counts. A step that follows another one ends with its last op, without the
        host's time after it.
        """
        last = max(self._shown_ends(self.first, len(self.works)), default=0.0)
        return last if self.first else max(last, self.lane.host_time)

    @property
    def step_seconds(self) -> float:
        """Seconds of the step that counts, from the rank's start on."""
        return self.end - self.begin

    @property
    def host_ahead(self) -> float:
        """Seconds that its host had worked on the step before it began."""
        if not self.first:
            return self.recorded_ahead
        since = self.lane.issue[self.first - 1]
        return worked_seconds(self.lane.recorded_blocks, since, self.begin)

    def rows(self) -> Iterator[tuple[SpanInfo, float, float, float]]:
        """(info, issue, start, end) of each span that a trace shows. In a step that follows another one, ops
        that were issued before it began count as issued when it began.
        """
        lane, earliest = self.lane, self.begin if self.first else -math.inf
        for op in range(self.first, len(self.works)):
            info = self.works[op].info
            if info is not None:
                issue = max(lane.issue[op], earliest) if self.works[op].is_issue_known else math.nan
                yield info, issue, lane.start[op], lane.ended[op]

    def in_allocator(self) -> Iterator[tuple[float, float]]:
        """The host's spans (start, end) in torch's allocator. Waits in them may take longer or shorter than
        recorded.
        """
        before = self.begin
        for op in range(self.first, len(self.works)):
            issue = self.lane.issue[op]
            for since, until in self.works[op].in_allocator:
                if issue - until > before + since:
                    yield before + since, issue - until
            before = issue


def _trace(like: Trace, lanes: Sequence[_Replayed]) -> Trace:
    """The replayed step as a trace, with the metadata of the recorded trace."""
    index_of: dict[SpanInfo, int] = {}
    rows: list[tuple[int, int, float, float, float]] = []
    blocks: list[tuple[int, float, float, SpanInfo]] = []
    zero = min(lane.begin for lane in lanes)
    in_allocator: list[tuple[int, float, float]] = []
    for lane in lanes:
        rank = lane.rank
        in_allocator += [
            (rank, max(start - zero, 0.0), end - zero) for start, end in lane.in_allocator() if end > zero
        ]
        for work in lane.works:
            if work.info is not None:
                index_of.setdefault(work.info, len(index_of))
        rows += [(rank, index_of[info], issue, start, end) for info, issue, start, end in lane.rows()]
        blocks += [
            (rank, max(start - zero, 0.0), end - zero, info)
            for start, end, info in lane.lane.recorded_blocks
            if end > zero
        ]
    host_blocks = tuple(
        (rank, start, end, index_of.setdefault(info, len(index_of))) for rank, start, end, info in blocks
    )
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    times = table[:, 2:] - zero
    ahead = {lane.rank: lane.host_ahead for lane in lanes if lane.host_ahead > 0}
    return replace(
        like,
        source="simulated",
        infos=SpanInfos(index_of),
        ranks=table[:, 0].astype(np.int64),
        info_indices=table[:, 1].astype(np.int64),
        issue_seconds=times[:, 0],
        start_seconds=times[:, 1],
        end_seconds=times[:, 2],
        step_seconds=max(lane.step_seconds for lane in lanes),
        memory=None,
        host_blocks=host_blocks,
        allocator_blocks=tuple(in_allocator),
        begins={lane.rank: lane.begin - zero for lane in lanes if lane.begin > zero},
        metadata={**like.metadata, "host_ahead_seconds": ahead},
        steps=(),
        step_numbers=None,
        transfer_seconds=None,
        follows_wait=None,
    )
