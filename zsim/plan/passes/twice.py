"""The steady step: a step that follows another step.

A host that never waits for the GPU is ahead of it when a step begins, so the GPU's queues are not empty. So
the plan is run twice on one clock, and the second run is the step; its time is from the end of the first run
to the end of the second. If the host reads a number from the GPU around the update (DeepSpeed's norm, a
gradient scaler, composer's loss), the queues are drained in every step, and one run is enough.

A recorded step that is run on other hardware is run twice too: started on an idle machine, one step would
show host time that the steady step hides.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.builder import COMPUTE
from zsim.plan.columns import op_columns
from zsim.plan.ops import Op, Plan, Program
from zsim.plan.recorded.work import Recorded
from zsim.trace.trace import COLLECTIVES


def is_drained(plan: Plan) -> bool:
    """Whether the hosts of all ranks wait for the GPU between backward and the end of the step, or do work on
    the CPU themselves."""
    return all(program_is_drained(program) for program in plan.programs)


def program_is_drained(program: Program) -> bool:
    """Whether the host waits for the GPU between backward and the end of the step, or has offloaded work."""
    columns = program.once(op_columns)
    return (
        bool(program.offload_works)
        or any(
            waits and phase == "optimizer"
            for waits, phase in zip(columns.host_waits, columns.phase, strict=True)
        )
        or any(
            isinstance(work, Recorded) and work.is_on_host and work.info is not None
            for work in program.distinct_works.values()
        )
    )


def twice(plan: Plan) -> Plan:
    """The plan of two steps, one after the other."""
    return plan.with_programs(lambda program: program.once(program_twice))


def program_twice(program: Program) -> Program:
    """The program of two steps. On every stream the second step starts after the first step's last kernel, as
    nothing may read a parameter before the optimizer has written it. The host goes on without a wait."""
    count, last = len(program.ops), _last_kernel(program)
    seen: set[str] = set()
    again = []
    for op in program.ops:
        on_stream = op.work is not None and not (isinstance(op.work, Recorded) and op.work.is_on_host)
        is_first = on_stream and op.stream not in seen
        seen.add(op.stream)
        again.append(_later(op, count, last if is_first else -1))
    changes = (
        change._replace(op=change.op + count, until=change.until + count if change.until >= 0 else -1)
        for change in program.memory
    )
    return replace(
        program,
        ops=(*program.ops, *again),
        memory=(*program.memory, *changes),
        actions=(*program.actions, *((number + count, action) for number, action in program.actions)),
    )


def _last_kernel(program: Program) -> int:
    """The last op of the compute stream (of a recorded rank: the stream with the most kernel time); -1 if
    there is none."""
    compute, busy = COMPUTE, dict[str, float]()
    for op in program.ops if program.is_recorded else ():
        if isinstance(op.work, Recorded) and not op.work.is_on_host and op.work.kind not in COLLECTIVES:
            busy[op.stream] = busy.get(op.stream, 0.0) + op.work.seconds
    if busy:
        compute = max(busy, key=lambda stream: busy[stream])
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        on_host = isinstance(op.work, Recorded) and (op.work.is_on_host or op.work.kind in COLLECTIVES)
        if op.stream == compute and op.work is not None and not on_host:
            return number
    return -1


def _later(op: Op, count: int, after: int) -> Op:
    waits = tuple(other + count for other in op.after)
    if after >= 0:
        waits = (*waits, after)
    elif not waits and not op.host_waits:
        return op
    return op._replace(after=waits, host_waits=tuple(other + count for other in op.host_waits))
