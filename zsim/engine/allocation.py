"""What torch's allocator makes of a step: the reserved bytes, and whether it ran short.

The step's tensors are put through the allocator at the times at which the host allocated and the GPU was done
with them, again and again until it reserves no more. What the first update makes (torch.optim's states) takes
the room that the first step has left, and breaks up blocks which later steps want back whole. An allocator
that has room costs no time, so this comes after the clock. One that runs short holds the host up: then the
step is run again with the allocator in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zsim.arrays import Ints
from zsim.cost.rates.host_calls import retry_seconds, shipped_host_costs
from zsim.devices.allocator import Allocator, AllocatorCounts, Changes
from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock, PoolName
from zsim.plan.builder import COMPUTE
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.memory.tensors import TensorChange, tensor_changes
from zsim.plan.ops import Memory, OffloadWork, Plan, Program
from zsim.plan.parts.optimizer import UPDATE
from zsim.specs.experiment.job import Job

_MOST_PASSES = 5


@dataclass(frozen=True)
class Allocation:
    """Of one GPU in a steady step: the bytes that torch has active at most (its tensors, and what
    `record_stream` still protects) and reserved, without the CUDA context and NCCL's, of how many, what
    happened when it ran short, and by how much the step is longer for it."""

    active_bytes: int
    reserved_bytes: int
    limit_bytes: int
    counts: AllocatorCounts
    extra_seconds: float = 0.0
    pools: Mapping[PoolName, int] = field(default_factory=dict)

    @property
    def is_short(self) -> bool:
        return self.counts.retries > 0


@dataclass(frozen=True)
class Settled:
    """An allocator before the first step, and what `settle` made of a copy of it."""

    empty: Allocator
    allocation: Allocation


def make_allocator(job: Job, plan: Plan, repeated: Plan, number: int = 0) -> Allocator:
    """The allocator of a GPU that runs program `number`, with its resident tensors in it, for `repeated` (the
    plan, once or several times in a row); its counts are those of the last time.

    The ranks of a node run short together, and their driver takes one call at a time: with n ranks on a
    node a call takes n times as long. ("There is, in general, a linear relation between the number of GPUs
    and the cost of `cudaMalloc`", and at times a worse one: dmlc/xgboost issue 4194.)
    """
    costs, host = shipped_host_costs(), job.cluster.host
    program, again = plan.programs[number], repeated.programs[number]
    capacity = job.cluster.gpu.memory.capacity - framework_memory(job, plan, number).bytes
    memory = CachingAllocator(capacity, is_expandable=job.training.expandable_segments)
    for resident in program.resident:
        if resident.device == "gpu" and not resident.lazy_tensors:
            _make(memory, resident)
    has_lazy = any(resident.device == "gpu" and resident.lazy_tensors for resident in program.resident)
    return Allocator(
        memory,
        again.once(_changes),
        again.once(_Outstanding),
        malloc_seconds=costs.seconds["cuda_malloc"] * host.overhead_factor * job.gpus_per_node,
        free_seconds=costs.seconds["cuda_free"] * host.overhead_factor * job.gpus_per_node,
        retry_seconds=retry_seconds(job.world_size, costs),
        counts_from=len(again.ops) - len(program.ops),
        first_changes=again.once(_first_changes) if has_lazy else None,
    )


def _make(memory: CachingAllocator, resident: Memory) -> None:
    """The resident tensor, and the segments of its leftovers where there was room for both."""
    has_room = memory.active_bytes + sum(resident.leftovers) + resident.bytes <= memory.capacity_bytes
    passing = [_malloc(memory, size) for size in resident.leftovers] if has_room else []
    if resident.bytes:
        _malloc(memory, resident.bytes)
    for block in passing:
        memory.free(block)


def _malloc(memory: CachingAllocator, count: int) -> MemoryBlock:
    """As torch does, but never in vain."""
    block = memory.malloc(count, COMPUTE)
    if block is None:
        memory.release_cached()
        block = memory.malloc(count, COMPUTE)
    return block or memory.malloc_anyway(count, COMPUTE)


def _changes(program: Program) -> Changes:
    return Changes(program.once(tensor_changes))


def _first_changes(program: Program) -> Changes:
    """Also what the first update makes (`Memory.lazy_tensors`), in what is free when the host comes to it."""
    update = next((number for number, op in enumerate(program.ops) if op.name == UPDATE), len(program.ops))
    changes = program.once(tensor_changes)
    sizes = [
        size for resident in program.resident if resident.device == "gpu" for size in resident.lazy_tensors
    ]
    made = [TensorChange(update, -number, size) for number, size in enumerate(sizes, 1)]
    before = [
        change for change in changes if change.op < update or (change.op == update and not change.bytes)
    ]
    after = [change for change in changes if change.op > update or (change.op == update and change.bytes)]
    return Changes([*before, *made, *after])


class _Outstanding:
    """The last op issued to each of the GPU's streams before one."""

    def __init__(self, program: Program) -> None:
        self._of_stream: dict[str, list[int]] = {}
        for number, op in enumerate(program.ops):
            if op.work is not None and not isinstance(op.work, OffloadWork):
                self._of_stream.setdefault(op.stream, []).append(number)

    def __call__(self, op: int) -> Sequence[int]:
        places = ((numbers, bisect_left(numbers, op)) for numbers in self._of_stream.values())
        return [numbers[place - 1] for numbers, place in places if place]


def settle(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> Allocation:
    """Run the program through the allocator until it reserves no more, at the times of a run without it.

    A request that finds it short waits for what the run has done last, and holds nothing else up; failures
    are counted from the first time on. Leaves the allocator ready for a run of the program with the segments
    it has by then.
    """
    memory, before, failures, is_settled = allocator.memory, -1, 0, False
    for _ in range(_MOST_PASSES):
        segments = memory.num_segments
        _pass_through(allocator, issue, ended)
        is_settled = memory.num_segments == segments and not memory.num_released
        counts, peak, active = allocator.counts, memory.peak_reserved_bytes, memory.peak_active_bytes
        failures = max(failures, counts.failures)
        allocator.restart()
        if peak == before or not counts.segments:
            break
        before = peak
    limit, pools = memory.capacity_bytes, memory.reserved_by_pool() if is_settled else {}
    return Allocation(active, min(peak, limit), limit, replace(counts, failures=failures), pools=pools)


def settle_once(
    program: Program, allocator: Allocator, issue: Sequence[float], ended: Sequence[float]
) -> Allocation:
    """As `settle`; what is known from a run in which every block was free again before the same request as
    now is taken from there, where the allocator never ran short (and the allocator left as it is).

    An allocator asks of the clock only whether the last use of a block has ended when something is allocated.
    """
    memory, known = allocator.memory, program.once(_allocations)
    key = memory.capacity_bytes, memory.is_expandable, _order_of_uses(program, allocator, issue, ended)
    if key in known:
        return known[key]
    allocation = settle(allocator, issue, ended)
    if not allocator.has_retried:
        known[key] = allocation
    return allocation


def _allocations(program: Program) -> dict[tuple[int, bool, bytes], Allocation]:
    """By capacity, kind of segments and order of uses: filled by `settle_once`."""
    return {}


def _order_of_uses(
    program: Program, allocator: Allocator, issue: Sequence[float], ended: Sequence[float]
) -> bytes:
    """By block that is given back while it is in use, the request from which on it is free."""
    frees, uses = program.once(_used_when_freed)
    if not len(uses):
        return b""
    asking = np.array(sorted(allocator.current.asking | allocator.changes.asking))
    times = np.append(np.asarray(issue), max(ended))[asking]
    first = np.searchsorted(times, np.asarray(ended)[uses])
    return np.maximum(first, np.searchsorted(asking, frees)).tobytes()


def _used_when_freed(program: Program) -> tuple[Ints, Ints]:
    """The ops before which blocks are given back that `record_stream` protects, and those that use them."""
    given = (change for change in program.once(tensor_changes) if not change.bytes)
    changes = [change for change in given if change.until >= 0]
    frees, uses = ([getattr(change, name) for change in changes] for name in ("op", "until"))
    return np.array(frees, dtype=np.int64), np.array(uses, dtype=np.int64)


def _pass_through(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> None:
    """The program once through the allocator."""
    end = max(ended)
    for op in sorted(allocator.current.by_op):
        now = issue[op] if op < len(issue) else end
        if allocator.advance(op, now, ended) >= 0:
            allocator.advance(op, end, ended)


def has_room_at(
    empty: Allocator, allocation: Allocation, issue: Sequence[float], ended: Sequence[float]
) -> bool:
    """Whether an allocator that is `empty` before the first step, and has the `allocation` at the times of
    one run of the program, has room at those of another; False also where only `settle` can tell.

    # [Note: pools apart]
    As long as the driver has room, an allocator's pools have nothing to do with each other, and one whose
    blocks come back at once does the same at all times. So only those are looked at again whose blocks
    `record_stream` protects.
    """
    if not allocation.pools:
        return False
    again = empty.copy()
    memory, limit = again.memory, again.memory.capacity_bytes
    memory.capacity_bytes = 1 << 62
    timed: set[PoolName] = set()
    again.changes = _timed(memory, empty.changes, timed)
    if empty.first_changes is not None:
        again.first_changes = _timed(memory, empty.first_changes, timed)
    for _ in range(_MOST_PASSES):
        segments = memory.num_segments
        _pass_through(again, issue, ended)
        again.restart()
        if memory.num_segments == segments:
            again_pools = memory.reserved_by_pool()
            reserved = {**allocation.pools, **{pool: again_pools[pool] for pool in timed}}
            return sum(reserved.values()) <= limit
    return False


def _timed(memory: CachingAllocator, changes: Changes, timed: set[PoolName]) -> Changes:
    """Those of tensors in pools with blocks that are protected when they come back, which join `timed`."""
    ordered = [change for at_op in changes.by_op.values() for change in at_op]
    requests = {(change.bytes, change.stream) for change in ordered if change.bytes}
    pool_of = {request: memory.pool_of(*request) for request in requests}
    pools = {change.tensor: pool_of[change.bytes, change.stream] for change in ordered if change.bytes}
    timed |= {pools[change.tensor] for change in ordered if change.until >= 0}
    return Changes([change for change in ordered if pools[change.tensor] in timed])
