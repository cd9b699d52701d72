"""The trace of an executor's run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.engine.executor import Executor
from zsim.engine.simulated_rank import SimulatedRank, worked_seconds
from zsim.plan.columns import are_compute, memory_columns, op_columns, original_ops, unroll
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.ops import (
    Category,
    Collective,
    Copy,
    Device,
    DriveIo,
    HostWork,
    Kernels,
    Message,
    Plan,
    PointToPoint,
    Program,
    Work,
)
from zsim.specs.experiment.job import Job
from zsim.trace.trace import Labels, MemoryEvents, SpanInfo, SpanInfos, Trace, concatenate_memory


def make_trace(job: Job, plan: Plan, executor: Executor, end_seconds: float) -> Trace:
    """The trace of a run: spans of every simulated rank, and memory of each program's first rank, which has
    the largest shards.

    Where the executor ran the plan twice, the second run is the trace. Its clock starts when the first rank
    had ended the first run (see zsim.plan.passes.repeated_step). `Trace.begins` holds the starts of the other
    ranks, which differ with skew. The step lasts from the last rank's start to the end of the run. Ops that
    the host issued before a rank's start count as issued then. `metadata["host_ahead_seconds"]` is how long
    each rank's host had worked on the step by then.
    """
    infos, traced = plan.memoize(_traced_ops)
    rank_times = [_RankTimes(rank, plan, traced) for rank in executor.ranks]
    length = end_seconds - max(times.begin for times in rank_times)
    origin = rank_times[0].begin
    begins = {times.rank: times.begin - origin for times in rank_times if times.begin != origin}
    for times in rank_times:
        times.shift_clock(origin)
    return Trace(
        source="simulated",
        infos=infos,
        ranks=np.repeat(
            np.array([times.rank for times in rank_times]), [len(times.traced.ops) for times in rank_times]
        ),
        info_indices=np.concatenate([times.traced.infos for times in rank_times]),
        issue_seconds=np.concatenate([times.issue[times.traced.ops] for times in rank_times]),
        start_seconds=np.concatenate([times.start[times.traced.ops] for times in rank_times]),
        end_seconds=np.concatenate([times.ended[times.traced.ops] for times in rank_times]),
        world_size=job.world_size,
        step_seconds=length,
        memory=_memory(job, plan, rank_times, length),
        begins=begins,
        host_blocks=_host_stalls(rank_times),
        allocator_blocks=tuple(
            (times.rank, start, end)
            for times in rank_times
            for start, end in times.allocator_stalls
            if end > start
        ),
        metadata={
            "model": job.model.name,
            "cluster": job.cluster.name,
            "framework": plan.framework,
            "nodes": job.num_nodes,
            "gpus_per_node": job.gpus_per_node,
            "gpu": job.cluster.gpu_label,
            "backend": job.cluster.collectives.backend,
            "groups": {name: (group.size, group.stride) for name, group in plan.groups.items()},
            "group_members": {
                name: group.members.tolist() for name, group in plan.groups.items() if group.stride is None
            },
            **_roles(plan, rank_times),
            "host_ahead_seconds": {
                times.rank: times.host_ahead for times in rank_times if times.host_ahead > 0
            },
            "gpu_memory_bytes": min(gpu.memory.capacity for gpu in job.cluster.gpus),
            "sm_count": job.cluster.gpu.sm_count,
        },
    )


def _roles(plan: Plan, rank_times: Sequence[_RankTimes]) -> dict[str, dict[int, str]]:
    """The name of each simulated rank's program, where programs have names."""
    names = {times.rank: plan.programs[times.program_index].name for times in rank_times}
    return {"roles": names} if any(names.values()) else {}


def step_seconds(plan: Plan, executor: Executor, end_seconds: float) -> float:
    """Seconds from the last rank's start of the step to its end, without making a trace."""
    lengths = [len(program.ops) for program in plan.programs]
    return end_seconds - max(
        begin_seconds(rank, lengths[plan.program_of[rank.number]]) for rank in executor.ranks
    )


def begin_seconds(rank: SimulatedRank, num_ops: int) -> float:
    """The start of the plan's last run, of `num_ops` ops, on a rank: the end of the previous run."""
    num_previous = len(rank.ended) - num_ops
    return float(np.asarray(rank.ended)[:num_previous].max()) if num_previous else rank.began


