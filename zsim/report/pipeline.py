"""The section of a report on its pipeline: the stages, the bubbles, and the schedule as it ran.

A bubble is time in which a pipeline rank's compute stream is idle because another stage has not delivered
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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from zsim.plan.builder import COMPUTE
from zsim.plan.node_types import pipeline_rank_of
from zsim.plan.ops import Kernels, Plan, Program
from zsim.report.breakdown import Breakdown, Wait, Waits, step_breakdown
from zsim.report.critical.path import Peers, Predecessors, predecessors
from zsim.report.memory import Ledger, Peak, peak
from zsim.report.rank_map import RankTimes, StepTimes
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace

COMPUTING = frozenset({"forward", "recompute", "backward"})
DRAWN = ("F", "B", "I", "W")
_MAX_GAP = 1 / 200  # of the step, between kernels of the optimizer


class Box(NamedTuple):
    """One action of a pipeline rank from its first kernel to its last, on the trace's clock."""

    kind: str
    """F, B, I or W as in `zsim.plan.actions.Action`, "" for the optimizer. The optimizer is cut
    where it waits for other ranks, and its stage, chunk and micro-batch are -1.
    """
    stage: int
    chunk: int
    """The index of the stage among the rank's stages, 0 without virtual stages."""
    micro_batch: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def boxes(plan: Plan, trace: Trace, rank: int) -> tuple[Box, ...]:
    """The actions of `rank` in the order of its host. `trace` is the step of `plan`, with one span per op
    with work. Actions without kernels on the compute stream are left out.
    """
    program = plan.program_on(rank)
    rank_trace = trace.select_rank(rank)
    order = rank_trace.info_indices.argsort(kind="stable")
    starts, ends = rank_trace.start_seconds[order].tolist(), rank_trace.end_seconds[order].tolist()
    chunk_of = {stage: chunk for chunk, stage in enumerate(_stages(program))}
    actions = []
    for (kind, stage, micro_batch), positions in program.memoize(_kernels_of_actions):
        spans = [(starts[position], ends[position]) for position in positions]
        max_gap = math.inf if kind else _MAX_GAP * trace.step_seconds
        for start, end in _merge_spans(spans, max_gap):
            actions.append(Box(kind, stage, chunk_of.get(stage, -1), micro_batch, start, end))
    return tuple(actions)


def _merge_spans(spans: Sequence[tuple[float, float]], max_gap: float) -> list[tuple[float, float]]:
    """The `spans` from the first to the last, in order, cut where more than `max_gap` seconds are between."""
    runs: list[tuple[float, float]] = []
    for start, end in spans:
        if runs and start - runs[-1][1] <= max_gap:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The stages that `rank` computes, in the model's order."""
    return _stages(plan.program_on(rank))


def _stages(program: Program) -> tuple[int, ...]:
    return tuple(sorted({action.stage for _, action in program.actions if action.kind in DRAWN}))


