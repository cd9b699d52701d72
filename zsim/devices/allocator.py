"""The caching allocator as the host meets it: when it runs short, the host waits, and asks the driver.

Blocks that `record_stream` protects are not handed out again before their last use has ended on the GPU;
every allocation first collects those whose use has ended (`process_events`). Where then neither a cached
block fits nor the driver has room, torch waits for *all* outstanding uses (`synchronize_and_free_events`),
gives every cached segment back (`release_cached_blocks`) and asks once more: `num_alloc_retries` in its
statistics. A `cudaFree` returns when the GPU has done all that was issued to it, so the host loses its lead;
and what was given back is asked of the driver anew, segment by segment, by the allocations that follow. The
request itself is not looked for among the blocks that became free: it is a new segment, or an out-of-memory
error in torch (here that is counted, and the step goes on as if it did fit).

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock
from zsim.plan.memory.tensors import TensorChange


class Changes:
    """Tensors allocated and freed, `by_op` just before which that happens; `asking`: the ops before which
    some are allocated, which is when it matters what has ended."""

    def __init__(self, ordered: Sequence[TensorChange]) -> None:
        self.by_op: dict[int, list[TensorChange]] = {}
        for change in ordered:
            self.by_op.setdefault(change.op, []).append(change)
        self.asking = frozenset(change.op for change in ordered if change.bytes)


@dataclass
class AllocatorCounts:
    """`retries`: how often the cache was given back; `failures`: requests that did not fit even then;
    `released` and `segments`: what the driver took back and gave."""

    retries: int = 0
    failures: int = 0
    released: int = 0
    segments: int = 0


@dataclass
class Allocator:
    """One GPU's allocator on its host's clock.

    `changes`: what its program allocates and frees; `first_changes`: what its first run does; of that,
    tensors with numbers below 0 stay for good. `outstanding(op)`: the last op that was issued to each stream
    before `op`. `malloc_seconds` and `free_seconds`: the host's for one segment, asked of the driver
    and given back; `retry_seconds`: what it takes besides until all ranks have given their caches back.
    `counts` begin with op `counts_from`.
    """

    memory: CachingAllocator
    changes: Changes
    outstanding: Callable[[int], Sequence[int]]
    malloc_seconds: float = 0.0
    free_seconds: float = 0.0
    retry_seconds: float = 0.0
    counts_from: int = 0
    counts: AllocatorCounts = field(default_factory=AllocatorCounts)
    first_changes: Changes | None = None
    owed_seconds: float = 0.0  # the host's, not yet taken
    has_retried: bool = False  # in any run
    _blocks: dict[int, MemoryBlock] = field(default_factory=dict)
    _protected: list[tuple[int, MemoryBlock]] = field(default_factory=list)
    _next_end: float = math.inf  # before which no protected block is free; -inf where that is not known
    _position: int = 0
    _last_op: int = -1
    _is_counting: bool = False
    _is_draining: bool = False

    def advance(self, op: int, now: float, ended: Sequence[float]) -> int:
        """Make the changes before `op` is issued; -1, or an op that the host must first wait for.

        A host that then blocks on something else comes by once more: the changes are made once.
        """
        changes = self.current.by_op.get(op)
        if changes is None or op == self._last_op:
            return -1
        if not self._is_counting and op >= self.counts_from:
            self._is_counting, self.counts = True, AllocatorCounts(failures=self.counts.failures)
        for change in changes[self._position :] if self._position else changes:
            if change.bytes:
                waits_for = self._allocate(change, op, now, ended)
                if waits_for >= 0:
                    return waits_for
            else:
                self._free(change, ended)
            self._position += 1
        self._position, self._last_op = 0, op
        return -1

    @property
    def current(self) -> Changes:
        """Those of the run that it is in."""
        return self.first_changes or self.changes

    def take_seconds(self) -> float:
        """The host's time at the driver since it was last taken."""
        seconds, self.owed_seconds = self.owed_seconds, 0.0
        return seconds

    def restart(self) -> None:
        """Begin the program again: nothing is outstanding any more, and peaks begin with what there is."""
        self._free_protected()
        for tensor, block in self._blocks.items():
            if tensor >= 0:
                self.memory.free(block)
        self._blocks, self.first_changes = {}, None
        self._position, self._last_op = 0, -1
        self._is_counting = False
        self.memory.restart_peaks()
        self.owed_seconds = 0.0

    def copy(self) -> Allocator:
        """One that begins with the segments that this one has, before its first run or after `restart`."""
        return Allocator(
            self.memory.copy(),
            self.changes,
            self.outstanding,
            self.malloc_seconds,
            self.free_seconds,
            self.retry_seconds,
            self.counts_from,
            first_changes=self.first_changes,
        )

    def _free(self, change: TensorChange, ended: Sequence[float]) -> None:
        _, tensor, _, _, until = change
        block = self._blocks.pop(tensor)
        if until < 0:
            self.memory.free(block)
        else:
            self._protected.append((until, block))
            end = ended[until]
            self._next_end = -math.inf if math.isnan(end) else min(self._next_end, end)

    def _allocate(self, change: TensorChange, op: int, now: float, ended: Sequence[float]) -> int:
        memory = self.memory
        _, tensor, count, stream, _ = change
        before, block = memory.num_segments, None
        if not self._is_draining:
            if self._next_end <= now:
                self._collect(now, ended)
            block = memory.malloc(count, stream)
        if block is None:
            self._is_draining = True
            for other in self.outstanding(op):
                end = ended[other]
                if not end <= now:  # also what has not ended, which is nan
                    return other
            block = self._retry(change)
            self._is_draining = False
        self._blocks[tensor] = block
        if memory.num_segments > before:
            segments = memory.num_segments - before
            self.counts.segments += segments
            self.owed_seconds += segments * self.malloc_seconds
        return -1

    def _retry(self, change: TensorChange) -> MemoryBlock:
        self.counts.retries += 1
        self.has_retried = True
        self._free_protected()
        released = self.memory.release_cached()
        self.counts.released += released
        if released:
            self.owed_seconds += self.retry_seconds + released * self.free_seconds
        block = self.memory.malloc_new(change.bytes, change.stream)
        if block is None:
            self.counts.failures += 1
            block = self.memory.malloc_anyway(change.bytes, change.stream)
        return block

    def _free_protected(self) -> None:
        for _, block in self._protected:
            self.memory.free(block)
        self._protected, self._next_end = [], math.inf

    def _collect(self, now: float, ended: Sequence[float]) -> None:
        """Take back blocks whose last use has ended by now."""
        left = [entry for entry in self._protected if not ended[entry[0]] <= now]  # also what is nan
        if len(left) < len(self._protected):
            for until, block in self._protected:
                if ended[until] <= now:
                    self.memory.free(block)
            self._protected = left
        ends = [ended[until] for until, _ in left]
        is_known = not math.isnan(sum(ends))
        self._next_end = min(ends, default=math.inf) if is_known else -math.inf