@dataclass(frozen=True, eq=False)
class _TracedOps:
    """The ops of a program that a trace shows, and their infos."""

    program: Program
    ops: Ints
    infos: Ints

    @cached_property
    def info_of(self) -> dict[int, int]:
        """The info of each op."""
        return dict(zip(self.ops.tolist(), self.infos.tolist(), strict=True))

    @staticmethod
    def of(program: Program, plan: Plan, infos: list[SpanInfo]) -> _TracedOps:
        """The ops of `program` that a trace shows. Their infos are appended to `infos`."""
        columns, originals = program.memoize(op_columns), program.memoize(original_ops)
        original_infos = list(_span_infos(program, plan))
        counter = count()
        index_of_op = unroll(
            program, [-1 if columns.work[number] is None else next(counter) for number in originals]
        )
        numbers = np.flatnonzero(index_of_op >= 0)
        first = len(infos)
        infos += map(original_infos.__getitem__, index_of_op[numbers].tolist())
        return _TracedOps(program, numbers, np.arange(first, len(infos)))


def _traced_ops(plan: Plan) -> tuple[SpanInfos, list[_TracedOps]]:
    infos: list[SpanInfo] = []
    traced = [_TracedOps.of(program, plan, infos) for program in plan.programs]
    return SpanInfos(infos), traced


def _copy_tracks(program: Program) -> dict[tuple[str, str], str]:
    """The track of copies by (direction, stream): "h2d" or "d2h", and with the stream's name for all but the
    first stream of a direction, because their copies may overlap."""
    seen: dict[str, list[str]] = {}
    for op in program.ops if program.offload_work else ():
        if isinstance(op.work, Copy) and op.stream not in seen.setdefault(op.work.direction, []):
            seen[op.work.direction].append(op.stream)
    return {
        (direction, stream): direction if stream == streams[0] else f"{direction} {stream}"
        for direction, streams in seen.items()
        for stream in streams
    }


class _SpanColumns(NamedTuple):
    """The columns of a span that follow from its work alone."""

    kind: str
    """It is "" for kernels that are more than copies: their phase decides it."""
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    group_size: int = 1
    flops: float = 0.0
    hbm_bytes: float = 0.0
    messages: tuple[Message, ...] = ()

    @staticmethod
    def of(work: Work, plan: Plan) -> _SpanColumns:
        if isinstance(work, Kernels):
            kernels = work.kernels
            return _SpanColumns(
                "copy" if {kernel.kind for kernel in kernels} == {"copy"} else "",
                dtype=kernels[0].dtype if kernels else "",
                flops=sum(kernel.flops for kernel in kernels),
                hbm_bytes=sum(kernel.hbm_bytes for kernel in kernels),
            )
        if isinstance(work, Collective | PointToPoint):
            size = plan.groups[work.group].size
            messages: tuple[Message, ...] = ()
            if isinstance(work, PointToPoint) and not work.by_copy_engine:  # kernels do not slow those
                messages = work.messages
            return _SpanColumns(work.kind, work.bytes, work.dtype, work.group, size, messages=messages)
        if isinstance(work, Copy):
            return _SpanColumns(work.direction, work.bytes)
        if isinstance(work, HostWork):
            return _SpanColumns("cpu", work.bytes)
        assert isinstance(work, DriveIo), f"{work} is not shown"
        return _SpanColumns(f"nvme_{work.direction}", work.bytes)


def _span_infos(program: Program, plan: Plan) -> Iterator[SpanInfo]:
    """The columns of the spans of a program's ops with work that repeat none."""
    columns_of_work = {number: _SpanColumns.of(work, plan) for number, work in program.unique_work.items()}
    columns, originals = program.memoize(op_columns), program.memoize(original_ops)
    numbers = [number for number in originals if columns.work[number] is not None]
    names, modules, streams, phases = (
        [column[number] for number in numbers]
        for column in (columns.name, columns.module, columns.stream, columns.phase)
    )
    payloads = list(filter(None, [columns.work[number] for number in numbers]))
    columns_of_ops = [columns_of_work[id(work)] for work in payloads]
    work_kinds, *other_columns = zip(*columns_of_ops, strict=True) if columns_of_ops else [()] * 8
    counts, dtypes, groups, sizes, flops, hbm_bytes, messages = other_columns
    kinds = [
        kind or ("optimizer" if phase == "optimizer" else "compute")
        for kind, phase in zip(work_kinds, phases, strict=True)
    ]
    if tracks := _copy_tracks(program):
        streams = [
            tracks[work.direction, stream] if isinstance(work, Copy) else stream
            for work, stream in zip(payloads, streams, strict=True)
        ]
    rows = zip(
        names, kinds, streams, counts, dtypes, groups, sizes, phases, modules, flops, hbm_bytes, messages,
        strict=True,
    )  # fmt: skip
    # without the call of the named tuple's own __new__, which takes as long again
    return map(partial(tuple.__new__, SpanInfo), rows)


