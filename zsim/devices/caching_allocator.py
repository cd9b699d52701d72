"""PyTorch's caching allocator of GPU memory, block by block: reserved bytes, and requests that do not fit.

Follows c10/cuda/CUDACachingAllocator.cpp, torch 2.13 (sizes and order are those of 1.12 too). Sizes are
rounded up to 512 bytes. Requests of up to 1 MiB come from the small pool, larger ones from the large pool.
Every stream has both pools. A request takes the smallest free block that holds it, the first of these by
address. The rest of the block is split off (in the large pool only if it is more than 1 MiB).

Where no block fits, the driver is asked for a segment: 2 MiB for small blocks, 20 MiB for requests below 10
MiB, else the size rounded up to 2 MiB. Freed blocks merge with adjacent free blocks of their segment, and
segments stay. Only when the driver has no room are all segments given back that are free from end to end
(`release_cached_blocks`).

With `max_split_size_mb` blocks of that size or more are oversize: they are not split, serve only requests of
that size or more that leave less than 20 MiB of them, and are given back one by one, the smallest that would
do or else the largest first, before all others (`release_available_cached_blocks`). With
`roundup_power2_divisions` sizes are rounded up to such a part of the power of two below them.

With `expandable_segments:True` a pool is one range of addresses that grows by pages of 2 or 20 MiB, and the
pages that lie completely in free blocks are given back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_BUFFER = 2 * 2**20
LARGE_BUFFER = 20 * 2**20
MIN_LARGE_ALLOC = 10 * 2**20
ROUND_LARGE = 2 * 2**20
_ADDRESS_BITS = 64  # more than any address has
UNLIMITED = 2**62  # bytes: the capacity of a GPU that has room for anything

PoolName = tuple[str, bool]  # the stream, and whether it is the pool of small blocks


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A contiguous part of a segment from `address` on, between the blocks `previous` and `next`."""

    pool: _Pool
    address: int
    bytes: int
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
    is_free: bool = False
    unmapped_bytes: int = 0
    """Bytes of a free block that have no memory (in expandable segments only)."""
    key: int = 0
    """Its position among the free blocks, see `_key`."""

    def pages(self) -> int:
        """Bytes of the pages that lie wholly in the block."""
        page = self.pool.page_bytes
        first, end = _round_up(self.address, page), (self.address + self.bytes) // page * page
        return max(0, end - first)


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of one stream and kind."""

    is_small: bool
    keys: list[int] = field(default_factory=list)
    """The keys of the blocks in `free`."""
    free: list[MemoryBlock] = field(default_factory=list)
    """The free blocks, by size and address."""
    last: MemoryBlock | None = None
    """The last block of an expandable pool."""

    @property
    def page_bytes(self) -> int:
        return SMALL_BUFFER if self.is_small else LARGE_BUFFER

    def insert(self, block: MemoryBlock) -> None:
        """Count `block` as free."""
        key = block.key = _key(block.bytes, block.address)
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.free.insert(index, block)

    def remove(self, block: MemoryBlock) -> None:
        """Count a free block as free no longer."""
        index = bisect_left(self.keys, block.key)
        del self.keys[index], self.free[index]


class Request(NamedTuple):
    """A request of one stream and size."""

    pool: _Pool
    size: int
    """The size rounded up."""
    min_split_bytes: int
    """The minimum remainder of a block that is split off."""
    key: int
    """The key of the first free block that holds the request, if there is one."""
    too_large_bytes: int = UNLIMITED
    """The size from which on a free block is too large for the request."""


class CachingAllocator:
    """Blocks and segments in the `capacity_bytes` of one GPU's memory that torch may take.

    `active_bytes` are the bytes of blocks in use, `reserved_bytes` of all segments. `num_segments` counts
    requests that the driver served, `num_released` segments given back to it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        is_expandable: bool = False,
        max_split_bytes: int = UNLIMITED,
        roundup_divisions: int = 1,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_expandable = is_expandable
        self.max_split_bytes, self.roundup_divisions = max_split_bytes, roundup_divisions
        self.active_bytes = self.reserved_bytes = 0
        self.peak_active_bytes = self.peak_reserved_bytes = 0
        self.num_segments = self.num_released = 0
        self._pools: dict[PoolName, _Pool] = {}
        self._requests: dict[tuple[int, str], Request] = {}
        self._heads: dict[int, MemoryBlock] = {}  # the first block of each segment, by address
        self._next_address = 0

    def request(self, count: int, stream: str) -> Request:
        """The request for `count` bytes on `stream`, of which there is one."""
        return self._requests.get((count, stream)) or self._request(count, stream)

    def malloc(self, count: int, stream: str, *, is_new: bool = False) -> MemoryBlock | None:
        """A block of `count` bytes, cached or new. None where the driver has no room for more.

        With `is_new` the block is new memory from the driver (not in expandable segments).
        """
        return self.serve(self.request(count, stream), is_new=is_new)

    def serve(self, request: Request, *, is_new: bool = False) -> MemoryBlock | None:
        """A block for `request`, as of `malloc`."""
        pool, size, min_split_bytes, key, too_large_bytes = request
        keys, free = pool.keys, pool.free
        if self.is_expandable:
            block = self._take_mapped(pool, request) or self._grow_end(pool, size)
        else:
            index = len(keys) if is_new else bisect_left(keys, key)
            if index < len(keys) and free[index].bytes < too_large_bytes:
                del keys[index]
                block = free.pop(index)
            else:
                block = self._grow(pool, size)
        if block is None:
            return None
        remainder_bytes = block.bytes - size
        if remainder_bytes >= min_split_bytes:  # is split off
            address, next_block = block.address + size, block.next
            key = remainder_bytes << _ADDRESS_BITS | address
            remainder = MemoryBlock(
                pool, address, remainder_bytes, block, next_block, True, block.unmapped_bytes, key
            )
            if next_block is not None:
                next_block.previous = remainder
            elif pool.last is block:
                pool.last = remainder
            block.next, block.bytes, block.unmapped_bytes = remainder, size, 0
            index = bisect_left(keys, key)
            keys.insert(index, key)
            free.insert(index, remainder)
        block.is_free = False
        active = self.active_bytes = self.active_bytes + block.bytes
        if active > self.peak_active_bytes:
            self.peak_active_bytes = active
        return block

    def transient_bytes(self, request: Request) -> int:
        """Bytes of the cached block that serves a request which is freed before anything else happens in its
        pool, and so leaves the pool as it is.

        It is 0 where the driver would be asked (or might be, in expandable segments).
        """
        pool, size, min_split_bytes, key, too_large_bytes = request
        index = bisect_left(pool.keys, key)
        if index == len(pool.keys) or self.is_expandable or pool.free[index].bytes >= too_large_bytes:
            return 0
        cached = pool.free[index].bytes
        block_bytes = size if cached - size >= min_split_bytes else cached
        active = self.active_bytes + block_bytes
        if active > self.peak_active_bytes:
            self.peak_active_bytes = active
        return block_bytes

    def malloc_over_capacity(self, count: int, stream: str) -> MemoryBlock:
        """A new block of `count` bytes, whether the driver has room for it or not."""
        capacity, self.capacity_bytes = self.capacity_bytes, UNLIMITED
        block = self.malloc(count, stream, is_new=True)
        self.capacity_bytes = capacity
        assert block is not None
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free a block, merged with adjacent free blocks."""
        size = block.bytes
        self.active_bytes -= size
        block.is_free = True
        next_block, previous_block = block.next, block.previous
        pool = block.pool
        keys, free = pool.keys, pool.free
        if next_block is not None and next_block.is_free:
            index = bisect_left(keys, next_block.key)
            del keys[index], free[index]
            size = _absorb(block, next_block)
        if previous_block is not None and previous_block.is_free:
            index = bisect_left(keys, previous_block.key)
            del keys[index], free[index]
            size = _absorb(previous_block, block)
            block = previous_block
        key = block.key = size << _ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        free.insert(index, block)

    def release_oversize(self, count: int, stream: str) -> bool:
        """Give oversize blocks back to the driver, of together `count` bytes or more. Returns whether there
        were enough.
        """
        if self.max_split_bytes == UNLIMITED:
            return False
        pool, size, *_ = self.request(count, stream)
        index = bisect_left(pool.keys, _key(max(size, self.max_split_bytes), 0))
        oversize = [block for block in pool.free if block.bytes >= self.max_split_bytes]
        victims = pool.free[index : index + 1] or oversize[::-1]
        released = 0
        for block in victims:
            if released >= max(size, self.max_split_bytes):
                break
            pool.remove(block)
            del self._heads[block.address]
            released += block.bytes
            self._release(block.bytes)
        return released >= max(size, self.max_split_bytes)

    def release_cached(self) -> int:
        """Give segments that are free from end to end (or free pages) back to the driver. Returns how many
        segments were given back.
        """
        released_before = self.num_released
        for pool in self._pools.values():
            for block in list(pool.free):
                if self.is_expandable:
                    pages = block.pages()
                    self._release(max(0, pages - block.unmapped_bytes))
                    block.unmapped_bytes = max(pages, block.unmapped_bytes)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    del self._heads[block.address]
                    self._release(block.bytes)
        return self.num_released - released_before

    def layout(self) -> tuple[Hashable, ...]:
        """All blocks of all segments and the peaks so far: allocators with equal layouts give the same blocks
        to the same requests while the driver has room, whatever their capacity."""
        settings = self.is_expandable, self.max_split_bytes, self.roundup_divisions
        blocks: list[Hashable] = [settings, self.peak_active_bytes, self.peak_reserved_bytes]
        names = {id(pool): name for name, pool in self._pools.items()}
        for head in self._heads.values():
            blocks.append(names[id(head.pool)])
            block: MemoryBlock | None = head
            while block is not None:
                blocks.append((block.address, block.bytes, block.is_free, block.unmapped_bytes))
                block = block.next
        return (*blocks, self._next_address)

    def copy(self, capacity_bytes: int | None = None) -> CachingAllocator:
        """An allocator with the same segments, and another capacity if one is given. Blocks in use stay in
        use.
        """
        capacity_bytes = self.capacity_bytes if capacity_bytes is None else capacity_bytes
        clone = CachingAllocator(
            capacity_bytes,
            is_expandable=self.is_expandable,
            max_split_bytes=self.max_split_bytes,
            roundup_divisions=self.roundup_divisions,
        )
        peaks = ("peak_active_bytes", "peak_reserved_bytes")
        counts = ("num_segments", "num_released", "_next_address")
        for name in ("active_bytes", "reserved_bytes", *peaks, *counts):
            setattr(clone, name, getattr(self, name))
        name_of_pool = {id(pool): key for key, pool in self._pools.items()}
        clone._pools = {key: _Pool(key[1]) for key in self._pools}
        for address, head in self._heads.items():
            pool, last, block = clone._pools[name_of_pool[id(head.pool)]], None, head
            while block is not None:
                copied_block = MemoryBlock(
                    pool, block.address, block.bytes, last, None, block.is_free, block.unmapped_bytes
                )
                if last is None:
                    clone._heads[address] = copied_block
                else:
                    last.next = copied_block
                if copied_block.is_free:
                    pool.insert(copied_block)
                last, next_block = copied_block, block.next
                if next_block is None:
                    break
                block = next_block
            if self.is_expandable:
                pool.last = last
        return clone

    @staticmethod
    def pool_of(count: int, stream: str) -> PoolName:
        """The pool to which a request of `count` bytes goes."""
        return stream, _round_up(count, MIN_BLOCK) <= SMALL_SIZE

    def reserved_by_pool(self) -> dict[PoolName, int]:
        """Bytes of the segments of each pool, unmapped bytes not included."""
        names = {id(pool): name for name, pool in self._pools.items()}
        reserved = dict.fromkeys(self._pools, 0)
        for head in self._heads.values():
            block: MemoryBlock | None = head
            while block is not None:
                reserved[names[id(head.pool)]] += block.bytes - block.unmapped_bytes
                block = block.next
        return reserved

    def restart_peaks(self) -> None:
        """Count peaks from the present sizes."""
        self.peak_active_bytes, self.peak_reserved_bytes = self.active_bytes, self.reserved_bytes

    # -- the driver ----------------------------------------------------------------------------------------

    def _reserve(self, count: int) -> bool:
        """Ask the driver for `count` bytes. Returns whether it had room for them."""
        if self.reserved_bytes + count > self.capacity_bytes:
            return False
        self.reserved_bytes += count
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.num_segments += 1
        return True

    def _release(self, count: int) -> None:
        if count:
            self.reserved_bytes -= count
            self.num_released += 1

    def _grow(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """A new segment from the driver, as a block that is not in the pool's list. None where there is no
        room.
        """
        segment = SMALL_BUFFER
        if not pool.is_small:
            segment = LARGE_BUFFER if size < MIN_LARGE_ALLOC else _round_up(size, ROUND_LARGE)
        if not self._reserve(segment):
            return None
        block = MemoryBlock(pool, self._next_address, segment)
        self._heads[block.address] = block
        self._next_address += segment
        return block

    def _grow_end(self, pool: _Pool, size: int) -> MemoryBlock | None:
        last = pool.last
        at_end = last if last is not None and last.is_free else None
        missing = _round_up(size - (at_end.bytes if at_end else 0), pool.page_bytes)
        if not self._reserve(missing + (at_end.unmapped_bytes if at_end else 0)):
            return None
        if at_end is not None:
            pool.remove(at_end)
            at_end.bytes, at_end.unmapped_bytes = at_end.bytes + missing, 0
            return at_end
        if last is None:  # pools are far apart in the address space, and begin at a page
            address, self._next_address = self._next_address, self._next_address + (LARGE_BUFFER << 30)
        else:
            address = last.address + last.bytes
        block = MemoryBlock(pool, address, missing, previous=last)
        if last is None:
            self._heads[address] = block
        else:
            last.next = block
        pool.last = block
        return block

    # -- blocks --------------------------------------------------------------------------------------------

    def _request(self, count: int, stream: str) -> Request:
        size = _rounded(count, self.roundup_divisions)
        key = self.pool_of(size, stream)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(key[1])
        min_split_bytes = MIN_BLOCK if pool.is_small or self.is_expandable else SMALL_SIZE + 1
        too_large_bytes = self.max_split_bytes
        if size >= self.max_split_bytes:  # is oversize itself
            min_split_bytes, too_large_bytes = UNLIMITED, size + LARGE_BUFFER
        request = Request(pool, size, min_split_bytes, _key(size, 0), too_large_bytes)
        self._requests[count, stream] = request
        return request

    def _take_mapped(self, pool: _Pool, request: Request) -> MemoryBlock | None:
        """Take the smallest free block of expandable segments that holds `request` out of the pool's list.

        A block with all its pages is preferred. If there is none, the missing pages are mapped again.
        """
        free = pool.free
        index = bisect_left(pool.keys, request.key)
        if index == len(free):
            return None
        fully_mapped = (block for block in free[index:] if not block.unmapped_bytes)
        block = next(fully_mapped, free[index])
        bytes_to_map = min(block.unmapped_bytes, _round_up(request.size, pool.page_bytes))
        if bytes_to_map and not self._reserve(bytes_to_map):
            return None
        block.unmapped_bytes -= bytes_to_map
        pool.remove(block)
        return block


def _rounded(count: int, divisions: int) -> int:
    """A request's size: whole 512 bytes, or whole parts of the power of two below it, of which there are
    `divisions` (`round_size`, `roundup_power2_next_division`)."""
    if divisions <= 1 or count <= MIN_BLOCK * divisions:
        return _round_up(count, MIN_BLOCK)
    return _round_up(count, (1 << (count.bit_length() - 1)) // divisions)


def _key(size: int, address: int) -> int:
    """A number by which blocks are in the order of size and address, of which no two have one."""
    return size << _ADDRESS_BITS | address


def _absorb(block: MemoryBlock, absorbed: MemoryBlock) -> int:
    """Merge `absorbed` into the block before it, and return the bytes of both."""
    size = block.bytes = block.bytes + absorbed.bytes
    if absorbed.unmapped_bytes:
        block.unmapped_bytes += absorbed.unmapped_bytes
    following_block = block.next = absorbed.next
    if following_block is not None:
        following_block.previous = block
    elif block.pool.last is absorbed:
        block.pool.last = block
    return size


def _round_up(count: int, unit: int) -> int:
    """`count` rounded up to whole units."""
    return -(-count // unit) * unit
