"""The steady step: a step that follows another step.

A host that never waits for the GPU is ahead of it when a step begins, so the GPU's queues are not empty. So
the plan is run twice on one clock, and the second run is the step. Its time is from the end of the first run
to the end of the second. If the host reads a number from the GPU around the update (DeepSpeed's norm, a
gradient scaler, composer's loss), the queues are drained in every step, and one run is enough.

A recorded step that is run on other hardware is run twice too: started on an idle machine, one step would
show host time that the steady step hides.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.builder import COMPUTE
from zsim.plan.columns import memory_columns, op_columns
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
    columns, new = program.once(op_columns), tuple.__new__
    again = list(program.ops)  # an op that waits for none is the same in both steps
    firsts = _firsts_on_streams(program)
    for number, (after, waits) in enumerate(zip(columns.after, columns.host_waits, strict=True)):
        is_first = last >= 0 and number in firsts
        if after or waits or is_first:
            name, stream, work, *_, launches, overhead, phase, module, events = again[number]
            after = tuple([other + count for other in after])
            waits = tuple([other + count for other in waits])
            own = (*after, last) if is_first else after
            op = (name, stream, work, own, waits, launches, overhead, phase, module, events)
            again[number] = new(Op, op)
    memory = program.once(memory_columns)
    changes = memory._replace(
        op=tuple([op + count for op in memory.op]),
        until=tuple([op + count if op >= 0 else op for op in memory.until]),
    )
    return replace(
        program,
        ops=(*program.ops, *again),
        memory=(*program.memory, *changes.rows()),
        actions=(*program.actions, *((number + count, action) for number, action in program.actions)),
    )


def _firsts_on_streams(program: Program) -> frozenset[int]:
    """The first op with work on each stream."""
    columns, seen = program.once(op_columns), dict[str, int]()
    on_host = {
        number
        for number, work in program.distinct_works.items()
        if isinstance(work, Recorded) and work.is_on_host
    }
    for number, (stream, work) in enumerate(zip(columns.stream, columns.work, strict=True)):
        if work is not None and stream not in seen and id(work) not in on_host:
            seen[stream] = number
    return frozenset(seen.values())


def _last_kernel(program: Program) -> int:
    """The last op of the compute stream, -1 if there is none. The compute stream of a recorded rank is the
    stream with the most kernel time.
    """
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
