"""Replay of recorded ranks: collectives take their recorded time, or the time that a topology's links
need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import simpy

from zsim.arrays import Ints
from zsim.engine.executor import Executor
from zsim.engine.priced_program import PricedProgram, RecordedTimes
from zsim.engine.simulated_rank import SimulatedRank, worked_seconds
from zsim.fabric.fabric import Fabric
from zsim.fabric.folding.classes import JobPlacement, refine_classes
from zsim.fabric.messages import Side, pair_name
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.plan.recorded.rank import RecordedRank, fix_collective_seconds
from zsim.specs.topology.topology import Topology
from zsim.trace.trace import SpanInfo, SpanInfos, Trace

_KINDS: Mapping[str, CollectiveKind] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip


@dataclass(frozen=True)
class ReplayHardware:
    """The hardware that a step is replayed on."""

    topology: Topology
    groups: Mapping[str, Group]
    is_folded: bool
    """Whether the replayed rank is the representative of all ranks."""
    slowdown: float
    """Factor by which kernels are slower while a collective runs."""
    communicator_indices: Mapping[str, Ints] | None = None
    """See `Fabric`. Given where the replayed ranks represent others."""

    def is_uneven(self, step: Trace) -> bool:
        """Whether one rank represents ranks at unequal positions in the network, whose collectives in `step`
        load their links unequally.
        """
        if not self.is_folded:
            return False
        collectives = [collective_of(info) for info in dict.fromkeys(step.infos) if info.kind in _KINDS]
        kinds = np.zeros(self.topology.world_size, dtype=np.int64)
        placement = JobPlacement(self.topology, self.groups, collectives, kinds)
        return len(refine_classes([placement])[0].sizes) > 1


def run_replay(
    step: Trace, ranks: Mapping[int, RecordedRank], hardware: ReplayHardware | None, num_steps: int = 1
) -> tuple[dict[int, float], Trace]:
    """Seconds of each rank's step, and the step as a trace. Of the `num_steps` steps in the programs the last
    counts.

    Without `hardware` nothing changes, and every span has its recorded time.
    """
    if hardware is None:
        ranks = {number: fix_collective_seconds(rank) for number, rank in ranks.items()}
    begins = [time for rank in ranks.values() for time in (rank.host_begin, *rank.stream_begins.values())]
    zero = -min([0.0, *begins])  # seconds from the clock's start to the first rank's step
    programs = [_price_recorded(rank, zero, hardware) for rank in ranks.values()]
    env, fabric = simpy.Environment(), None
    if hardware is not None:
        collectives = [
            call
            for program in programs
            if program.recorded
            for call in program.recorded.calls
            if call is not None
        ]
        collectives += [
            side.work for program in programs for sides in program.sides.values() for side in sides
        ]
        fabric_options = (
            {"is_folded": hardware.is_folded}
            if hardware.communicator_indices is None
            else {"communicator_indices": hardware.communicator_indices}
        )
        fabric = Fabric(env, hardware.topology, hardware.groups, collectives=collectives, **fabric_options)
    # The representative of all ranks is put at rank 0's place: the fabric may have no place of its number.
    rank_numbers = [0] if hardware is not None and hardware.is_folded else list(ranks)
    seconds = [program.kernel_seconds for program in programs]
    slowdown = 1.0 if hardware is None else hardware.slowdown
    executor = Executor(
        env, programs, fabric, rank_numbers, seconds, [slowdown] * len(programs), offload=None
    )
    executor.run()
    replays = [
        _RankReplay(rank, simulated_rank, zero, num_steps)
        for rank, simulated_rank in zip(ranks.values(), executor.ranks, strict=True)
    ]
    if num_steps > 1:  # as a simulated step: from the last rank's start on
        begin = max(replay.begin for replay in replays)
        return {replay.rank: replay.end - begin for replay in replays}, _trace(step, replays)
    return {replay.rank: replay.step_seconds for replay in replays}, _trace(step, replays)


def _price_recorded(rank: RecordedRank, zero: float, hardware: ReplayHardware | None) -> PricedProgram:
    """The rank's program, on a clock that starts `zero` seconds before the step."""
    ops, recorded_work = rank.program.ops, rank.payloads
    pending, successors = [0] * len(ops), [list[int]() for _ in ops]
    ready = [-math.inf] * len(ops)
    calls: list[Collective | None] = [None] * len(ops)
    index_of_group = {} if hardware is None else {name: number for number, name in enumerate(hardware.groups)}
    call_numbers, counts = [-1] * len(ops), dict.fromkeys(index_of_group, 0)
    sides, message_counts = dict[int, tuple[Side, ...]](), Counter[tuple[str, bool]]()
    last: dict[str, int] = {}
    for number, (op, work) in enumerate(zip(ops, recorded_work, strict=True)):
        if work.is_on_host:
            continue
        predecessors = set(op.after)
        if op.stream in last:
            predecessors.add(last[op.stream])
        else:
            ready[number] = rank.stream_begins.get(op.stream, 0.0) + zero
        last[op.stream] = number
        for predecessor in predecessors:
            successors[predecessor].append(number)
        pending[number] = len(predecessors)
        if work.meets and hardware is not None and work.info is not None and work.info.messages:
            span_messages = messages_of(work.info)
            sides[number] = tuple(
                _next_side(message, is_sent, message_counts) for is_sent, message in span_messages
            )
        elif work.meets and hardware is not None:
            assert work.info is not None
            call = calls[number] = collective_of(work.info)
            call_numbers[number] = counts[call.group] * len(index_of_group) + index_of_group[call.group]
            counts[call.group] += 1
    times = RecordedTimes(recorded_work, ready, calls, rank.host_begin + zero, hardware is not None)
    no_seconds: list[float | None] = [None] * len(ops)
    return PricedProgram(
        program=rank.program,
        pending=pending,
        successors=[tuple(successor_ops) for successor_ops in successors],
        host_seconds=[],
        kernel_seconds=no_seconds,
        concentration=[],
        host_waits=[],
        call_numbers=call_numbers,
        sides=sides,
        recorded=times,
    )


