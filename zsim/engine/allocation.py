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
from dataclasses import field, replace
from functools import cached_property

from zsim.cost.rates.host_calls import retry_seconds, shipped_host_costs
from zsim.dataclass import dataclass
from zsim.devices.allocator import Allocator, AllocatorCounts, Changes
from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock, PoolName
from zsim.engine.pools.apart import PoolPasses, ProgramApart, peak_active_bytes
from zsim.plan.builder import COMPUTE
from zsim.plan.by_type import gpu_of, host_of
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.memory.tensors import TensorChange, TensorColumns, tensor_columns
from zsim.plan.ops import Collective, Group, Memory, OffloadWork, Plan, Program
from zsim.plan.parts.optimizer import UPDATE
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
class Settled:
    """An allocator before the first step, and the result of `reach_steady_state` on a copy of it."""

    empty: Allocator
    allocation: Allocation


def make_allocator(job: Job, plan: Plan, repeated: Plan, number: int = 0) -> Allocator:
    """The allocator of a GPU that runs program `number`, with its resident tensors in it.

    It is an allocator for `repeated`, which is the plan run once or several times in a row, and its counts
    are those of the last time.

    The ranks of a node run short together, and their driver takes one call at a time. With n ranks on a node
    a call takes n times as long. ("There is, in general, a linear relation between the number of GPUs and the
    cost of `cudaMalloc`", and at times a worse one: dmlc/xgboost issue 4194.)
    """
    costs, host = shipped_host_costs(), host_of(job, plan, number)
    program, again = plan.programs[number], repeated.programs[number]
    times = len(again.ops) // len(program.ops)
    capacity = gpu_of(job, plan, number).memory.capacity - framework_memory(job, plan, number).bytes
    memory = CachingAllocator(capacity, is_expandable=job.training.expandable_segments)
    for resident in program.resident:
        if resident.device == "gpu" and not resident.lazy_tensors:
            _make(memory, resident)
    has_lazy = any(resident.device == "gpu" and resident.lazy_tensors for resident in program.resident)
    return Allocator(
        memory,
        program.once(_changes, times),
        again.once(_Outstanding),
        malloc_seconds=costs.seconds["cuda_malloc"] * host.overhead_factor * job.gpus_per_node,
        free_seconds=costs.seconds["cuda_free"] * host.overhead_factor * job.gpus_per_node,
        retry_seconds=_RetrySeconds(again, plan.groups),
        counts_from=len(again.ops) - len(program.ops),
        first_changes=program.once(_first_changes, times) if has_lazy else None,
    )


def _make(memory: CachingAllocator, resident: Memory) -> None:
    """Allocate a resident tensor, and the segments of its leftovers if there is room for both."""
    has_room = memory.active_bytes + sum(resident.leftovers) + resident.bytes <= memory.capacity_bytes
    passing = [_malloc(memory, size) for size in resident.leftovers] if has_room else []
    if resident.bytes:
        _malloc(memory, resident.bytes)
    for block in passing:
        memory.free(block)


def _malloc(memory: CachingAllocator, count: int) -> MemoryBlock:
    """Allocate as torch does, but never fail."""
    block = memory.malloc(count, COMPUTE)
    if block is None:
        memory.release_cached()
        block = memory.malloc(count, COMPUTE)
    return block or memory.malloc_anyway(count, COMPUTE)


def _changes(program: Program, times: int) -> Changes:
    """The changes of the program `times` times in a row."""
    return Changes(program.once(tensor_columns, times))


def _first_changes(program: Program, times: int) -> Changes:
    """The changes of the first steps, with the tensors that the first update makes
    (`Memory.lazy_tensors`).
    """
    end = times * len(program.ops)
    update = next((number for number, op in enumerate(program.ops) if op.name == UPDATE), end)
    changes = program.once(tensor_columns, times)
    sizes = [
        size for resident in program.resident if resident.device == "gpu" for size in resident.lazy_tensors
    ]
    made = TensorColumns.of([TensorChange(update, -number, size) for number, size in enumerate(sizes, 1)])
    is_later = (changes.op > update) | ((changes.op == update) & (changes.bytes > 0))
    return Changes(changes.taken(~is_later).followed_by(made).followed_by(changes.taken(is_later)))


class _Outstanding:
    """Callable: for an op, the last op issued before it to each of the GPU's streams."""

    def __init__(self, program: Program) -> None:
        self._ops = program.ops

    @cached_property
    def _of_stream(self) -> dict[str, list[int]]:
        """The ops of each stream. Needed only where the allocator runs short."""
        found: dict[str, list[int]] = {}
        for number, op in enumerate(self._ops):
            if op.work is not None and not isinstance(op.work, OffloadWork):
                found.setdefault(op.stream, []).append(number)
        return found

    def __call__(self, op: int) -> Sequence[int]:
        places = ((numbers, bisect_left(numbers, op)) for numbers in self._of_stream.values())
        return [numbers[place - 1] for numbers, place in places if place]


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
        found = [
            (number, self._groups[op.work.group].size)
            for number, op in enumerate(self._ops)
            if isinstance(op.work, Collective) and self._groups[op.work.group].size > 1
        ]
        return [number for number, _ in found], [size for _, size in found]

    def __call__(self, op: int) -> float:
        places, sizes = self._collectives
        ranks = sizes[min(bisect_left(places, op), len(sizes) - 1)] if sizes else 1
        return retry_seconds(ranks, shipped_host_costs())


