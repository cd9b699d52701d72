"""Hardware queues: the order in which a GPU takes the launches of its streams.

CUDA maps its streams to `CUDA_DEVICE_MAX_CONNECTIONS` hardware queues. Streams that share a queue wait for
each other without need, which CUDA's Programming Guide, appendix on environment variables, calls a false
dependency.

# [Note: one queue, several streams]
A queue takes launches in the order in which the host issues them. A launch leaves the queue when its stream
is free and its events have happened. Until then all launches behind it wait, whatever their streams. Once it
has left, the next launch can start at once: a collective launched before a matrix product overlaps with it,
and a product launched behind a collective that still waits is held up. A wait for an event is in the queue at
the place of the next launch of its stream. zsim assumes that streams are mapped to queues round-robin, in the
order of their first launch. NVIDIA does not document it. Copies use the copy engines, which have as many
queues per direction. CPU work and drive I/O use no queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.plan.ops import Collective, Copy, Kernels, Op, PointToPoint, Program


def next_in_queue(ops: Sequence[Op], connections: int) -> list[int] | None:
    """Per op, the op whose launch is next in the same queue, or -1. None if every stream has its own queue.
    See [Note: one queue, several streams].
    """
    if max(_num_streams(ops)) <= connections:
        return None
    engines = [_engine(op) for op in ops]
    streams: dict[str, dict[str, int]] = {}
    for op, engine in zip(ops, engines, strict=True):
        if engine is not None:
            stream_numbers = streams.setdefault(engine, {})
            stream_numbers.setdefault(op.stream, len(stream_numbers))
    next_ops = [-1] * len(ops)
    last_ops: dict[tuple[str, int], int] = {}
    for number, (op, engine) in enumerate(zip(ops, engines, strict=True)):
        if engine is None:
            continue
        queue = (engine, streams[engine][op.stream] % connections)
        if queue in last_ops:
            next_ops[last_ops[queue]] = number
        last_ops[queue] = number
    return next_ops


def program_next_in_queue(program: Program, connections: int) -> list[int] | None:
    """`next_in_queue` of a program's ops, for `Program.memoize`."""
    return next_in_queue(program.ops, connections)


def _num_streams(ops: Sequence[Op]) -> tuple[int, int, int]:
    """Numbers of streams that launch kernels or collectives, copies to the GPU, and copies from it."""
    kinds = {(type(op.work), op.stream) for op in ops}
    computing = {stream for kind, stream in kinds if kind in (Kernels, Collective, PointToPoint)}
    if not any(kind is Copy for kind, _ in kinds):
        return len(computing), 0, 0
    copying = {(op.work.direction, op.stream) for op in ops if isinstance(op.work, Copy)}
    num_h2d = sum(direction == "h2d" for direction, _ in copying)
    return len(computing), num_h2d, len(copying) - num_h2d


def _engine(op: Op) -> str | None:
    """The engine whose queues take the op's launches: "compute", "h2d" or "d2h". None if no engine does."""
    if isinstance(op.work, Kernels | Collective | PointToPoint):
        return "compute"
    return op.work.direction if isinstance(op.work, Copy) else None
