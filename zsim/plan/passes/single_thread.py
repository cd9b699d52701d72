"""The plan of ranks on CPUs: operators run in the thread that calls them.

There are no streams. The thread issues an operator when the previous operator has ended. A collective blocks
the thread too, unless the framework issues it asynchronously and waits later. Then gloo's threads run it, on
the cores that the ranks compute on (`interference.compute_slowdown` is the cost).

Asynchronous collectives (`Hooks.asynchronous`), torch 2.13 and DeepSpeed 0.19.8: DDP's reducer (reducer.cpp,
`all_reduce_bucket`), ZeRO-3's fetches (partition_parameters.py, `_dist_allgather_fn` with async_op=True), and
the reference engine. FSDP1 and FSDP2 call with async_op=False and rely on CUDA's streams.

gloo's reduce-scatter is an all-reduce of a copy, out of which the caller copies its slice when it waits
(ProcessGroupGloo.cpp, `reduce_scatter_tensor_coalesced`): the calling thread makes both copies. In a call of
11.8 MB between two ranks (torch 2.13) they took 2.05 + 0.90 ms. A plain copy of 11.8 MB took 1.78 ms, and one
of half of it 0.93 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from zsim.plan.builder import move_kernels
from zsim.plan.ops import Collective, CollectiveKind, Group, Kernels, Op, Plan, Program


def serialize_operators(
    plan: Plan, asynchronous: Collection[CollectiveKind], *, copies_scatters: bool
) -> Plan:
    """`plan` with the thread waiting for each operator, and for each collective of a kind that is not
    `asynchronous`. If `copies_scatters`, reduce-scatters copy before and after, as gloo's do.
    """
    if copies_scatters:
        plan = plan.map_programs(lambda program: _add_gloo_copies(program, plan.groups))
    return plan.map_programs(lambda program: _add_host_waits(program, asynchronous))


def _add_host_waits(program: Program, asynchronous: Collection[CollectiveKind]) -> Program:
    """The program with a host wait for each operator and blocking collective before the next op."""
    ops: list[Op] = []
    blocking: int | None = None
    for number, op in enumerate(program.ops):
        if blocking is not None and blocking not in op.host_waits:
            op = op._replace(host_waits=(*op.host_waits, blocking))
        ops.append(op)
        if isinstance(op.work, Kernels) or (
            isinstance(op.work, Collective) and op.work.kind not in asynchronous
        ):
            blocking = number
    return replace(program, ops=tuple(ops))


def _add_gloo_copies(program: Program, groups: Mapping[str, Group]) -> Program:
    """The program with gloo's copies before and after each reduce-scatter."""
    ops: list[Op] = []
    first_ops: list[int] = []  # by old op: the first and last of its ops in the new program
    last_ops: list[int] = []
    for op in program.ops:
        first_ops.append(len(ops))
        shifted_op = op._replace(
            after=tuple(last_ops[predecessor] for predecessor in op.after),
            host_waits=tuple(last_ops[predecessor] for predecessor in op.host_waits),
        )
        if isinstance(op.work, Collective) and op.work.kind == "reduce_scatter":
            size = op.work.bytes
            part = size // groups[op.work.group].size
            ops.append(_copy(shifted_op, "copy for", size))
            ops += [op._replace(after=(), host_waits=()), _copy(op, "slice of", part)]
        else:
            ops.append(shifted_op)
        last_ops.append(len(ops) - 1)
    first_ops.append(len(ops))
    memory = tuple(
        change._replace(op=first_ops[change.op], until=last_ops[change.until] if change.until >= 0 else -1)
        for change in program.memory
    )
    actions = tuple((first_ops[number], action) for number, action in program.actions)
    return replace(program, ops=tuple(ops), memory=memory, actions=actions)


def _copy(op: Op, prefix: str, size: int) -> Op:
    """A copy of `size` bytes on the stream of `op`."""
    return op._replace(
        name=f"{prefix} {op.name}", work=Kernels(move_kernels(size, size)), launches=1, overhead=None
    )
