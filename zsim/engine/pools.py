"""An allocator's pools in two groups, each simulated by itself as if the driver had room for anything.

# [Note: pools apart]
As long as the driver has room, an allocator's pools are independent of each other. A pool whose blocks can be
reused at once does the same whatever the times of a run, and whatever the GPU's capacity. So pools without
blocks that `record_stream` protects are brought to their steady state once for all runs of a program. Pools
with protected blocks are simulated for every run. Each of their blocks is free before the first request of
any pool at which its last use has ended (`process_events`). Segments are never given back meanwhile: the
driver had room for all if it has room for what both groups reserve at the end.

# [Note: a period that changes nothing]
A model's equal blocks allocate and free the same sizes in the same order. Where a period of changes leaves an
allocator exactly as it found it (the same free blocks, and blocks of the same addresses in use), the next
period of the same changes does so too, and need not be made.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.devices.allocator import Allocator, AllocatorChanges
from zsim.devices.caching_allocator import UNLIMITED, CachingAllocator, MemoryBlock, PoolName


@dataclass(frozen=True)
class PartitionedChanges:
    """The changes of one run of a program, partitioned by whether their pools have blocks that are protected
    when freed.
    """

    protected: PoolEvents
    """The changes in pools with protected blocks."""
    unprotected: PoolEvents
    """The changes in the other pools."""
    protected_pools: frozenset[PoolName]
    ops: Ints
    requests: Ints
    """The positions of all requests."""
    request_ops: Ints
    """The ops before which the requests are made."""
    protected_frees: Ints
    """The indices in `protected` of frees of protected blocks."""
    last_uses: Ints
    """The ops that use these blocks last."""

    def protected_positions(self, issue: Sequence[float], ended: Sequence[float]) -> Ints:
        """The positions of the changes in pools with protected blocks.

        The free of a block in use is just before the first request at which its last use has ended. If there
        is none it is after all changes.
        """
        positions = self.protected.positions.copy()
        if len(self.protected_frees):
            times = np.append(np.asarray(issue), max(ended))[np.minimum(self.request_ops, len(issue))]
            first = np.searchsorted(times, np.asarray(ended)[self.last_uses])
            first = np.maximum(first, np.searchsorted(self.requests, positions[self.protected_frees]))
            positions[self.protected_frees] = np.append(self.requests, 2 * len(self.ops))[first] - 1
        return positions

    def position_of_op(self, op: int) -> int:
        """Twice the index of the first change from `op` on. It is 0 if there is none."""
        number = int(np.searchsorted(self.ops, op))
        return 2 * number if number < len(self.ops) else 0


def partition_changes(changes: AllocatorChanges) -> PartitionedChanges:
    """The changes of one run, split into pools with protected blocks and other pools."""
    ops, tensors, counts, streams, until_ops, stream_names = changes.columns
    is_request = counts > 0
    request_keys = (counts * len(stream_names) + streams)[is_request]
    unique_keys, key_index = np.unique(request_keys, return_inverse=True)
    sizes, stream_indices = (column.tolist() for column in np.divmod(unique_keys, max(len(stream_names), 1)))
    requests = tuple(
        (size, stream_names[stream_index]) for size, stream_index in zip(sizes, stream_indices, strict=True)
    )
    request_of_tensor = zeros_per_tensor(tensors)
    request_of_tensor[tensors[is_request]] = key_index
    pools = [CachingAllocator.pool_of(*request) for request in requests]
    index_of_pool = {name: index for index, name in enumerate(pools)}
    pool = np.array([index_of_pool[name] for name in pools], dtype=np.int64)[request_of_tensor[tensors]]
    is_protected = ~is_request & (until_ops >= 0)
    is_protected_pool = np.zeros(len(pools), dtype=bool)
    is_protected_pool[pool[is_protected]] = True
    is_in_protected_pool = is_protected_pool[pool]
    kinds = np.full(len(tensors), FREE)
    kinds[is_request] = key_index
    protected, unprotected = (
        PoolEvents(tensors[indices], kinds[indices], requests, 2 * indices)
        for indices in (np.flatnonzero(is_in_protected_pool), np.flatnonzero(~is_in_protected_pool))
    )
    is_protected_free = is_protected[is_in_protected_pool]
    return PartitionedChanges(
        protected,
        unprotected,
        frozenset(compress(pools, is_protected_pool.tolist())),
        ops,
        2 * np.flatnonzero(is_request),
        ops[is_request],
        np.flatnonzero(is_protected_free),
        until_ops[is_in_protected_pool][is_protected_free],
    )


@dataclass(frozen=True)
class PoolRun:
    """The result of one run of some pools."""

    reserved: int
    """Bytes reserved at the end of the run, more than before the first run."""
    segments: int
    """Number of segments requested in the last step of the run."""
    has_grown: bool
    """Whether the run requested any segment in any of its steps."""
    positions: Ints
    """The position of each change."""
    active_changes: Ints
    """By change, its difference of active bytes."""
    active_before: int
    """Active bytes before the first change."""
    pools: dict[PoolName, int] = field(default_factory=dict)
    """Reserved bytes by pool of the memory it ran in. Empty if the memory has grown."""


@dataclass
class PoolRuns:
    """Runs of some pools through a program, one after the other: the first run, and then later runs that are
    all alike.

    The input of a run is its events, the positions of its changes, and the position from which on segments
    are counted.
    """

    memory: CachingAllocator
    """The memory before the next run, of unlimited capacity."""
    first_input: tuple[PoolEvents, Ints, int]
    later_input: tuple[PoolEvents, Ints, int]
    expects_repeats: bool = True
    """Whether repeats are looked for. Without them every change is made, with the same result."""
    runs: list[PoolRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reserved = self.memory.reserved_bytes
        self._replays: dict[int, PoolReplay] = {}  # by the input, until a run does not grow

    def nth(self, number: int) -> PoolRun:
        """Run `number`, counted from 0. A run that does not grow equals all later runs with the same
        changes."""
        while len(self.runs) <= number:
            last_run = self.runs[-1] if self.runs else None
            repeats_last = last_run is not None and not last_run.has_grown
            if (
                last_run is not None
                and repeats_last
                and (len(self.runs) > 1 or self.first_input is self.later_input)
            ):
                self.runs.append(last_run)
            else:
                self._run(self.later_input if self.runs else self.first_input)
        return self.runs[number]

    def _run(self, run_input: tuple[PoolEvents, Ints, int]) -> None:
        memory = self.memory
        segments, active_before = memory.num_segments, memory.active_bytes
        events, positions, count_position = run_input
        replay = self._replays.pop(id(run_input), None)
        if replay is None:
            order = np.argsort(positions, kind="stable")
            cut = int(np.searchsorted(positions[order], count_position))
            replay = PoolReplay(memory, events, order, cut, finds_repeats=self.expects_repeats)
        else:
            replay.restart()
        order, cut = replay.order, replay.cut
        initial_state = replay.state() if replay.half else None
        replay.make_all(0, cut)
        segments_before, position = memory.num_segments, cut
        if replay.half:  # see [Note: a period that changes nothing]
            replay.make_all(cut, replay.half)
            position = replay.half
            if replay.state() == initial_state:
                replay.sizes *= 2
                position = len(order)
        replay.make_all(position, len(order))
        replay.free_remaining()
        has_grown = memory.num_segments > segments
        if has_grown:
            self._replays[id(run_input)] = replay
        size_of = zeros_per_tensor(replay.tensors)
        size_of[replay.tensors[replay.is_request]] = replay.sizes
        self.runs.append(
            PoolRun(
                memory.reserved_bytes - self._reserved,
                memory.num_segments - segments_before,
                has_grown,
                positions[order],
                np.where(replay.is_request, 1, -1) * size_of[replay.tensors],
                active_before,
                {} if has_grown else memory.reserved_by_pool(),
            )
        )


def peak_active_bytes(protected: PoolRun, unprotected: PoolRun, resident: int) -> int:
    """Maximum active bytes in one run of all pools. `resident` bytes are active in both groups."""
    order = np.argsort(np.concatenate([protected.positions, unprotected.positions]), kind="stable")
    change = np.concatenate([protected.active_changes, unprotected.active_changes])[order]
    before = protected.active_before + unprotected.active_before - resident
    return before + int(np.cumsum(change).max(initial=0))


class ProgramPartition:
    """The changes that all runs of a program with one allocator have in common. The allocator is `initial`
    before the first step.
    """

    def __init__(self, initial: Allocator) -> None:
        self.later_changes = partition_changes(initial.changes)
        self.first_changes = (
            self.later_changes if initial.first_changes is None else partition_changes(initial.first_changes)
        )
        self.counts_from = initial.counts_from

    def unprotected_runs(self, initial: Allocator) -> PoolRuns:
        """The runs of the pools whose blocks can be reused at once."""
        later = self._run_input(
            self.later_changes, self.later_changes.unprotected, self.later_changes.unprotected.positions
        )
        first = later
        if self.first_changes is not self.later_changes:
            first = self._run_input(
                self.first_changes, self.first_changes.unprotected, self.first_changes.unprotected.positions
            )
        return PoolRuns(initial.memory.copy(UNLIMITED), first, later)

    def protected_positions(self, issue: Sequence[float], ended: Sequence[float]) -> tuple[Ints, Ints]:
        """The positions of the changes in pools with protected blocks, in the first run and in later runs, at
        the times of one run.
        """
        later = self.later_changes.protected_positions(issue, ended)
        return later if self.first_changes is self.later_changes else self.first_changes.protected_positions(
            issue, ended
        ), later

    def protected_runs(self, initial: Allocator, positions: tuple[Ints, Ints]) -> PoolRuns:
        """The runs of the pools with protected blocks, at `positions`."""
        later = self._run_input(self.later_changes, self.later_changes.protected, positions[1])
        first = later
        if self.first_changes is not self.later_changes:
            first = self._run_input(self.first_changes, self.first_changes.protected, positions[0])
        return PoolRuns(initial.memory.copy(UNLIMITED), first, later)

    def _run_input(
        self, changes: PartitionedChanges, events: PoolEvents, positions: Ints
    ) -> tuple[PoolEvents, Ints, int]:
        return events, positions, changes.position_of_op(self.counts_from)


# States of a repeat that are kept whatever they cost. Further ones are kept while they are cheap to compare.
_MAX_STATES = 24
FREE = -1  # the kind of a change that frees a tensor


@dataclass(frozen=True)
class PoolEvents:
    """The changes of some pools in one run of a program."""

    tensors: Ints
    kinds: Ints
    """By change, the index in `requests`, or `FREE`."""
    requests: tuple[tuple[int, str], ...]
    """Bytes and stream of each kind of request."""
    positions: Ints
    """Twice the index of each change among the changes of all pools."""

    def __len__(self) -> int:
        return len(self.positions)


def zeros_per_tensor(tensors: Ints) -> Ints:
    """Zeros, one for each number of `tensors`. Numbers below 0 count from the end."""
    return np.zeros(tensors.max(initial=0) - tensors.min(initial=0) + 1, dtype=np.int64)


class _PeriodEnd(NamedTuple):
    """The end of a period: its position among the changes, the number of requests until then, and the tensors
    that were live, in the order of their requests.
    """

    position: int
    num_sizes: int
    live: tuple[int, ...]


class PoolReplay:
    """The changes of some pools in the `order` of their positions, and the result of making them.

    The result is the `blocks` in use, by tensor, and the `sizes` of the blocks of all requests. A change
    before `cut` and one from it on are made separately. `repeats` are the repeats on either side of it, where
    `finds_repeats` is set. `half` is the number of changes that are made twice, the second time for other
    tensors, all after `cut`. It is 0 where they are not.
    """

    def __init__(
        self, memory: CachingAllocator, events: PoolEvents, order: Ints, cut: int, *, finds_repeats: bool
    ) -> None:
        self.memory, self.order, self.cut = memory, order, cut
        self.blocks: dict[int, MemoryBlock] = {}
        self.sizes: list[int] = []
        self.tensors, self.kinds = events.tensors[order], events.kinds[order]
        self.is_request = is_request = self.kinds != FREE
        self._requests = [memory.request(*request) for request in events.requests]
        self._pools = list({id(request.pool): request.pool for request in self._requests}.values())
        is_next = self.tensors == np.append(self.tensors[1:], 0)
        is_passing = is_request & is_next & ~np.append(is_request[1:], True)
        is_passing[cut - 1 : cut] = False
        self._allocated_at = zeros_per_tensor(self.tensors)
        self._allocated_at[self.tensors[is_request]] = np.flatnonzero(is_request)
        self.half = self._half()
        self.repeats = self._find_repeats() if finds_repeats else []
        if any(repeat.first < self.half < repeat.end for repeat in self.repeats):
            self.half = 0
        for first, end, period in self.repeats:  # what ends a period is made apart from what begins the next
            is_passing[np.arange(first - 1, end, period)] = False
            is_passing[end - 1] = False
        is_passing[self.half - 1 : self.half] = False
        self._is_passing = is_passing  # whether the next change frees what a change allocates

    def restart(self) -> None:
        """Forget the result, to make the changes again."""
        self.blocks, self.sizes = {}, []

    def _half(self) -> int:
        half, remainder = divmod(len(self.kinds), 2)
        if remainder or self.cut > half:
            return 0
        distance = np.arange(2 * half) - self._allocated_at[self.tensors]
        is_repeated = all(np.array_equal(column[:half], column[half:]) for column in (self.kinds, distance))
        return half if is_repeated else 0

    def _find_repeats(self) -> list[Repeat]:
        """The repeats before `cut`, and those from it on."""
        allocated_at, cut = self._allocated_at[self.tensors], self.cut
        later = find_repeats(self.kinds[cut:], allocated_at[cut:] - cut)
        is_same = cut and cut == self.half
        earlier = later if is_same else find_repeats(self.kinds[:cut], allocated_at[:cut])
        return [*earlier, *(Repeat(cut + first, cut + end, period) for first, end, period in later)]

    def make_all(self, first: int, end: int) -> None:
        """Make the changes from index `first` to before `end`, repeats as repeats. None reaches across
        either.
        """
        for repeat in self.repeats:
            if first <= repeat.first < end:
                self.make(first, repeat.first)
                self.make_repeat(repeat)
                first = repeat.end
        self.make(first, end)

    def make(self, first: int, end: int) -> None:
        """Make the changes from index `first` to before `end`."""
        memory, blocks, requests = self.memory, self.blocks, self._requests
        serve, free, passing_bytes = memory.serve, memory.free, memory.transient_bytes
        append_size = self.sizes.append
        columns = self.tensors, self.kinds, self._is_passing
        steps = zip(*(column[first:end].tolist() for column in columns), strict=True)
        for tensor, kind, may_pass in steps:
            if kind == FREE:
                free(blocks.pop(tensor))
                continue
            request = requests[kind]
            if may_pass and (block_bytes := passing_bytes(request)):  # the next change frees it
                next(steps)
                append_size(block_bytes)
                continue
            block = serve(request)
            assert block is not None  # its capacity is unlimited
            blocks[tensor] = block
            append_size(block.bytes)

    def make_repeat(self, repeat: Repeat) -> None:
        """Make the changes of a repeat. See [Note: a period that changes nothing]."""
        position, end, period = repeat
        period_ends: dict[Hashable, _PeriodEnd] = {}  # by state, at the ends of periods
        kept = 0  # numbers in the states
        while position + period <= end and (
            len(period_ends) < _MAX_STATES or kept <= position - repeat.first
        ):
            self.make(position, position + period)
            position += period
            kept += self.state_size()
            period_end = _PeriodEnd(position, len(self.sizes), tuple(self.blocks))
            first_equal = period_ends.setdefault(self.state(), period_end)
            if first_equal is not period_end:
                cycle = position - first_equal.position
                num_cycles = (end - position) // cycle
                self.sizes += self.sizes[first_equal.num_sizes :] * num_cycles
                self._reassign_blocks(first_equal.live, cycle, num_cycles)
                position += num_cycles * cycle
                break
        self.make(position, end)

    def state(self) -> Hashable:
        """The blocks in use, in the order of their requests, and the free blocks of the pools."""
        live = tuple([(block.address, block.bytes) for block in self.blocks.values()])
        return live, *(tuple(pool.keys) for pool in self._pools)

    def state_size(self) -> int:
        """About how many numbers `state` has."""
        return 2 * len(self.blocks) + sum(len(pool.keys) for pool in self._pools)

    def _reassign_blocks(self, live_before: Sequence[int], cycle: int, num_cycles: int) -> None:
        """Give the blocks in use to the tensors that have them `num_cycles` times `cycle` changes later. A
        cycle ago the tensors `live_before` had them.
        """
        blocks: dict[int, MemoryBlock] = {}
        for (tensor, block), previous_tensor in zip(self.blocks.items(), live_before, strict=True):
            if tensor == previous_tensor:  # from before the repeat, and still in use after it
                blocks[tensor] = block
                continue
            allocated_at = int(self._allocated_at[tensor])
            assert allocated_at - self._allocated_at[previous_tensor] == cycle
            blocks[int(self.tensors[allocated_at + num_cycles * cycle])] = block
        self.blocks = blocks

    def free_remaining(self) -> None:
        """Free the blocks that a step leaves, except for the states that its first update makes."""
        for tensor, block in self.blocks.items():
            if tensor >= 0:
                self.memory.free(block)


_WINDOW = 16  # changes that must be the same before two places count as the same place of a period
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # any odd number: equal windows have equal hashes
_LEAST_PERIODS = 4
_MAX_PERIODS = 16  # lengths that are tried: those of a block, of a micro-batch, of a group of either


class Repeat(NamedTuple):
    """Changes from `first` to before `end`, each of which is the same as the one `period` changes later, as
    far as this is before `end` too."""

    first: int
    end: int
    period: int


def find_repeats(kinds: Ints, allocated_at: Ints) -> list[Repeat]:
    """The repeats of at least `_LEAST_PERIODS` periods among changes, which do not overlap.

    The longest come first: micro-batches that repeat, rather than the blocks in each. `kinds` holds the
    requests of allocations, and `allocated_at` the index at which the tensor of each change is allocated. Two
    frees are the same if they free what was allocated as many changes ago.
    """
    count = len(kinds)
    age = np.arange(count) - allocated_at
    codes = np.where(age > 0, -1 - age, kinds)
    if count < _LEAST_PERIODS * _WINDOW:
        return []
    hashes = np.zeros(count - _WINDOW + 1, dtype=np.uint64)
    for offset in range(_WINDOW):
        hashes = hashes * _FACTOR + codes[offset : offset + len(hashes)].astype(np.uint64)
    order = np.argsort(hashes, kind="stable")
    is_again = hashes[order][1:] == hashes[order][:-1]
    distances, counts = np.unique(np.diff(order)[is_again], return_counts=True)
    periods = distances[np.argsort(-counts, kind="stable")[:_MAX_PERIODS]]
    candidates = [candidate for period in periods.tolist() for candidate in _repeats_of_period(codes, period)]
    candidates.sort(
        key=lambda candidate: (
            _LEAST_PERIODS * candidate.period - (candidate.end - candidate.first),
            candidate,
        )
    )
    repeats: list[Repeat] = []
    for candidate in candidates:
        for first, end in _gaps(repeats, candidate.first, candidate.end):
            if end - first >= _LEAST_PERIODS * candidate.period:
                insort(repeats, Repeat(first, end, candidate.period))
    return repeats


def _repeats_of_period(codes: Ints, period: int) -> Iterator[Repeat]:
    """The longest intervals that repeat themselves after `period` changes, of `_LEAST_PERIODS` periods or
    more.
    """
    is_same = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
    edges = np.flatnonzero(is_same[1:] != is_same[:-1]).reshape(-1, 2) + np.array([0, period])
    is_long = edges[:, 1] - edges[:, 0] >= _LEAST_PERIODS * period
    for first, end in edges[is_long].tolist():
        yield Repeat(first, end, period)


def _gaps(repeats: Sequence[Repeat], first: int, end: int) -> list[tuple[int, int]]:
    """The intervals from `first` to `end` that no repeat of `repeats`, which are in order, has."""
    edges = [first]
    for repeat in repeats:
        if repeat.first < end and repeat.end > first:
            edges += [max(repeat.first, first), min(repeat.end, end)]
    edges.append(end)
    return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if left < right]