def _kernels_of_actions(program: Program) -> list[tuple[tuple[str, int, int], list[int]]]:
    """By drawn action (kind, stage, micro-batch), and for the optimizer at the end, its kernels on the
    compute stream, as positions among the program's ops with work.
    """
    kernels, numbers = program.memoize(_positions_of_kernels), list(program.memoize(_position_of_op))
    begins = [*(begin for begin, _ in program.actions), len(program.ops)]
    bounds = pairwise(bisect_left(kernels, (bisect_left(numbers, begin), "")) for begin in begins)
    kernels_of_actions = [
        (
            (action.kind, action.stage, -1 if action.micro_batch is None else action.micro_batch),
            [position for position, phase in kernels[first:end] if phase in COMPUTING],
        )
        for (_, action), (first, end) in zip(program.actions, bounds, strict=True)
        if action.kind in DRAWN
    ]
    optimizer = [position for position, phase in kernels if phase == "optimizer"]
    return [*kernels_of_actions, (("", -1, -1), optimizer)]


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
        self._dependencies = [program.memoize(predecessors, connections) for program in plan.programs]
        first_info = list(
            accumulate((len(dependencies.numbers) for dependencies in self._dependencies), initial=0)
        )
        self._times = StepTimes(trace, plan, first_info)
        self._tolerance = _SAME_INSTANT * trace.step_seconds
        self._intervals: dict[int, list[Interval]] = {}
        self._last_kernel_ends: dict[int, float] = {}  # of each rank's forwards and backwards
        self._neighbours: dict[int, set[int]] = {}
        for (rank, _), peer_calls in peers.items():
            other_stage_peers = (peer for peer, _ in peer_calls if self._stage(peer) != self._stage(rank))
            self._neighbours.setdefault(rank, set()).update(other_stage_peers)

    def intervals(self, rank: int) -> list[Interval]:
        """The bubbles of `rank`, disjoint and in order, on the trace's clock."""
        if rank not in self._intervals:
            self._intervals[rank] = self._find_intervals(rank)
        return self._intervals[rank]

    def _find_intervals(self, rank: int) -> list[Interval]:
        times, dependencies = self._times.rank_times(rank), self._dependencies_of(rank)
        begin = self._trace.begins.get(rank, 0.0)
        arrivals = self._arrivals(rank)
        intervals: list[Interval] = []
        last_end = begin
        for position in self._program(rank).memoize(_positions_on_compute_stream):
            start = times.start[position]
            if start > last_end + self._tolerance:
                delivery_time = self._delivery_time(position, last_end, times, dependencies, arrivals)
                intervals.append((last_end, min(delivery_time, start)))
            if position in arrivals:  # a message on the compute stream itself
                intervals.append((start, min(arrivals[position], times.end[position])))
            last_end = max(last_end, times.end[position])
        drain_end = min(self._drain_end(rank), begin + self._trace.step_seconds)
        intervals += self._idle(rank, self._last_kernel_end(rank), drain_end)
        return _merge_intervals([(start, end) for start, end in intervals if end > start + self._tolerance])

    def split_breakdown(self, breakdown: Breakdown, rank: int) -> Breakdown:
        """The breakdown of `rank`, on the clock of the rank's step, with its bubbles."""
        begin = self._trace.begins.get(rank, 0.0)
        work_end = max(self._times.rank_times(rank).end, default=begin) - begin - self._tolerance
        bubbles = [(start - begin, end - begin) for start, end in self.intervals(rank)]
        return mark_bubbles(breakdown, bubbles, work_end)

    def _delivery_time(
        self,
        position: int,
        since: float,
        times: RankTimes,
        dependencies: Predecessors,
        arrivals: Mapping[int, float],
    ) -> float:
        """When the other side of the last message had arrived that the op at `position` waits for and that
        was not over at `since`. 0 without one.
        """
        waiting, seen = [position], {position}
        until = 0.0
        for number in range(bisect_right(times.stalls, since, key=itemgetter(0)), len(times.stalls)):
            _, start, awaited_op = times.stalls[number]
            if start >= times.issue[position]:
                break
            if awaited_op not in seen:
                seen.add(awaited_op)
                waiting.append(awaited_op)
        while waiting:
            op = waiting.pop()
            until = max(until, arrivals.get(op, 0.0) if op != position else 0.0)
            op_predecessors = dependencies.predecessors_of(op)
            previous_launch = dependencies.previous_in_queue.get(op, -1)
            while (
                previous_launch >= 0 and times.start[previous_launch] > since
            ):  # held up by launches in the same queue
                op_predecessors += dependencies.predecessors_of(previous_launch)
                previous_launch = dependencies.previous_in_queue.get(previous_launch, -1)
            for predecessor in op_predecessors:
                if predecessor not in seen and times.end[predecessor] > since:
                    seen.add(predecessor)
                    waiting.append(predecessor)
        return until

    def _arrivals(self, rank: int) -> dict[int, float]:
        """By position of a call with messages of other programs' ranks, when the last of these ranks had
        arrived.
        """
        program, arrivals = self._program(rank), dict[int, float]()
        position_of_op = {
            number: position for position, number in enumerate(self._dependencies_of(rank).numbers)
        }
        for number in program.message_ops:
            starts = [
                self._times.rank_times(peer).start[self._program(peer).memoize(_position_of_op)[op]]
                for peer, op in self._peers.get((rank, number), ())
                if self._stage(peer) != self._stage(rank)
            ]
            if starts:
                arrivals[position_of_op[number]] = max(starts)
        return arrivals

    def _drain_end(self, rank: int) -> float:
        """When the last rank of `rank`'s pipeline has done its last forward or backward."""
        members, unvisited = {rank}, [rank]
        while unvisited:
            for neighbour in sorted(self._neighbours.get(unvisited.pop(), ())):
                if neighbour not in members:
                    members.add(neighbour)
                    unvisited.append(neighbour)
        return max(self._last_kernel_end(member) for member in sorted(members))

    def _last_kernel_end(self, rank: int) -> float:
        """When `rank` has done its last kernel of a forward or backward."""
        if rank not in self._last_kernel_ends:
            times = self._times.rank_times(rank)
            kernels = self._program(rank).memoize(_positions_of_kernels)
            kernel_ends = [times.end[position] for position, phase in kernels if phase in COMPUTING]
            self._last_kernel_ends[rank] = max(kernel_ends, default=self._trace.begins.get(rank, 0.0))
        return self._last_kernel_ends[rank]

    def _idle(self, rank: int, start: float, end: float) -> Iterator[Interval]:
        """The parts of an interval in which `rank` runs no kernels."""
        times = self._times.rank_times(rank)
        for position, _ in self._program(rank).memoize(_positions_of_kernels):
            if times.start[position] >= end:
                break
            if times.start[position] > start:
                yield start, times.start[position]
            start = max(start, times.end[position])
        if end > start:
            yield start, end

    def _stage(self, rank: int) -> int:
        return pipeline_rank_of(self._plan, int(self._plan.program_of[rank]))

    def _program(self, rank: int) -> Program:
        return self._plan.program_on(rank)

    def _dependencies_of(self, rank: int) -> Predecessors:
        return self._dependencies[int(self._plan.program_of[rank])]


