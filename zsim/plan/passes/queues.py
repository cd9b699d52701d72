"""Hardware queues: the order in which a GPU takes what its streams launch.

CUDA deals its streams to so many connections (`CUDA_DEVICE_MAX_CONNECTIONS`), and streams that share one wait
for each other without need: CUDA's Programming Guide, appendix on environment variables, calls that a false
dependency.

# [Note: one queue, several streams]
A queue takes launches in the order in which the host issues them. A launch leaves it when its stream is free
and its events have happened; until then all behind it wait, whatever their streams. One that has left makes
room at once, so a collective that is launched before a product runs beneath it, and a product that is
launched behind a collective which still waits is held up. A wait for an event stands where the next launch of
its stream does. Streams are taken to be dealt in turn, in the order of their first launch, which NVIDIA does
not say. Copies go to the copy engines, which have as many connections of their own, apart by direction; work
of the host's processors and drives passes through none.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.plan.ops import Collective, Copy, Kernels, Op, PointToPoint


def behind(ops: Sequence[Op], connections: int) -> list[int] | None:
    """By op, the one whose launch stands right behind its own in the same queue, or -1; None where every
    stream has a queue to itself. See [Note: one queue, several streams]."""
    if max(_num_streams(ops)) <= connections:
        return None
    engines = [_engine(op) for op in ops]
    streams: dict[str, dict[str, int]] = {}
    for op, engine in zip(ops, engines, strict=True):
        if engine is not None:
            known = streams.setdefault(engine, {})
            known.setdefault(op.stream, len(known))
    found = [-1] * len(ops)
    last: dict[tuple[str, int], int] = {}
    for number, (op, engine) in enumerate(zip(ops, engines, strict=True)):
        if engine is None:
            continue
        queue = (engine, streams[engine][op.stream] % connections)
        if queue in last:
            found[last[queue]] = number
        last[queue] = number
    return found


def _num_streams(ops: Sequence[Op]) -> tuple[int, int, int]:
    """How many streams launch kernels and collectives, copies to the GPU, and copies from it."""
    kinds = {(type(op.work), op.stream) for op in ops}
    computing = {stream for kind, stream in kinds if kind in (Kernels, Collective, PointToPoint)}
    if not any(kind is Copy for kind, _ in kinds):
        return len(computing), 0, 0
    copying = {(op.work.direction, op.stream) for op in ops if isinstance(op.work, Copy)}
    to_gpu = sum(direction == "h2d" for direction, _ in copying)
    return len(computing), to_gpu, len(copying) - to_gpu


def _engine(op: Op) -> str | None:
    """Whose queues an op's launches pass through."""
    if isinstance(op.work, Kernels | Collective | PointToPoint):
        return "compute"
    return op.work.direction if isinstance(op.work, Copy) else None
