"""A plan priced for a cluster: what the executor needs, as flat lists indexed by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zsim.cost.kernels import Kernel
from zsim.plan.ops import Collective, Kernels, OffloadWork, Plan


@dataclass(frozen=True, slots=True)
class Program:
    """`pending[i]`: how many ops must end before op i may start (the one before it on its stream, and those
    in `after`); `successors[i]`: who waits for op i so; `host_seconds[i]`: what issuing it costs the host."""

    plan: Plan
    pending: list[int]
    successors: list[tuple[int, ...]]
    host_seconds: list[float]
    kernel_seconds: list[float | None]

    @property
    def num_ops(self) -> int:
        return len(self.pending)


def make_program(
    plan: Plan,
    kernel_seconds: Callable[[Kernel], float],
    host_seconds: Callable[[str | None, int], float],
) -> Program:
    """Price every op. Prices are looked up once per distinct work."""
    num_ops = len(plan.ops)
    pending = [0] * num_ops
    successors: list[list[int]] = [[] for _ in range(num_ops)]
    last_on_stream: dict[str, int] = {}
    seconds_of: dict[int, float] = {}
    host_of: dict[tuple[str | None, int], float] = {}
    durations: list[float | None] = []
    host: list[float] = []
    for index, op in enumerate(plan.ops):
        before = set(op.after)
        if op.work is not None:
            previous = last_on_stream.get(op.stream)
            if previous is not None:
                before.add(previous)
            last_on_stream[op.stream] = index
        for other in sorted(before):
            assert other < index, f"op {index} waits for op {other}, which is issued later"
            successors[other].append(index)
        pending[index] = len(before)
        if isinstance(op.work, Kernels):
            key = id(op.work)
            if key not in seconds_of:
                seconds_of[key] = sum(kernel_seconds(kernel) for kernel in op.work.kernels)
            durations.append(seconds_of[key])
        else:
            assert op.work is None or isinstance(op.work, Collective | OffloadWork)
            durations.append(None)
        host_key = (op.overhead, op.launches)
        if host_key not in host_of:
            host_of[host_key] = host_seconds(*host_key)
        host.append(host_of[host_key])
    return Program(plan, pending, [tuple(s) for s in successors], host, durations)
