"""The trace of an executor's run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass
from zsim.engine.executor import Executor
from zsim.engine.lane import Lane, worked_seconds
from zsim.plan.columns import are_compute, memory_columns, op_columns
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
from zsim.trace.trace import Labels, MemoryEvents, SpanInfo, SpanInfos, Trace, joined


def make_trace(job: Job, plan: Plan, executor: Executor, end_seconds: float) -> Trace:
    """The trace of a run: spans of every simulated rank, and memory of each program's first rank, which has
    the largest shards.

    Where the executor ran the plan twice, the second run is the trace. Its clock starts when the first rank
    had ended the first run (see zsim.plan.passes.twice). `Trace.begins` holds the starts of the other ranks,
    which differ with skew. The step lasts from the last rank's start to the end of the run. Ops that the host
    issued before a rank's start count as issued then. `metadata["host_ahead_seconds"]` is how long each
    rank's host had worked on the step by then.
    """
    infos, shown = plan.once(_shown)
    lanes = [_Times(lane, plan, shown) for lane in executor.lanes]
    length = end_seconds - max(lane.begin for lane in lanes)
    origin = lanes[0].begin
    begins = {lane.rank: lane.begin - origin for lane in lanes if lane.begin != origin}
    for lane in lanes:
        lane.start_at(origin)
    return Trace(
        source="simulated",
        infos=infos,
        ranks=np.repeat(np.array([lane.rank for lane in lanes]), [len(lane.shown.ops) for lane in lanes]),
        info_indices=np.concatenate([lane.shown.infos for lane in lanes]),
        issue_seconds=np.concatenate([lane.issue[lane.shown.ops] for lane in lanes]),
        start_seconds=np.concatenate([lane.start[lane.shown.ops] for lane in lanes]),
        end_seconds=np.concatenate([lane.ended[lane.shown.ops] for lane in lanes]),
        world_size=job.world_size,
        step_seconds=length,
        memory=_memory(job, plan, lanes, length),
        begins=begins,
        host_blocks=_host_blocks(lanes),
        allocator_blocks=tuple(
            (lane.rank, start, end) for lane in lanes for start, end in lane.allocator_blocks if end > start
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
            **_roles(plan, lanes),
            "host_ahead_seconds": {lane.rank: lane.host_ahead for lane in lanes if lane.host_ahead > 0},
            "gpu_memory_bytes": min(gpu.memory.capacity for gpu in job.cluster.gpus),
            "sm_count": job.cluster.gpu.sm_count,
        },
    )


def _roles(plan: Plan, lanes: Sequence[_Times]) -> dict[str, dict[int, str]]:
    """The name of each simulated rank's program, where programs have names."""
    names = {lane.rank: plan.programs[lane.number].name for lane in lanes}
    return {"roles": names} if any(names.values()) else {}


def step_seconds(plan: Plan, executor: Executor, end_seconds: float) -> float:
    """Seconds from the last rank's start of the step to its end, without making a trace."""
    lengths = [len(program.ops) for program in plan.programs]
    return end_seconds - max(_begin(lane, lengths[plan.program_of[lane.rank]]) for lane in executor.lanes)


def _begin(lane: Lane, num_ops: int) -> float:
    """The start of the plan's last run, of `num_ops` ops, on a rank: the end of the previous run."""
    before = len(lane.ended) - num_ops
    return float(np.asarray(lane.ended)[:before].max()) if before else lane.began


@dataclass(frozen=True, eq=False)
class _Shown:
    """The ops of a program that a trace shows, and their infos."""

    program: Program
    ops: Ints
    infos: Ints

    @cached_property
    def info_of(self) -> dict[int, int]:
        """The info of each op."""
        return dict(zip(self.ops.tolist(), self.infos.tolist(), strict=True))

    @staticmethod
    def of(program: Program, plan: Plan, infos: list[SpanInfo]) -> _Shown:
        """The ops of `program` that a trace shows. Their infos are appended to `infos`."""
        numbers = [number for number, work in enumerate(program.once(op_columns).work) if work is not None]
        first = len(infos)
        infos += _infos(program, plan)
        return _Shown(program, np.array(numbers, dtype=np.int64), np.arange(first, len(infos)))