def collective_of(info: SpanInfo) -> Collective:
    """The collective that a span of its kind runs."""
    return Collective(_KINDS[info.kind], info.bytes, info.dtype, info.group)


def shift_of(direction: str, distance: int, group_size: int) -> int:
    """The distance in the group from a message's sender to its receiver. `distance` is the one to the other
    side.
    """
    return (distance if direction == "send" else -distance) % group_size


def messages_of(info: SpanInfo) -> list[tuple[bool, Collective]]:
    """The messages of a span as collectives of pairs, each with whether it is sent."""
    messages = []
    for direction, count, distance in info.messages:
        pair = pair_name(info.group, shift_of(direction, distance, info.group_size))
        messages.append((direction == "send", Collective("send", count, info.dtype, pair)))
    return messages


def _next_side(message: Collective, is_sent: bool, counts: Counter[tuple[str, bool]]) -> Side:
    """The next message of its pair. `counts` holds the numbers of those before it."""
    counts[message.group, is_sent] += 1
    return Side(message, is_sent, counts[message.group, is_sent] - 1)


class _RankReplay:
    """A replayed rank: its simulated rank from the start of the step that counts, the last of `num_steps`."""

    def __init__(
        self, rank: RecordedRank, simulated_rank: SimulatedRank, zero: float, num_steps: int
    ) -> None:
        self.rank, self.simulated_rank, self.recorded_work = rank.rank, simulated_rank, rank.payloads
        self.recorded_ahead = rank.host_ahead
        self.first = len(self.recorded_work) * (num_steps - 1) // num_steps
        self.begin = max(self._span_ends(0, self.first)) if self.first else rank.begin + zero

    def _span_ends(self, first: int, end: int) -> list[float]:
        return [
            self.simulated_rank.ended[op]
            for op in range(first, end)
            if self.recorded_work[op].info is not None
        ]

    @property
    def end(self) -> float:
        """The end of the step that counts. A step that follows another one ends with its last op, without the
        host's time after it.
        """
        last = max(self._span_ends(self.first, len(self.recorded_work)), default=0.0)
        return last if self.first else max(last, self.simulated_rank.host_time)

    @property
    def step_seconds(self) -> float:
        """Seconds of the step that counts, from the rank's start on."""
        return self.end - self.begin

    @property
    def host_ahead(self) -> float:
        """Seconds that its host had worked on the step before it began."""
        if not self.first:
            return self.recorded_ahead
        since = self.simulated_rank.issue[self.first - 1]
        return worked_seconds(self.simulated_rank.recorded_stalls, since, self.begin)

    def rows(self) -> Iterator[tuple[SpanInfo, float, float, float]]:
        """(info, issue, start, end) of each span that a trace shows. In a step that follows another one, ops
        that were issued before it began count as issued when it began.
        """
        simulated_rank, earliest = self.simulated_rank, self.begin if self.first else -math.inf
        for op in range(self.first, len(self.recorded_work)):
            info = self.recorded_work[op].info
            if info is not None:
                issue = (
                    max(simulated_rank.issue[op], earliest)
                    if self.recorded_work[op].is_issue_known
                    else math.nan
                )
                yield info, issue, simulated_rank.start[op], simulated_rank.ended[op]

    def allocator_spans(self) -> Iterator[tuple[float, float]]:
        """The host's spans (start, end) in torch's allocator. Waits in them may take longer or shorter than
        recorded.
        """
        previous_issue = self.begin
        for op in range(self.first, len(self.recorded_work)):
            issue = self.simulated_rank.issue[op]
            for since, until in self.recorded_work[op].allocator_spans:
                if issue - until > previous_issue + since:
                    yield previous_issue + since, issue - until
            previous_issue = issue


