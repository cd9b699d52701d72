"""A plan where the device is a CPU: operators run in the thread that calls them, nothing overlaps by itself.

There are no streams. The thread issues an operator when the one before has ended; a collective blocks it too,
unless the framework asks for it asynchronously and waits later: then gloo's own threads run it, on the cores
that the ranks compute on (`interference.compute_slowdown` says what that costs).

Who asks asynchronously, torch 2.13 and DeepSpeed 0.19.8: DDP's reducer (reducer.cpp, `all_reduce_bucket`);
ZeRO-3's fetches (partition_parameters.py, `_dist_allgather_fn` with async_op=True); the reference engine.
FSDP1 and FSDP2 call with async_op=False and rely on CUDA's streams.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.ops import Collective, Kernels, Op, Plan
from zsim.specs.importers.deepspeed import DeepSpeedConfig
from zsim.specs.strategy import Ddp, Reference


def in_one_thread(plan: Plan, strategy: object) -> Plan:
    """`plan` with the thread waiting for each operator, and for each collective that is not asynchronous."""
    ops: list[Op] = []
    blocking: int | None = None
    for number, op in enumerate(plan.ops):
        if blocking is not None and blocking not in op.host_waits:
            op = op._replace(host_waits=(*op.host_waits, blocking))
        ops.append(op)
        if isinstance(op.work, Kernels) or (
            isinstance(op.work, Collective) and not _is_asynchronous(op.work, strategy)
        ):
            blocking = number
    return replace(plan, ops=tuple(ops))


def _is_asynchronous(work: Collective, strategy: object) -> bool:
    if isinstance(strategy, Ddp | Reference):
        return True
    return isinstance(strategy, DeepSpeedConfig) and strategy.stage == 3 and work.kind == "all_gather"
