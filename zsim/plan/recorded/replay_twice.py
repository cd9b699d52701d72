"""A recorded step after another one like it: what a change of times means for a run, not for one step.

A host that is ahead of its GPU hides what comes first in a step; one step from an idle machine would show it.
So on other hardware the step is replayed twice, and the second counts, from the end of the first to its own
(as zsim.plan.passes.twice does for simulated steps). On every stream the second begins after the last kernel
of the first: nothing may read a parameter before it is updated. Where the host waits for the GPU before or
after the update (DeepSpeed's norm, a gradient scaler, `loss.item()`), it is ahead of nothing, and once is
enough.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.recorded.replay_ops import HostWait, ReplayOp, ReplayPlan
from zsim.trace.trace import COLLECTIVES


def twice(plan: ReplayPlan) -> ReplayPlan:
    """The plan and the plan again; the host goes on where it was."""
    count = len(plan.ops)
    meetings: dict[str, int] = {}
    for op in plan.ops:
        if op.meeting is not None:
            meetings[op.meeting[0]] = meetings.get(op.meeting[0], 0) + 1
    last = _last_kernel(plan)
    seen: set[str] = set()
    again: list[ReplayOp] = []
    for number, op in enumerate(plan.ops):
        after = tuple(other + count for other in op.after)
        if op.stream not in seen and not op.is_on_host and last >= 0:
            after = (*after, last)
        seen.add(op.stream)
        meeting = None if op.meeting is None else (op.meeting[0], op.meeting[1] + meetings[op.meeting[0]])
        waits = _later(op.host_waits, count)
        later = replace(op, after=after, meeting=meeting, host_waits=waits)
        again.append(_after_tail(plan, later) if number == 0 else later)
    return replace(plan, ops=[*plan.ops, *again], tail_waits=_later(plan.tail_waits, count))


def _later(waits: tuple[HostWait, ...], count: int) -> tuple[HostWait, ...]:
    """The same waits for ops of the second step."""
    return tuple(wait if wait.op is None else wait._replace(op=wait.op + count) for wait in waits)


def is_drained(plan: ReplayPlan) -> bool:
    """Whether the host waits for the GPU between backward and the end of the step, or computes itself."""
    late = [op.host_waits for op in plan.ops if op.info.phase == "optimizer"]
    waits = any(wait.op is not None for waits in (*late, plan.tail_waits) for wait in waits)
    return waits or any(op.is_on_host for op in plan.ops)


def _last_kernel(plan: ReplayPlan) -> int:
    """The last op of the stream that computes most; -1 where the host computes."""
    busy: dict[str, float] = {}
    last: dict[str, int] = {}
    for number, op in enumerate(plan.ops):
        if not op.is_on_host and op.info.kind not in COLLECTIVES:
            busy[op.stream] = busy.get(op.stream, 0.0) + op.seconds
            last[op.stream] = number
    return last[max(busy, key=lambda stream: busy[stream])] if busy else -1


def _after_tail(plan: ReplayPlan, op: ReplayOp) -> ReplayOp:
    """The second step's first op: the host first does what it did at the end of a step."""
    if not op.host_waits:
        return replace(op, host_waits=plan.tail_waits, host_seconds=op.host_seconds + plan.tail_seconds)
    first, *others = op.host_waits
    first = first._replace(seconds=first.seconds + plan.tail_seconds)
    return replace(op, host_waits=(*plan.tail_waits, first, *others))