def _shown(plan: Plan) -> tuple[SpanInfos, list[_Shown]]:
    infos: list[SpanInfo] = []
    shown = [_Shown.of(program, plan, infos) for program in plan.programs]
    return SpanInfos(infos), shown


def _copy_tracks(program: Program) -> dict[tuple[str, str], str]:
    """The track of copies by (direction, stream): "h2d" or "d2h", and with the stream's name for all but the
    first stream of a direction, because their copies may overlap."""
    seen: dict[str, list[str]] = {}
    for op in program.ops if program.offload_works else ():
        if isinstance(op.work, Copy) and op.stream not in seen.setdefault(op.work.direction, []):
            seen[op.work.direction].append(op.stream)
    return {
        (direction, stream): direction if stream == streams[0] else f"{direction} {stream}"
        for direction, streams in seen.items()
        for stream in streams
    }


class _Columns(NamedTuple):
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
    def of(work: Work, plan: Plan) -> _Columns:
        if isinstance(work, Kernels):
            kernels = work.kernels
            return _Columns(
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
            return _Columns(work.kind, work.bytes, work.dtype, work.group, size, messages=messages)
        if isinstance(work, Copy):
            return _Columns(work.direction, work.bytes)
        if isinstance(work, HostWork):
            return _Columns("cpu", work.bytes)
        assert isinstance(work, DriveIo), f"{work} is not shown"
        return _Columns(f"nvme_{work.direction}", work.bytes)


def _infos(program: Program, plan: Plan) -> Iterator[SpanInfo]:
    """The columns of the spans of a program's ops with work."""
    of_work = {number: _Columns.of(work, plan) for number, work in program.distinct_works.items()}
    columns = program.once(op_columns)
    has_work = [work is not None for work in columns.work]
    works = list(filter(None, columns.work))
    names, modules = compress(columns.name, has_work), compress(columns.module, has_work)
    streams, phases = list(compress(columns.stream, has_work)), list(compress(columns.phase, has_work))
    of_ops = [of_work[id(work)] for work in works]
    of_works, *others = zip(*of_ops, strict=True) if of_ops else [()] * 8
    counts, dtypes, groups, sizes, flops, hbm_bytes, messages = others
    kinds = [
        kind or ("optimizer" if phase == "optimizer" else "compute")
        for kind, phase in zip(of_works, phases, strict=True)
    ]
    if tracks := _copy_tracks(program):
        streams = [
            tracks[work.direction, stream] if isinstance(work, Copy) else stream
            for work, stream in zip(works, streams, strict=True)
        ]
    rows = zip(
        names, kinds, streams, counts, dtypes, groups, sizes, phases, modules, flops, hbm_bytes, messages,
        strict=True,
    )  # fmt: skip
    # without the call of the named tuple's own __new__, which takes as long again
    return map(partial(tuple.__new__, SpanInfo), rows)


class _Times:
    """A rank's times of the plan's last run, as arrays."""

    def __init__(self, lane: Lane, plan: Plan, shown: Sequence[_Shown]) -> None:
        self.rank = lane.rank
        self.number = int(plan.program_of[lane.rank])
        self.shown = shown[self.number]
        self.first = len(lane.issue) - len(self.shown.program.ops)
        self.issue: Floats = np.asarray(lane.issue)[self.first :]
        self.start: Floats = np.asarray(lane.start)[self.first :]
        self.ended: Floats = np.asarray(lane.ended)[self.first :]
        self.begin = _begin(lane, len(self.shown.program.ops))
        since = lane.issue[self.first - 1] if self.first else lane.began
        self.host_ahead = worked_seconds(lane.host_blocks, since, self.begin)
        self.host_blocks = lane.host_blocks
        self.allocator_blocks = lane.allocator_blocks

    def start_at(self, begin: float) -> None:
        """Shift the clock to `begin`. Times before the rank's start of the step are set to its start."""
        if begin > 0:
            first = self.begin - begin
            self.issue = np.maximum(self.issue - begin, first)
            self.start = np.maximum(self.start - begin, first)
            self.ended = self.ended - begin
            self.host_blocks = [
                (max(start - begin, first), end - begin, op - self.first)
                for start, end, op in self.host_blocks
                if end > self.begin
            ]
            self.allocator_blocks = [
                (max(start - begin, first), end - begin)
                for start, end in self.allocator_blocks
                if end > self.begin
            ]


def _host_blocks(lanes: list[_Times]) -> tuple[tuple[int, float, float, int], ...]:
    return tuple(
        (lane.rank, start, end, lane.shown.info_of[op])
        for lane in lanes
        for start, end, op in lane.host_blocks
        if end > start and op in lane.shown.info_of
    )


def _memory(job: Job, plan: Plan, lanes: Sequence[_Times], step_seconds: float) -> MemoryEvents:
    """Memory changes of the first simulated rank of each program, in the order in which they happen."""
    first = {lane.number: lane for lane in reversed(lanes)}
    parts = [_memory_of(job, plan, first[number], step_seconds) for number in sorted(first)]
    return parts[0] if len(parts) == 1 else joined(parts)


def _memory_of(job: Job, plan: Plan, lane: _Times, step_seconds: float) -> MemoryEvents:
    """Memory changes of a rank. See [Note: memory follows the host]."""
    program = lane.shown.program
    issue, num_ops = lane.issue, len(program.ops)
    reached = _reached(program, lane.start, step_seconds)
    resident = [*program.resident, framework_memory(job, plan, lane.number)]
    first = len(resident)
    changes = program.once(_changes, tuple((memory.device, memory.category) for memory in resident))
    ops = changes.ops
    # The host makes a change once the op before is issued; op 0's come first of all.
    host = np.where(ops > 0, issue[np.clip(ops, 1, num_ops) - 1], 0.0)
    stream = np.where(ops < num_ops, reached[np.clip(ops, 0, num_ops - 1)], step_seconds)
    zeros = np.zeros(first)
    return MemoryEvents(
        ranks=np.full(first + len(ops), lane.rank, dtype=np.int64),
        host_seconds=np.concatenate([zeros, host]),
        stream_seconds=np.concatenate([zeros, stream]),
        devices=changes.devices,
        categories=changes.categories,
        deltas=np.concatenate([np.array([m.bytes for m in resident], dtype=np.int64), changes.deltas]),
        names=changes.names,
    )


class _Changes(NamedTuple):
    """A program's memory changes, column by column.

    The words of `devices`, `categories` and `names` (of the ops that the changes precede) begin with those of
    resident memory.
    """

    ops: Ints
    deltas: Ints
    devices: Labels
    categories: Labels
    names: tuple[str, ...]


def _changes(program: Program, resident: tuple[tuple[Device, Category], ...]) -> _Changes:
    """The program's memory changes after `resident` memory, to be cached with the program."""
    columns = program.once(memory_columns)
    names = [*program.once(op_columns).name]
    names.append(names[-1] if names else "")  # of changes after the last op
    return _Changes(
        np.fromiter(columns.op, np.int64, len(columns.op)),
        np.fromiter(columns.bytes, np.int64, len(columns.op)),
        Labels([*(device for device, _ in resident), *columns.device]),
        Labels([*(category for _, category in resident), *columns.category]),
        (*["start"] * len(resident), *[names[op] for op in columns.op]),
    )


def _reached(program: Program, start: Floats, step_seconds: float) -> Floats:
    """Per op, the start of the next kernel on the compute stream that the host issues from this op on."""
    is_compute = program.once(are_compute)
    times = np.where(is_compute, start, np.inf)
    reached = np.minimum.accumulate(times[::-1])[::-1]
    return np.where(np.isinf(reached), step_seconds, reached)
