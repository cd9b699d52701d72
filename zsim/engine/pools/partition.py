"""An allocator's pools in two groups, each simulated by itself as if the driver had room for anything.

# [Note: pools apart]
As long as the driver has room, an allocator's pools are independent of each other. A pool whose blocks can be
reused at once does the same whatever the times of a run, and whatever the GPU's capacity. So pools without
blocks that `record_stream` protects are brought to their steady state once for all runs of a program. Pools
with protected blocks are simulated for every run. Each of their blocks is free before the first request of
any pool at which its last use has ended (`process_events`). Segments are never given back meanwhile: the
driver had room for all if it has room for what both groups reserve at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from zsim.arrays import Ints
from zsim.devices.allocator import Allocator, AllocatorChanges
from zsim.devices.caching_allocator import UNLIMITED, CachingAllocator, PoolName
from zsim.engine.pools.replay import FREE, PoolEvents, PoolReplay, zeros_per_tensor


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
        if replay.half:  # see [Note: a period that changes nothing] of repeats.py
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
