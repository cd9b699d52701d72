"""The changes of some of an allocator's pools, and a run of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.dataclass import dataclass
from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock
from zsim.engine.pools.repeats import Repeat, repeats

_MAX_STATES = 24  # of a repeat: one that has not come back by then may never do
FREE = -1  # the kind of a change that frees a tensor


@dataclass(frozen=True)
class PoolsPart:
    """The changes of some pools in one run of a program."""

    tensors: Ints
    kinds: Ints
    """By change, the index in `requests`, or `FREE`."""
    requests: tuple[tuple[int, str], ...]
    """Bytes and stream of each kind of request."""
    places: Ints
    """Twice the index of each change among the changes of all pools."""

    def __len__(self) -> int:
        return len(self.places)


def by_tensor(tensors: Ints) -> Ints:
    """Zeros, one for each number of `tensors`. Numbers below 0 count from the end."""
    return np.zeros(tensors.max(initial=0) - tensors.min(initial=0) + 1, dtype=np.int64)


class _Known(NamedTuple):
    """The end of a period: its position among the changes, the number of requests until then, and the tensors
    that were live, in the order of their requests.
    """

    place: int
    num_sizes: int
    live: tuple[int, ...]


class PartRun:
    """The changes of some pools in the `order` of their positions, and the result of making them.

    The result is the `blocks` in use, by tensor, and the `sizes` of the blocks of all requests. A change
    before `cut` and one from it on are made separately. `repeats` are the repeats from `cut` on, where
    `finds_repeats` is set. `half` is the number of changes (from `cut` on) that are made twice, the second
    time for other tensors. It is 0 where they are not.
    """

    def __init__(
        self, memory: CachingAllocator, part: PoolsPart, order: Ints, cut: int, *, finds_repeats: bool
    ) -> None:
        self.memory = memory
        self.blocks: dict[int, MemoryBlock] = {}
        self.sizes: list[int] = []
        self.tensors, self.kinds = part.tensors[order], part.kinds[order]
        self.is_asking = is_asking = self.kinds != FREE
        self._requests = [memory.request(*request) for request in part.requests]
        is_next = self.tensors == np.append(self.tensors[1:], 0)
        is_passing = is_asking & is_next & ~np.append(is_asking[1:], True)
        is_passing[cut - 1 : cut] = False
        self._made_at = by_tensor(self.tensors)
        self._made_at[self.tensors[is_asking]] = np.flatnonzero(is_asking)
        self.repeats = [
            Repeat(cut + first, cut + end, period)
            for first, end, period in (
                repeats(self.kinds[cut:], self._made_at[self.tensors[cut:]] - cut) if finds_repeats else ()
            )
        ]
        for first, end, period in self.repeats:  # what ends a period is made apart from what begins the next
            is_passing[np.arange(first - 1, end, period)] = False
            is_passing[end - 1] = False
        self.half = self._half(cut)
        is_passing[self.half - 1 : self.half] = False
        # of each change its tensor, its kind, and whether the next change frees what it allocates
        self._columns = self.tensors.tolist(), self.kinds.tolist(), is_passing.tolist()

    def _half(self, cut: int) -> int:
        half, rest = divmod(len(self.kinds), 2)
        if rest or not cut <= half <= min([half, *(repeat.first for repeat in self.repeats)]):
            return 0
        ago = np.arange(2 * half) - self._made_at[self.tensors]
        are_alike = all(np.array_equal(each[:half], each[half:]) for each in (self.kinds, ago))
        return half if are_alike else 0

    def make(self, first: int, end: int) -> None:
        """Make the changes from index `first` to before `end`."""
        memory, blocks, requests = self.memory, self.blocks, self._requests
        serve, free, passing_bytes, add = memory.serve, memory.free, memory.passing_bytes, self.sizes.append
        steps = zip(*(column[first:end] for column in self._columns), strict=True)
        for tensor, kind, may_pass in steps:
            if kind == FREE:
                free(blocks.pop(tensor))
                continue
            request = requests[kind]
            if may_pass and (taken := passing_bytes(request)):  # the next change frees it
                next(steps)
                add(taken)
                continue
            block = serve(request)
            assert block is not None  # its capacity is unlimited
            blocks[tensor] = block
            add(block.bytes)

    def make_repeat(self, repeat: Repeat) -> None:
        """Make the changes of a repeat. See [Note: a period that changes nothing] of repeats.py."""
        place, end, period = repeat
        known: dict[Hashable, _Known] = {}  # by state, at the ends of periods
        while place + period <= end and len(known) < _MAX_STATES:
            self.make(place, place + period)
            place += period
            now = _Known(place, len(self.sizes), tuple(self.blocks))
            before = known.setdefault(self.state(), now)
            if before is not now:
                cycle = place - before.place
                left = (end - place) // cycle
                self.sizes += self.sizes[before.num_sizes :] * left
                self._rename(before.live, cycle, left)
                place += left * cycle
                break
        self.make(place, end)

    def state(self) -> Hashable:
        """The blocks in use, in the order of their requests, and the free blocks of the pools."""
        pools = {id(request.pool): request.pool for request in self._requests}
        live = tuple([(block.address, block.bytes) for block in self.blocks.values()])
        return live, *(tuple(pool.keys) for pool in pools.values())

    def _rename(self, were_live: Sequence[int], cycle: int, num_cycles: int) -> None:
        """Give the blocks in use to the tensors that have them `num_cycles` times `cycle` changes later. A
        cycle ago the tensors `live_before` had them.
        """
        later: dict[int, MemoryBlock] = {}
        for (tensor, block), old in zip(self.blocks.items(), were_live, strict=True):
            if tensor == old:  # from before the repeat, and still in use after it
                later[tensor] = block
                continue
            made_at = int(self._made_at[tensor])
            assert made_at - self._made_at[old] == cycle
            later[int(self.tensors[made_at + num_cycles * cycle])] = block
        self.blocks = later

    def free_the_rest(self) -> None:
        """Free the blocks that a step leaves, except for the states that its first update makes."""
        for tensor, block in self.blocks.items():
            if tensor >= 0:
                self.memory.free(block)