def settle(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> Allocation:
    """Run the program through the allocator until it reserves no more, at the times of a run without it.

    A request that finds the allocator short waits for the end of the run and delays nothing else. The count
    of failures is the maximum over the passes. The allocator is left ready for a run of the program, with its
    segments.
    """
    memory, before, failures, is_settled = allocator.memory, -1, 0, False
    for _ in range(_MAX_PASSES):
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
    """The same as `reach_steady_state`, with a cache of what the runs of the program have in common. See
    [Note: pools apart] in zsim.engine.pools.partition.

    The allocator is left unchanged if it never ran short. The clock matters to an allocator only in whether
    the last use of a block has ended at a request.
    """
    known = _known_of(program, allocator)
    if known.apart is None:
        known.apart = ProgramApart(allocator)
    if known.others is None:
        known.others = known.apart.others(allocator)
    places = known.apart.places(issue, ended)
    key = allocator.memory.capacity_bytes, *(each.tobytes() for each in places)
    if key not in known.settled:
        allocation = _settle_apart(allocator, known.others, known.apart.timed(allocator, places), known.apart)
        if allocation is not None:
            known.settled[key] = allocation, None
        else:
            allocation = settle(allocator, issue, ended)
            known.settled[key] = allocation, allocator.settled_copy() if allocator.has_retried else None
            return allocation
    allocation, settled = known.settled[key]
    if settled is not None:
        allocator.resume(settled)
    return allocation


@dataclass
class _KnownRuns:
    """Cache of `steady_state`, of one program and allocator before its first step."""

    settled: dict[Hashable, tuple[Allocation, Allocator | None]] = field(default_factory=dict)
    """By the capacity and the order in which blocks can be reused: the result of `reach_steady_state`, and
    the allocator that it leaves if it ran short.
    """
    apart: ProgramApart | None = None
    others: PoolPasses | None = None


def _known_runs(_program: Program, _layout: Hashable, _counts_from: int) -> _KnownRuns:
    """An empty cache, which the program keeps per arguments."""
    return _KnownRuns()


def _known_of(program: Program, allocator: Allocator) -> _KnownRuns:
    return program.once(_known_runs, allocator.memory.layout(), allocator.counts_from)


def _settle_apart(
    empty: Allocator, others: PoolPasses, timed: PoolPasses, apart: ProgramApart
) -> Allocation | None:
    """The allocation of all pools, as `reach_steady_state` has it. None if the driver has no room for all of
    them.
    """
    memory, before = empty.memory, -1
    limit = memory.capacity_bytes
    if memory.num_released:
        return None
    for number in range(_MAX_PASSES):
        quiet, late = others.number(number), timed.number(number)
        peak = memory.reserved_bytes + quiet.reserved + late.reserved
        if peak > limit:
            return None
        segments = quiet.segments + late.segments
        if peak == before or not segments:
            break
        before = peak
    pools: Mapping[PoolName, int] = {}
    if not quiet.has_grown and not late.has_grown:
        own = {name: count for name, count in late.pools.items() if name in apart.later.timed_pools}
        pools = {**quiet.pools, **own}
    active = peak_active_bytes(late, quiet, memory.active_bytes)
    if not number:  # the peak while resident tensors were allocated counts
        active, peak = max(active, memory.peak_active_bytes), max(peak, memory.peak_reserved_bytes)
    return Allocation(active, peak, limit, AllocatorCounts(segments=segments), pools=pools)


def _pass_through(allocator: Allocator, issue: Sequence[float], ended: Sequence[float]) -> None:
    """Run the program once through the allocator."""
    end = max(ended)
    for op in sorted(allocator.current.by_op):
        now = issue[op] if op < len(issue) else end
        if allocator.advance(op, now, ended) >= 0:
            allocator.advance(op, end, ended)


def has_room_at(
    program: Program,
    empty: Allocator,
    allocation: Allocation,
    issue: Sequence[float],
    ended: Sequence[float],
) -> bool:
    """Whether an allocator still has room at the times of another run of its program.

    It is `initial` before the first step and has `allocation` at the times of one run. False also if only
    `reach_steady_state` can tell. Only pools with protected blocks are simulated again, see [Note: pools
    apart] in zsim.engine.pools.partition.
    """
    if not allocation.pools:
        return False
    known = _known_of(program, empty)
    apart = known.apart = known.apart or ProgramApart(empty)
    timed = apart.timed(empty, apart.places(issue, ended))
    for number in range(_MAX_PASSES):
        done = timed.number(number)
        if not done.has_grown:
            reserved = {**allocation.pools, **{pool: done.pools[pool] for pool in apart.later.timed_pools}}
            return sum(reserved.values()) <= empty.memory.capacity_bytes
    return False