def _trace(recorded_trace: Trace, replays: Sequence[_RankReplay]) -> Trace:
    """The replayed step as a trace, with the metadata of the recorded trace."""
    index_of: dict[SpanInfo, int] = {}
    rows: list[tuple[int, int, float, float, float]] = []
    stalls: list[tuple[int, float, float, SpanInfo]] = []
    zero = min(replay.begin for replay in replays)
    allocator_spans: list[tuple[int, float, float]] = []
    for replay in replays:
        rank = replay.rank
        allocator_spans += [
            (rank, max(start - zero, 0.0), end - zero)
            for start, end in replay.allocator_spans()
            if end > zero
        ]
        for work in replay.recorded_work:
            if work.info is not None:
                index_of.setdefault(work.info, len(index_of))
        rows += [(rank, index_of[info], issue, start, end) for info, issue, start, end in replay.rows()]
        stalls += [
            (rank, max(start - zero, 0.0), end - zero, info)
            for start, end, info in replay.simulated_rank.recorded_stalls
            if end > zero
        ]
    host_blocks = tuple(
        (rank, start, end, index_of.setdefault(info, len(index_of))) for rank, start, end, info in stalls
    )
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    times = table[:, 2:] - zero
    ahead = {replay.rank: replay.host_ahead for replay in replays if replay.host_ahead > 0}
    return replace(
        recorded_trace,
        source="simulated",
        infos=SpanInfos(index_of),
        ranks=table[:, 0].astype(np.int64),
        info_indices=table[:, 1].astype(np.int64),
        issue_seconds=times[:, 0],
        start_seconds=times[:, 1],
        end_seconds=times[:, 2],
        step_seconds=max(replay.step_seconds for replay in replays),
        memory=None,
        host_blocks=host_blocks,
        allocator_blocks=tuple(allocator_spans),
        begins={replay.rank: replay.begin - zero for replay in replays if replay.begin > zero},
        metadata={**recorded_trace.metadata, "host_ahead_seconds": ahead},
        steps=(),
        step_numbers=None,
        transfer_seconds=None,
        follows_wait=None,
    )
