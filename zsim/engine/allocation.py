"""torch's caching allocator over a step: the reserved bytes, and whether it ran short.

The step's tensors are allocated at the host's times and freed when the GPU has used them, step after step
until the allocator reserves no more. The first update allocates torch.optim's states out of blocks that the
first step has freed, and splits blocks that later steps need whole. An allocator that has room costs no time,
so it is simulated after the run. An allocator that runs short delays the host: then the step is run again
with the allocator in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zsim.cost.rates.host_calls import retry_seconds, shipped_host_costs
from zsim.devices.allocator import Allocator, AllocatorChanges, AllocatorCounts
from zsim.devices.caching_allocator import UNLIMITED, CachingAllocator, MemoryBlock, PoolName
from zsim.engine.pools import PoolRuns, ProgramPartition, peak_active_bytes
from zsim.plan.builder import COMPUTE
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.memory.tensors import TensorChange, TensorColumns, tensor_columns
from zsim.plan.node_types import gpu_of, host_of
from zsim.plan.ops import Collective, Group, Memory, OffloadWork, Plan, Program
from zsim.plan.shared.optimizer import UPDATE
from zsim.specs.experiment.job import Job

_MAX_PASSES = 5


@dataclass(frozen=True)
class Allocation:
    """The allocator of one GPU in a steady step. The maximum bytes are without the CUDA context and NCCL."""

    active_bytes: int
    """Bytes of tensors, and of blocks that `record_stream` still protects."""
    reserved_bytes: int
    limit_bytes: int
    """The capacity."""
    counts: AllocatorCounts
    """Retries, failures and the segments exchanged with the driver."""
    extra_seconds: float = 0.0
    """Delay of the step when the allocator runs short."""
    pools: Mapping[PoolName, int] = field(default_factory=dict)
    """Reserved bytes by pool. Empty where the pools have reached no steady state."""

    @property
    def is_short(self) -> bool:
        return self.counts.retries > 0


@dataclass(frozen=True)
class SteadyAllocator:
    """An allocator before the first step, and the result of `reach_steady_state` on a copy of it."""

    initial: Allocator
    allocation: Allocation


def make_allocator(job: Job, plan: Plan, repeated_plan: Plan, number: int = 0) -> Allocator:
    """The allocator of a GPU that runs program `number`, with its resident tensors in it.

    It is an allocator for `repeated_plan`, which is the plan run once or several times in a row, and its
    counts are those of the last time.

    The ranks of a node run short together, and their driver takes one call at a time. With n ranks on a node
    a call takes n times as long. ("There is, in general, a linear relation between the number of GPUs and the
    cost of `cudaMalloc`", and at times a worse one: dmlc/xgboost issue 4194.)
    """
    costs, host = shipped_host_costs(), host_of(job, plan, number)
    program, repeated_program = plan.programs[number], repeated_plan.programs[number]
    times = len(repeated_program.ops) // len(program.ops)
    capacity = gpu_of(job, plan, number).memory.capacity - framework_memory(job, plan, number).bytes
    training = job.training
    split_mib = training.max_split_size_mb
    memory = CachingAllocator(
        capacity,
        is_expandable=training.expandable_segments,
        max_split_bytes=UNLIMITED if split_mib is None else split_mib * 2**20,
        roundup_divisions=training.roundup_power2_divisions,
    )
    for resident in program.resident:
        if resident.device == "gpu" and not resident.lazy_tensors:
            _allocate_resident(memory, resident)
    has_lazy = any(resident.device == "gpu" and resident.lazy_tensors for resident in program.resident)
    return Allocator(
        memory,
        program.memoize(_changes, times),
        repeated_program.memoize(_OutstandingOps),
        malloc_seconds=costs.seconds["cuda_malloc"] * host.overhead_factor * job.gpus_per_node,
        free_seconds=costs.seconds["cuda_free"] * host.overhead_factor * job.gpus_per_node,
        retry_seconds=_RetrySeconds(repeated_program, plan.groups),
        counts_from=len(repeated_program.ops) - len(program.ops),
        first_changes=program.memoize(_first_changes, times) if has_lazy else None,
    )


def _allocate_resident(memory: CachingAllocator, resident: Memory) -> None:
    """Allocate a resident tensor, and the segments of its leftovers if there is room for both."""
    has_room = memory.active_bytes + sum(resident.leftovers) + resident.bytes <= memory.capacity_bytes
    leftover_blocks = [_malloc(memory, size) for size in resident.leftovers] if has_room else []
    if resident.bytes:
        _malloc(memory, resident.bytes)
    for block in leftover_blocks:
        memory.free(block)


def _malloc(memory: CachingAllocator, count: int) -> MemoryBlock:
    """Allocate as torch does, but never fail."""
    block = memory.malloc(count, COMPUTE)
    if block is None and memory.release_oversize(count, COMPUTE):
        block = memory.malloc(count, COMPUTE)
    if block is None:
        memory.release_cached()
        block = memory.malloc(count, COMPUTE)
    return block or memory.malloc_over_capacity(count, COMPUTE)


def _changes(program: Program, times: int) -> AllocatorChanges:
    """The changes of the program `times` times in a row."""
    return AllocatorChanges(program.memoize(tensor_columns, times))


def _first_changes(program: Program, times: int) -> AllocatorChanges:
    """The changes of the first steps, with the tensors that the first update makes
    (`Memory.lazy_tensors`).
    """
    end = times * len(program.ops)
    update = next((number for number, op in enumerate(program.ops) if op.name == UPDATE), end)
    changes = program.memoize(tensor_columns, times)
    sizes = [
        size for resident in program.resident if resident.device == "gpu" for size in resident.lazy_tensors
    ]
    lazy_changes = TensorColumns.from_changes(
        [TensorChange(update, -number, size) for number, size in enumerate(sizes, 1)]
    )
    is_later = (changes.op > update) | ((changes.op == update) & (changes.bytes > 0))
    return AllocatorChanges(
        changes.select(~is_later).concatenate(lazy_changes).concatenate(changes.select(is_later))
    )


class _OutstandingOps:
    """Callable: for an op, the last op issued before it to each of the GPU's streams."""

    def __init__(self, program: Program) -> None:
        self._ops = program.ops

    @cached_property
    def _ops_per_stream(self) -> dict[str, list[int]]:
        """The ops of each stream. Needed only where the allocator runs short."""
        ops: dict[str, list[int]] = {}
        for number, op in enumerate(self._ops):
            if op.work is not None and not isinstance(op.work, OffloadWork):
                ops.setdefault(op.stream, []).append(number)
        return ops

    def __call__(self, op: int) -> Sequence[int]:
        positions = ((numbers, bisect_left(numbers, op)) for numbers in self._ops_per_stream.values())
        return [numbers[position - 1] for numbers, position in positions if position]


class _RetrySeconds:
    """Callable: for an op, the seconds of a retry before it.

    They depend on the number of ranks of the next collective that is not of this rank alone. Where none
    follows, the last such collective counts.
    """

    def __init__(self, program: Program, groups: Mapping[str, Group]) -> None:
        self._ops, self._groups = program.ops, groups

    @cached_property
    def _collectives(self) -> tuple[list[int], list[int]]:
        """The positions and ranks of the collectives. Needed only where the allocator runs short."""
        collectives = [
            (number, self._groups[op.work.group].size)
            for number, op in enumerate(self._ops)
            if isinstance(op.work, Collective) and self._groups[op.work.group].size > 1
        ]
        return [number for number, _ in collectives], [size for _, size in collectives]

    def __call__(self, op: int) -> float:
        positions, sizes = self._collectives
        ranks = sizes[min(bisect_left(positions, op), len(sizes) - 1)] if sizes else 1
        return retry_seconds(ranks, shipped_host_costs())


def reach_steady_state(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> Allocation:
    """Run the program through the allocator until it reserves no more, at the times of a run without it.

    A request that finds the allocator short waits for the end of the run and delays nothing else. The count
    of failures is the maximum over the passes. The allocator is left ready for a run of the program, with its
    segments.
    """
    memory, previous_peak, failures, is_settled = allocator.memory, -1, 0, False
    for _ in range(_MAX_PASSES):
        segments = memory.num_segments
        _run_program(allocator, issue, ended)
        is_settled = memory.num_segments == segments and not memory.num_released
        counts, peak, active = allocator.counts, memory.peak_reserved_bytes, memory.peak_active_bytes
        failures = max(failures, counts.failures)
        allocator.restart()
        if peak == previous_peak or not counts.segments:
            break
        previous_peak = peak
    limit, pools = memory.capacity_bytes, memory.reserved_by_pool() if is_settled else {}
    return Allocation(active, min(peak, limit), limit, replace(counts, failures=failures), pools=pools)


def steady_state(
    program: Program, allocator: Allocator, issue: Sequence[float], ended: Sequence[float]
) -> Allocation:
    """The same as `reach_steady_state`, with a cache of what the runs of the program have in common. See
    [Note: pools apart] in zsim.engine.pools.

    The allocator is left unchanged if it never ran short. The clock matters to an allocator only in whether
    the last use of a block has ended at a request.
    """
    cache = _cache_of(program, allocator)
    if cache.partition is None:
        cache.partition = ProgramPartition(allocator)
    if cache.unprotected_runs is None:
        cache.unprotected_runs = cache.partition.unprotected_runs(allocator)
    positions = cache.partition.protected_positions(issue, ended)
    key = allocator.memory.capacity_bytes, *(column.tobytes() for column in positions)
    if key not in cache.allocations:
        allocation = _steady_state_of_pools(
            allocator,
            cache.unprotected_runs,
            cache.partition.protected_runs(allocator, positions),
            cache.partition,
        )
        if allocation is not None:
            cache.allocations[key] = allocation, None
        else:
            allocation = reach_steady_state(allocator, issue, ended)
            cache.allocations[key] = (
                allocation,
                allocator.copy_with_counts() if allocator.has_retried else None,
            )
            return allocation
    allocation, steady_allocator = cache.allocations[key]
    if steady_allocator is not None:
        allocator.restore(steady_allocator)
    return allocation


@dataclass
class _SteadyStateCache:
    """Cache of `steady_state`, of one program and allocator before its first step."""

    allocations: dict[Hashable, tuple[Allocation, Allocator | None]] = field(default_factory=dict)
    """By the capacity and the order in which blocks can be reused: the result of `reach_steady_state`, and
    the allocator that it leaves if it ran short.
    """
    partition: ProgramPartition | None = None
    unprotected_runs: PoolRuns | None = None


def _new_cache(_program: Program, _layout: Hashable, _counts_from: int) -> _SteadyStateCache:
    """An empty cache, which the program keeps per arguments."""
    return _SteadyStateCache()


def _cache_of(program: Program, initial: Allocator) -> _SteadyStateCache:
    return program.memoize(_new_cache, initial.memory.layout(), initial.counts_from)


def _steady_state_of_pools(
    initial: Allocator, unprotected_runs: PoolRuns, protected_runs: PoolRuns, partition: ProgramPartition
) -> Allocation | None:
    """The allocation of all pools, as `reach_steady_state` has it. None if the driver has no room for all of
    them.
    """
    memory, previous_peak = initial.memory, -1
    limit = memory.capacity_bytes
    if memory.num_released:
        return None
    for number in range(_MAX_PASSES):
        unprotected, protected = unprotected_runs.nth(number), protected_runs.nth(number)
        peak = memory.reserved_bytes + unprotected.reserved + protected.reserved
        if peak > limit:
            return None
        segments = unprotected.segments + protected.segments
        if peak == previous_peak or not segments:
            break
        previous_peak = peak
    pools: Mapping[PoolName, int] = {}
    if not unprotected.has_grown and not protected.has_grown:
        protected_pools = {
            name: count
            for name, count in protected.pools.items()
            if name in partition.later_changes.protected_pools
        }
        pools = {**unprotected.pools, **protected_pools}
    active = peak_active_bytes(protected, unprotected, memory.active_bytes)
    if not number:  # the peak while resident tensors were allocated counts
        active, peak = max(active, memory.peak_active_bytes), max(peak, memory.peak_reserved_bytes)
    return Allocation(active, peak, limit, AllocatorCounts(segments=segments), pools=pools)


def _run_program(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> None:
    """Run the program once through the allocator."""
    end = max(ended)
    for op in sorted(allocator.current.changes_of_op):
        now = issue[op] if op < len(issue) else end
        if allocator.advance(op, now, ended) >= 0:
            allocator.advance(op, end, ended)


def has_room_at(
    program: Program,
    initial: Allocator,
    allocation: Allocation,
    issue: Sequence[float],
    ended: Sequence[float],
) -> bool:
    """Whether an allocator still has room at the times of another run of its program.

    It is `initial` before the first step and has `allocation` at the times of one run. False also if only
    `reach_steady_state` can tell. Only pools with protected blocks are simulated again, see [Note: pools
    apart] in zsim.engine.pools.
    """
    if not allocation.pools:
        return False
    cache = _cache_of(program, initial)
    partition = cache.partition = cache.partition or ProgramPartition(initial)
    runs = partition.protected_runs(initial, partition.protected_positions(issue, ended))
    for number in range(_MAX_PASSES):
        run = runs.nth(number)
        if not run.has_grown:
            reserved = {
                **allocation.pools,
                **{pool: run.pools[pool] for pool in partition.later_changes.protected_pools},
            }
            return sum(reserved.values()) <= initial.memory.capacity_bytes
    return False