def mark_bubbles(
    breakdown: Breakdown, bubbles: Sequence[Interval], work_end_seconds: float = math.inf
) -> Breakdown:
    """The breakdown with the waits within `bubbles` counted as such, both on the clock of the rank's step.

    `work_end_seconds` is when the rank has done all its work. After it the rank waits for the others'
    communication at the end of the step.
    """
    waits: list[Wait] = []
    waits_of_cause: dict[tuple[str, str], list[float]] = {}
    for wait in breakdown.waits:
        for start, end, is_bubble in _cut(wait.start_seconds, wait.end_seconds, bubbles):
            cause, info = ("bubble", None) if is_bubble else (wait.cause, wait.info)
            if info is None and cause == "host_bound" and start >= work_end_seconds:
                cause = "exposed_communication"
            waits.append(wait._replace(start_seconds=start, end_seconds=end, cause=cause, info=info))
            waits_of_cause.setdefault((wait.phase, cause), []).append(end - start)
    by_phase = {
        phase: {
            name: seconds if name in _KERNELS else math.fsum(waits_of_cause.get((phase, name), ()))
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


def _merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _positions_on_compute_stream(program: Program) -> list[int]:
    ops_with_work = [op for op in program.ops if op.work is not None]
    return [position for position, op in enumerate(ops_with_work) if op.stream == COMPUTE]


def _positions_of_kernels(program: Program) -> list[tuple[int, str]]:
    """Position and phase of the kernels of the compute stream."""
    ops_with_work = [op for op in program.ops if op.work is not None]
    return [
        (position, op.phase)
        for position, op in enumerate(ops_with_work)
        if op.stream == COMPUTE and isinstance(op.work, Kernels)
    ]


def _position_of_op(program: Program) -> dict[int, int]:
    """By number of an op with work, its position among them."""
    ops_with_work = (number for number, op in enumerate(program.ops) if op.work is not None)
    return {number: position for position, number in enumerate(ops_with_work)}


_TOLERANCE = 1e-9  # of the step


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One pipeline rank, by its first simulated GPU. Times are on the clock of the trace."""

    rank: int
    first_rank: int
    """The rank of its first simulated GPU."""
    layers: int | None
    """Number of layers of all its stages. None where unknown."""
    peak: Peak
    """The peak of its GPU memory."""
    breakdown: Breakdown
    """The breakdown of its step."""
    bubbles: tuple[Interval, ...]
    """The bubbles of its compute stream."""
    boxes: tuple[Box, ...]
    """Its forwards and backwards."""
    begin_seconds: float = 0.0
    """When its step begins."""

    @property
    def busy_seconds(self) -> float:
        """Seconds in which its compute stream runs kernels."""
        return _busy(self.breakdown)

    @property
    def bubble_seconds(self) -> float:
        return self.breakdown.seconds["bubble"]

    def marks(self, num_chunks: int) -> list[tuple[str, float, float]]:
        """The forwards and backwards by name, "F3", with virtual stages "F3 of stage 5"."""
        marks = []
        for box in self.boxes:
            stage_label = f" of stage {box.stage}" if num_chunks > 1 and box.kind else ""
            name = f"{box.kind}{box.micro_batch}{stage_label}" if box.kind else "optimizer"
            marks.append((name, box.start_seconds, box.end_seconds))
        return marks

    def to_dict(self) -> dict[str, Any]:
        """The entry of `stages` in `--json`."""
        return {
            "rank": self.rank,
            "layers": self.layers,
            "peak_bytes": self.peak.total,
            "busy_seconds": self.busy_seconds,
            "bubble_seconds": self.bubble_seconds,
            "first_rank": self.first_rank,
            "bytes_at_peak": dict(self.peak.at_total),
            "breakdown_seconds": dict(self.breakdown.seconds),
        }


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """A pipeline's ranks in their order."""

    rows: tuple[PipelineRow, ...]
    micro_batches: int
    """Number of micro-batches of one pipeline in a step."""
    step_seconds: float
    shown_seconds: float | None = None
    """Seconds of the simulated step, where that has only some of the micro-batches."""

    @property
    def bubble_fraction(self) -> float:
        """Mean over the ranks of the part of the step that is a bubble."""
        return sum(row.bubble_seconds for row in self.rows) / len(self.rows) / self.step_seconds

    @property
    def slowest(self) -> PipelineRow:
        """The rank that the others wait for: that with the least bubble, the first of equal ones."""
        least = min(row.bubble_seconds for row in self.rows)
        slack = _TOLERANCE * self.step_seconds
        return next(row for row in self.rows if row.bubble_seconds <= least + slack)

    @property
    def fullest(self) -> PipelineRow:
        """The rank with the highest peak of GPU memory, the first of equal ones."""
        return max(self.rows, key=lambda row: row.peak.total)

    @property
    def num_chunks(self) -> int:
        """The highest number of stages on a rank."""
        return max((box.chunk + 1 for row in self.rows for box in row.boxes), default=1)

    @property
    def drawn_seconds(self) -> float:
        """The step that `boxes` and `bubbles` are of."""
        return self.step_seconds if self.shown_seconds is None else self.shown_seconds

    @property
    def drawn_micro_batches(self) -> int:
        """Number of micro-batches in the boxes."""
        return len({box.micro_batch for row in self.rows for box in row.boxes if box.kind == "F"})

    @property
    def bounds(self) -> tuple[float, float]:
        """When the first rank began its step and the last one ended it, on the clock of the trace."""
        begins = [row.begin_seconds for row in self.rows]
        return min(begins), max(begins) + self.drawn_seconds

    def mean_seconds(self) -> dict[str, float]:
        """The step by cause, as mean over the ranks."""
        names, count = self.rows[0].breakdown.seconds, len(self.rows)
        return {name: sum(row.breakdown.seconds[name] for row in self.rows) / count for name in names}


def pipeline_section(
    plan: Plan,
    trace: Trace,
    peers: Peers,
    *,
    layers: Sequence[int] = (),
    connections: int = DEFAULT_CONNECTIONS,
) -> PipelineSection | None:
    """The section of the simulated step of `plan`. None where the ranks form no pipeline.

    `layers` is the number of each pipeline rank, () where unknown. `peers` and `connections` are those of
    `Bubbles`.
    """
    if not is_pipeline(plan):
        return None
    ledger, bubbles = Ledger.of(trace.memory), Bubbles(plan, trace, peers, connections)
    ranks_of_stages = _ranks_of_stages(plan, trace)
    rows = []
    for number, ranks in ranks_of_stages.items():
        breakdowns = {rank: bubbles.split_breakdown(rank_breakdown(trace, rank), rank) for rank in ranks}
        rank = max(ranks, key=lambda rank: _busy(breakdowns[rank]))  # of several types of GPUs, the slowest
        breakdown = breakdowns[rank]
        rows.append(
            PipelineRow(
                number,
                rank,
                layers[number] if layers else None,
                max(
                    (peak(ledger.usage("gpu", {member: 1})) for member in ranks),
                    key=lambda gpu_peak: gpu_peak.total,
                ),
                breakdown,
                tuple(bubbles.intervals(rank)),
                boxes(plan, trace, rank),
                trace.begins.get(rank, 0.0),
            )
        )
    section = PipelineSection(tuple(rows), 0, trace.step_seconds, trace.step_seconds)
    return replace(section, micro_batches=section.drawn_micro_batches)


def _busy(breakdown: Breakdown) -> float:
    return breakdown.seconds["compute"] + breakdown.seconds["optimizer"]


def rank_breakdown(trace: Trace, rank: int) -> Breakdown:
    """The breakdown of one rank on the clock of the rank's step."""
    return step_breakdown(trace.rank_view(rank), rank)


def _ranks_of_stages(plan: Plan, trace: Trace) -> Mapping[int, list[int]]:
    """By pipeline rank, the first simulated rank of each of its programs."""
    ranks_of_stages: dict[int, list[int]] = {}
    for program, rank in first_ranks(plan, trace).items():
        ranks_of_stages.setdefault(pipeline_rank_of(plan, program), []).append(rank)
    return dict(sorted(ranks_of_stages.items()))


def first_ranks(plan: Plan, trace: Trace) -> Mapping[int, int]:
    """The first simulated rank of each program."""
    rank_of_program: dict[int, int] = {}
    for rank in dict.fromkeys(trace.ranks.tolist()):
        rank_of_program.setdefault(int(plan.program_of[rank]), rank)
    return rank_of_program
