"""The caching allocator on the host's clock: when memory runs short, the host waits and calls the driver.

Blocks that `record_stream` protects are not handed out again before their last use has ended on the GPU.
Every allocation first collects those whose use has ended (`process_events`). If then neither a cached block
fits nor the driver has room, torch waits for *all* outstanding uses (`synchronize_and_free_events`), gives
every cached segment back (`release_cached_blocks`) and asks once more. Its statistics call this
`num_alloc_retries`. A `cudaFree` returns when the GPU has done all work issued to it, so the host loses its
lead. The allocations that follow ask the driver for the released memory again, segment by segment. The
request that failed is not served from the blocks that became free: it gets a new segment, or torch raises an
out-of-memory error (here the failure is counted, and the step goes on as if the request did fit).

Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np

from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock
from zsim.plan.memory.tensors import TensorChange, TensorColumns


class AllocatorChanges:
    """Tensors allocated and freed, by the op just before which that happens: the `columns` of the changes in
    that order."""

    def __init__(self, columns: TensorColumns) -> None:
        order = np.argsort(columns.op, kind="stable")
        op, tensor, count, stream, until = (column[order] for column in columns[:5])
        self.columns = TensorColumns(op, tensor, count, stream, until, columns.streams)

    @classmethod
    def of(cls, changes: Iterable[TensorChange]) -> AllocatorChanges:
        """The changes of these rows."""
        return cls(TensorColumns.from_changes(list(changes)))

    @cached_property
    def ordered(self) -> list[TensorChange]:
        """The changes, one after the other."""
        return self.columns.rows()

    @cached_property
    def changes_of_op(self) -> dict[int, list[TensorChange]]:
        """The changes just before each op that has any."""
        return {op: list(changes) for op, changes in groupby(self.ordered, key=itemgetter(0))}

    @cached_property
    def request_ops(self) -> frozenset[int]:
        """The ops before which tensors are allocated, where it matters which uses have ended."""
        return frozenset(change.op for change in self.ordered if change.bytes)


@dataclass
class AllocatorCounts:
    """How often an allocator has gone to the driver."""

    retries: int = 0
    """Times the cache was given back."""
    failures: int = 0
    """Requests that did not fit even then."""
    released: int = 0
    """Number of segments given back to the driver."""
    segments: int = 0
    """Number of segments got from the driver."""


def _no_seconds(_op: int) -> float:
    return 0.0


@dataclass
class Allocator:
    """One GPU's allocator on its host's clock."""

    memory: CachingAllocator
    changes: AllocatorChanges
    """The tensors that its program allocates and frees."""
    outstanding: Callable[[int], Sequence[int]]
    """`outstanding(op)`: the last op that was issued to each stream before `op`."""
    malloc_seconds: float = 0.0
    """Host time to get one segment from the driver."""
    free_seconds: float = 0.0
    """Host time to give one segment back."""
    retry_seconds: Callable[[int], float] = _no_seconds
    """`retry_seconds(op)`: extra host time of a retry before `op`, until the ranks that wait next have given
    their caches back. It is at most the time since the last retry, when they were at the same point.
    """
    counts_from: int = 0
    """The op with which `counts` begin."""
    counts: AllocatorCounts = field(default_factory=AllocatorCounts)
    first_changes: AllocatorChanges | None = None
    """The changes of the program's first run, where they differ. Tensors with numbers below 0 are never
    freed.
    """
    unspent_seconds: float = 0.0  # host time at the driver that the host has not yet spent
    has_retried: bool = False  # in any run
    _last_retry_end: float = -math.inf  # when the ranks went on after the last retry
    _blocks: dict[int, MemoryBlock] = field(default_factory=dict)
    _protected: list[tuple[int, MemoryBlock]] = field(default_factory=list)
    _next_end: float = math.inf  # no protected block is free before this time; -inf: not known
    _position: int = 0
    _last_op: int = -1
    _is_counting: bool = False
    _is_draining: bool = False

    def advance(self, op: int, now: float, ended: Sequence[float]) -> int:
        """Make the changes before `op` is issued. Returns -1, or an op that the host must first wait for.

        Idempotent per op: a host that is resumed after blocking calls again, and nothing is applied twice.
        """
        changes = self.current.changes_of_op.get(op)
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
    def current(self) -> AllocatorChanges:
        """The changes of the present run."""
        return self.first_changes or self.changes

    def take_seconds(self) -> float:
        """Host seconds at the driver since the last call."""
        seconds, self.unspent_seconds = self.unspent_seconds, 0.0
        return seconds

    def restart(self) -> None:
        """Begin the program again: free all tensors but those with numbers below 0, and count peaks from the
        present sizes."""
        self._free_protected()
        for tensor, block in self._blocks.items():
            if tensor >= 0:
                self.memory.free(block)
        self._blocks, self.first_changes = {}, None
        self._position, self._last_op = 0, -1
        self._is_counting = False
        self.memory.restart_peaks()
        self.unspent_seconds, self._last_retry_end = 0.0, -math.inf

    def copy(self) -> Allocator:
        """An allocator that begins with the same segments. Allowed only before the first run or after
        `restart`.
        """
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

    def copy_with_counts(self) -> Allocator:
        """A copy with the counts of what it has done. Allowed only after `restart`."""
        return replace(self.copy(), counts=replace(self.counts), has_retried=self.has_retried)

    def restore(self, source: Allocator) -> None:
        """Take over the segments and counts of one that has run the same program."""
        self.memory, self.first_changes = source.memory.copy(), source.first_changes
        self.counts, self.has_retried = replace(source.counts), source.has_retried

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
        segments_before, block = memory.num_segments, None
        if not self._is_draining:
            if self._next_end <= now:
                self._collect(now, ended)
            block = memory.malloc(count, stream)
            if block is None:
                block = self._replace_oversize(count, stream)
        if block is None:
            self._is_draining = True
            for outstanding_op in self.outstanding(op):
                end = ended[outstanding_op]
                if not end <= now:  # also uses that have not ended: nan
                    return outstanding_op
            block = self._retry(change, op, now)
            self._is_draining = False
        self._blocks[tensor] = block
        if memory.num_segments > segments_before:
            segments = memory.num_segments - segments_before
            self.counts.segments += segments
            self.unspent_seconds += segments * self.malloc_seconds
        return -1

    def _replace_oversize(self, count: int, stream: str) -> MemoryBlock | None:
        """A block in the place of oversize ones, if the allocator has such. The host waits for each
        `cudaFree`."""
        released_before = self.memory.num_released
        if not self.memory.release_oversize(count, stream):
            return None
        released = self.memory.num_released - released_before
        self.counts.released += released
        self.unspent_seconds += released * self.free_seconds
        return self.memory.malloc(count, stream)

    def _retry(self, change: TensorChange, op: int, now: float) -> MemoryBlock:
        self.counts.retries += 1
        self.has_retried = True
        self._free_protected()
        released = self.memory.release_cached()
        self.counts.released += released
        if released:
            rank_skew = min(self.retry_seconds(op), now - self._last_retry_end)
            self.unspent_seconds += rank_skew + released * self.free_seconds
            self._last_retry_end = now + self.unspent_seconds
        block = self.memory.malloc(change.bytes, change.stream, is_new=True)
        if block is None:
            self.counts.failures += 1
            block = self.memory.malloc_over_capacity(change.bytes, change.stream)
        return block

    def _free_protected(self) -> None:
        for _, block in self._protected:
            self.memory.free(block)
        self._protected, self._next_end = [], math.inf

    def _collect(self, now: float, ended: Sequence[float]) -> None:
        """Free protected blocks whose last use has ended by now."""
        still_protected, soonest, is_known = [], math.inf, True
        for entry in self._protected:
            until, block = entry
            end = ended[until]
            if end <= now:
                self.memory.free(block)
                continue
            still_protected.append(entry)
            if end < soonest:
                soonest = end
            elif end != end:  # nan: has not ended
                is_known = False
        self._protected = still_protected
        self._next_end = soonest if is_known else -math.inf
