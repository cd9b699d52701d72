"""What the executor saw, as a Trace."""

from __future__ import annotations

import numpy as np

from zsim.arrays import Floats
from zsim.engine.executor import Executor, Lane
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.ops import Collective, Copy, DriveIo, HostWork, Kernels, Op, Plan
from zsim.specs.experiment.job import Job
from zsim.trace.trace import MemoryEvents, SpanInfo, Trace


def make_trace(job: Job, plan: Plan, executor: Executor, end_seconds: float) -> Trace:
    """Spans of every simulated rank; memory of the first, which holds the largest shards.

    Where the executor ran the plan twice, the second run is the trace, and its clock starts when the first
    rank had ended the first run (see zsim.plan.passes.twice). Ranks that are not held up by a slower one
    begin earlier than that one: `Trace.begins` says when. A step lasts from the last rank's end to its next.
    """
    numbers = [number for number, op in enumerate(plan.ops) if op.work is not None]
    tracks = _copy_tracks(plan)
    infos = tuple(_info(plan.ops[number], plan, tracks) for number in numbers)
    lanes = [_Times(lane, len(plan.ops)) for lane in executor.lanes]
    step_seconds = end_seconds - max(lane.begin for lane in lanes)
    origin = lanes[0].begin
    begins = {lane.rank: lane.begin - origin for lane in lanes if lane.begin != origin}
    for lane in lanes:
        lane.start_at(origin)
    index = np.array(numbers, dtype=np.int64)
    return Trace(
        source="simulated",
        infos=infos,
        ranks=np.repeat(np.array([lane.rank for lane in lanes], dtype=np.int64), len(numbers)),
        info_indices=np.tile(np.arange(len(numbers), dtype=np.int64), len(lanes)),
        issue_seconds=np.concatenate([lane.issue[index] for lane in lanes]),
        start_seconds=np.concatenate([lane.start[index] for lane in lanes]),
        end_seconds=np.concatenate([lane.ended[index] for lane in lanes]),
        world_size=job.world_size,
        step_seconds=step_seconds,
        memory=_memory(job, plan, lanes[0], step_seconds),
        begins=begins,
        host_blocks=_host_blocks(numbers, lanes),
        allocator_blocks=tuple(
            (lane.rank, start, end) for lane in lanes for start, end in lane.allocator_blocks if end > start
        ),
        metadata={
            "model": job.model.name,
            "cluster": job.cluster.name,
            "framework": plan.framework,
            "nodes": job.num_nodes,
            "gpus_per_node": job.gpus_per_node,
            "gpu": job.cluster.gpu.name,
            "backend": job.cluster.collectives.backend,
            "groups": {name: (group.size, group.stride) for name, group in plan.groups.items()},
            "group_members": {
                name: group.members.tolist() for name, group in plan.groups.items() if group.stride is None
            },
            "gpu_memory_bytes": job.cluster.gpu.memory.capacity,
            "sm_count": job.cluster.gpu.sm_count,
        },
    )


def _copy_tracks(plan: Plan) -> dict[tuple[str, str], str]:
    """Where copies are shown: "h2d" and "d2h", with the stream's name when several streams copy that way,
    because their copies may overlap."""
    seen: dict[str, list[str]] = {}
    for op in plan.ops:
        if isinstance(op.work, Copy) and op.stream not in seen.setdefault(op.work.direction, []):
            seen[op.work.direction].append(op.stream)
    return {
        (direction, stream): direction if stream == streams[0] else f"{direction} {stream}"
        for direction, streams in seen.items()
        for stream in streams
    }