class _RankTimes:
    """A rank's times of the plan's last run, as arrays."""

    def __init__(self, rank: SimulatedRank, plan: Plan, traced_programs: Sequence[_TracedOps]) -> None:
        self.rank = rank.number
        self.program_index = int(plan.program_of[rank.number])
        self.traced = traced_programs[self.program_index]
        self.first = len(rank.issue) - len(self.traced.program.ops)
        self.issue: Floats = np.asarray(rank.issue)[self.first :]
        self.start: Floats = np.asarray(rank.start)[self.first :]
        self.ended: Floats = np.asarray(rank.ended)[self.first :]
        self.begin = begin_seconds(rank, len(self.traced.program.ops))
        since = rank.issue[self.first - 1] if self.first else rank.began
        self.host_ahead = worked_seconds(rank.host_stalls, since, self.begin)
        self.host_stalls = rank.host_stalls
        self.allocator_stalls = rank.allocator_stalls

    def shift_clock(self, begin: float) -> None:
        """Shift the clock to `begin`. Times before the rank's start of the step are set to its start."""
        if begin > 0:
            first = self.begin - begin
            self.issue = np.maximum(self.issue - begin, first)
            self.start = np.maximum(self.start - begin, first)
            self.ended = self.ended - begin
            self.host_stalls = [
                (max(start - begin, first), end - begin, op - self.first)
                for start, end, op in self.host_stalls
                if end > self.begin
            ]
            self.allocator_stalls = [
                (max(start - begin, first), end - begin)
                for start, end in self.allocator_stalls
                if end > self.begin
            ]


def _host_stalls(rank_times: list[_RankTimes]) -> tuple[tuple[int, float, float, int], ...]:
    return tuple(
        (times.rank, start, end, times.traced.info_of[op])
        for times in rank_times
        for start, end, op in times.host_stalls
        if end > start and op in times.traced.info_of
    )


def _memory(job: Job, plan: Plan, rank_times: Sequence[_RankTimes], step_seconds: float) -> MemoryEvents:
    """Memory changes of the first simulated rank of each program, in the order in which they happen."""
    first = {times.program_index: times for times in reversed(rank_times)}
    events = [_memory_of(job, plan, first[number], step_seconds) for number in sorted(first)]
    return events[0] if len(events) == 1 else concatenate_memory(events)


def _memory_of(job: Job, plan: Plan, times: _RankTimes, step_seconds: float) -> MemoryEvents:
    """Memory changes of a rank. See [Note: memory follows the host]."""
    program = times.traced.program
    issue, num_ops = times.issue, len(program.ops)
    reached = _reach_times(program, times.start, step_seconds)
    resident = [*program.resident, framework_memory(job, plan, times.program_index)]
    first = len(resident)
    changes = program.memoize(_memory_changes, tuple((memory.device, memory.category) for memory in resident))
    ops = changes.ops
    # The host makes a change once the op before is issued; op 0's come first of all.
    host = np.where(ops > 0, issue[np.clip(ops, 1, num_ops) - 1], 0.0)
    stream = np.where(ops < num_ops, reached[np.clip(ops, 0, num_ops - 1)], step_seconds)
    zeros = np.zeros(first)
    return MemoryEvents(
        ranks=np.full(first + len(ops), times.rank, dtype=np.int64),
        host_seconds=np.concatenate([zeros, host]),
        stream_seconds=np.concatenate([zeros, stream]),
        devices=changes.devices,
        categories=changes.categories,
        deltas=np.concatenate([np.array([m.bytes for m in resident], dtype=np.int64), changes.deltas]),
        names=changes.names,
    )


class _MemoryChanges(NamedTuple):
    """A program's memory changes, column by column.

    The words of `devices`, `categories` and `names` (of the ops that the changes precede) begin with those of
    resident memory.
    """

    ops: Ints
    deltas: Ints
    devices: Labels
    categories: Labels
    names: tuple[str, ...]


def _memory_changes(program: Program, resident: tuple[tuple[Device, Category], ...]) -> _MemoryChanges:
    """The program's memory changes after `resident` memory, to be cached with the program."""
    columns = program.memoize(memory_columns)
    names = [*program.memoize(op_columns).name]
    names.append(names[-1] if names else "")  # of changes after the last op
    return _MemoryChanges(
        np.fromiter(columns.op, np.int64, len(columns.op)),
        np.fromiter(columns.bytes, np.int64, len(columns.op)),
        Labels([*(device for device, _ in resident), *columns.device]),
        Labels([*(category for _, category in resident), *columns.category]),
        (*["start"] * len(resident), *[names[op] for op in columns.op]),
    )


def _reach_times(program: Program, start: Floats, step_seconds: float) -> Floats:
    """Per op, the start of the next kernel on the compute stream that the host issues from this op on."""
    is_compute = program.memoize(are_compute)
    times = np.where(is_compute, start, np.inf)
    reached = np.minimum.accumulate(times[::-1])[::-1]
    return np.where(np.isinf(reached), step_seconds, reached)
