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
from zsim.plan.ops import Op, Plan, Program, RecordedWork
from zsim.trace.trace import COLLECTIVES


def is_drained(plan: Plan) -> bool:
    """Whether the hosts of all ranks wait for the GPU between backward and the end of the step, or do work on
    the CPU themselves."""
    return all(program_is_drained(program) for program in plan.programs)


def program_is_drained(program: Program) -> bool:
    """Whether the host waits for the GPU between backward and the end of the step, or has offloaded work."""
    columns = program.memoize(op_columns)
    return (
        bool(program.offload_work)
        or any(
            waits and phase == "optimizer"
            for waits, phase in zip(columns.host_waits, columns.phase, strict=True)
        )
        or any(
            isinstance(work, RecordedWork) and work.is_on_host and work.info is not None
            for work in program.unique_work.values()
        )
    )


def repeat_step(plan: Plan) -> Plan:
    """The plan of two steps, one after the other."""
    return plan.map_programs(lambda program: program.memoize(repeat_program))


def repeat_program(program: Program) -> Program:
    """The program of two steps. On every stream the second step starts after the first step's last kernel, as
    nothing may read a parameter before the optimizer has written it. The host goes on without a wait."""
    count, last = len(program.ops), _last_kernel(program)
    columns, new_tuple = program.memoize(op_columns), tuple.__new__
    repeated_ops = list(program.ops)  # an op that waits for none is the same in both steps
    first_ops = _first_op_per_stream(program)
    for number, (after, waits) in enumerate(zip(columns.after, columns.host_waits, strict=True)):
        is_first = last >= 0 and number in first_ops
        if after or waits or is_first:
            name, stream, work, *_, launches, overhead, phase, module, events = repeated_ops[number]
            after = tuple([predecessor + count for predecessor in after])
            waits = tuple([predecessor + count for predecessor in waits])
            dependencies = (*after, last) if is_first else after
            op = (name, stream, work, dependencies, waits, launches, overhead, phase, module, events)
            repeated_ops[number] = new_tuple(Op, op)
    memory = program.memoize(memory_columns)
    changes = memory._replace(
        op=tuple([op + count for op in memory.op]),
        until=tuple([op + count if op >= 0 else op for op in memory.until]),
    )
    return replace(
        program,
        ops=(*program.ops, *repeated_ops),
        memory=(*program.memory, *changes.rows()),
        actions=(*program.actions, *((number + count, action) for number, action in program.actions)),
    )


def _first_op_per_stream(program: Program) -> frozenset[int]:
    """The first op with work on each stream."""
    columns, first_ops = program.memoize(op_columns), dict[str, int]()
    host_ops = {
        number
        for number, work in program.unique_work.items()
        if isinstance(work, RecordedWork) and work.is_on_host
    }
    for number, (stream, work) in enumerate(zip(columns.stream, columns.work, strict=True)):
        if work is not None and stream not in first_ops and id(work) not in host_ops:
            first_ops[stream] = number
    return frozenset(first_ops.values())


def _last_kernel(program: Program) -> int:
    """The last op of the compute stream, -1 if there is none. The compute stream of a recorded rank is the
    stream with the most kernel time.
    """
    compute, busy_seconds = COMPUTE, dict[str, float]()
    for op in program.ops if program.is_recorded else ():
        if isinstance(op.work, RecordedWork) and not op.work.is_on_host and op.work.kind not in COLLECTIVES:
            busy_seconds[op.stream] = busy_seconds.get(op.stream, 0.0) + op.work.seconds
    if busy_seconds:
        compute = max(busy_seconds, key=lambda stream: busy_seconds[stream])
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        is_host_op = isinstance(op.work, RecordedWork) and (op.work.is_on_host or op.work.kind in COLLECTIVES)
        if op.stream == compute and op.work is not None and not is_host_op:
            return number
    return -1