def _info(op: Op, plan: Plan, tracks: dict[tuple[str, str], str]) -> SpanInfo:
    work = op.work
    if isinstance(work, Collective):
        return SpanInfo(
            op.name, work.kind, op.stream, work.bytes, work.dtype, work.group, plan.groups[work.group].size,
            op.phase, op.module,
        )  # fmt: skip
    if isinstance(work, Copy):
        track = tracks[work.direction, op.stream]
        return SpanInfo(op.name, work.direction, track, work.bytes, phase=op.phase, module=op.module)
    if isinstance(work, HostWork):
        return SpanInfo(op.name, "cpu", op.stream, work.bytes, phase=op.phase, module=op.module)
    if isinstance(work, DriveIo):
        kind = f"nvme_{work.direction}"
        return SpanInfo(op.name, kind, op.stream, work.bytes, phase=op.phase, module=op.module)
    assert isinstance(work, Kernels)
    kinds = {kernel.kind for kernel in work.kernels}
    is_copy = kinds == {"copy"}
    kind = "copy" if is_copy else "optimizer" if op.phase == "optimizer" else "compute"
    return SpanInfo(
        op.name,
        kind,
        op.stream,
        dtype=work.kernels[0].dtype if work.kernels else "",
        phase=op.phase,
        module=op.module,
        flops=sum(kernel.flops for kernel in work.kernels),
        hbm_bytes=sum(kernel.hbm_bytes for kernel in work.kernels),
    )


class _Times:
    """A lane's times of the plan's last run, as arrays."""

    def __init__(self, lane: Lane, num_ops: int) -> None:
        self.rank = lane.rank
        self.first = len(lane.issue) - num_ops
        self.issue: Floats = np.asarray(lane.issue)[self.first :]
        self.start: Floats = np.asarray(lane.start)[self.first :]
        self.ended: Floats = np.asarray(lane.ended)[self.first :]
        self.begin = max(lane.ended[: self.first], default=lane.began)
        self.host_blocks = lane.host_blocks
        self.allocator_blocks = lane.allocator_blocks

    def start_at(self, begin: float) -> None:
        """Shift the clock to `begin`; what the host did before the rank's own begin is at that."""
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


def _host_blocks(numbers: list[int], lanes: list[_Times]) -> tuple[tuple[int, float, float, int], ...]:
    position = {number: place for place, number in enumerate(numbers)}
    return tuple(
        (lane.rank, start, end, position[op])
        for lane in lanes
        for start, end, op in lane.host_blocks
        if end > start and op in position
    )


def _memory(job: Job, plan: Plan, lane: _Times, step_seconds: float) -> MemoryEvents:
    """Memory changes of the first lane, in the order they happen; see [Note: memory follows the host]."""
    issue, num_ops = lane.issue, len(plan.ops)
    reached = _reached(plan, lane.start, step_seconds)
    resident, changes = [*plan.resident, framework_memory(job, plan)], plan.memory
    ops = np.array([change.op for change in changes], dtype=np.int64)
    # The host makes a change once the op before is issued; op 0's come first of all.
    host = np.where(ops > 0, issue[np.clip(ops, 1, num_ops) - 1], 0.0)
    stream = np.where(ops < num_ops, reached[np.clip(ops, 0, num_ops - 1)], step_seconds)
    first = len(resident)
    zeros = np.zeros(first)
    return MemoryEvents(
        ranks=np.full(first + len(changes), lane.rank, dtype=np.int64),
        host_seconds=np.concatenate([zeros, host]),
        stream_seconds=np.concatenate([zeros, stream]),
        devices=(*(m.device for m in resident), *(change.device for change in changes)),
        categories=(*(m.category for m in resident), *(change.category for change in changes)),
        deltas=np.array(
            [*(m.bytes for m in resident), *(change.bytes for change in changes)], dtype=np.int64
        ),
        names=(*("start" for _ in resident), *(plan.ops[min(c.op, num_ops - 1)].name for c in changes)),
    )


def _reached(plan: Plan, start: Floats, step_seconds: float) -> Floats:
    """Per op, when the compute stream begins the next kernel that the host issues from there on."""
    is_compute = np.array([op.stream == "compute" and op.work is not None for op in plan.ops])
    times = np.where(is_compute, start, np.inf)
    reached = np.minimum.accumulate(times[::-1])[::-1]
    return np.where(np.isinf(reached), step_seconds, reached)
