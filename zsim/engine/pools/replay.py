"""The changes of some of an allocator's pools, and a run of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock
from zsim.engine.pools.repeats import Repeat, find_repeats

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
        serve, free, passing_bytes, append_size = (
            memory.serve,
            memory.free,
            memory.transient_bytes,
            self.sizes.append,
        )
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
        """Make the changes of a repeat. See [Note: a period that changes nothing] of repeats.py."""
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
