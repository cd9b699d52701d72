"""The steady step: what a step is like when another one came before.

A host that never waits for the GPU is ahead of it when a step begins, and the GPU finds work waiting. So the
plan is run twice on one clock, and the second run is the step; its time is from the end of the first to its
own end. Where a number is read from the GPU before or after the update (DeepSpeed's norm, a gradient scaler,
composer's loss) the queue is drained in every step, and one run is enough.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.builder import COMPUTE
from zsim.plan.ops import OffloadWork, Op, Plan, Program


def is_drained(plan: Plan) -> bool:
    """Whether the host waits for the GPU between backward and the end of the step, as it does where the
    update runs on the CPU."""
    return all(_is_drained(program) for program in plan.programs)


def _is_drained(program: Program) -> bool:
    return any(
        (op.phase == "optimizer" and op.host_waits) or isinstance(op.work, OffloadWork) for op in program.ops
    )


def twice(plan: Plan) -> Plan:
    """The plan and the plan again."""
    return plan.with_programs(_twice)


def _twice(program: Program) -> Program:
    """On every stream the second begins after the first's last kernel: nothing may read a parameter before
    the optimizer has written it."""
    count = len(program.ops)
    last = max(
        number for number, op in enumerate(program.ops) if op.stream == COMPUTE and op.work is not None
    )
    seen: set[str] = set()
    again = []
    for op in program.ops:
        is_first = op.work is not None and op.stream not in seen
        seen.add(op.stream)
        again.append(_later(op, count, last if is_first else -1))
    changes = (
        change._replace(op=change.op + count, until=change.until + count if change.until >= 0 else -1)
        for change in program.memory
    )
    return replace(program, ops=(*program.ops, *again), memory=(*program.memory, *changes))


def _later(op: Op, count: int, after: int) -> Op:
    waits = tuple(other + count for other in op.after)
    if after >= 0:
        waits = (*waits, after)
    elif not waits and not op.host_waits:
        return op
    return op._replace(after=waits, host_waits=tuple(other + count for other in op.host_waits))
