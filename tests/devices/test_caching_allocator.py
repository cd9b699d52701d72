"""torch's caching allocator, block by block: sizes, best fit, splitting, merging, streams, giving back."""

from __future__ import annotations

import random

import pytest

from zsim.devices.caching_allocator import CachingAllocator, MemoryBlock

MIB = 2**20
ROOM = 10**12


def taken(allocator: CachingAllocator, count: int, stream: str = "compute") -> MemoryBlock:
    block = allocator.malloc(count, stream)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("count", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_are_larger(count: int, block: int, segment: int) -> None:
    """512 bytes; 2 MiB for small ones; 20 MiB below 10 MiB; from there on whole 2 MiB. Of the 12 MiB for 11
    the rest of 1 MiB stays in the block, because only more than that is split off: it has all 12."""
    allocator = CachingAllocator(ROOM)
    assert taken(allocator, count).bytes == (segment if count == 11 * MIB else block)
    assert allocator.reserved_bytes == segment


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator(ROOM)
    large, _, small = (taken(allocator, size * MIB) for size in (60, 40, 30))
    allocator.free(large)
    allocator.free(small)
    assert taken(allocator, 28 * MIB) is small
    assert allocator.reserved_bytes == 130 * MIB


def test_what_is_split_off_serves_and_merges_again() -> None:
    """60 MiB are freed and cut into 20 and 40; when both are free again, 60 fit without a new segment."""
    allocator = CachingAllocator(ROOM)
    allocator.free(taken(allocator, 60 * MIB))
    first, second = taken(allocator, 20 * MIB), taken(allocator, 40 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    allocator.free(second)
    assert taken(allocator, 60 * MIB).bytes == 60 * MIB
    assert allocator.num_segments == 1


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator(ROOM)
    allocator.free(taken(allocator, 30 * MIB, "all_gather"))
    taken(allocator, 30 * MIB, "compute")
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.active_bytes == 30 * MIB


def test_only_segments_free_from_end_to_end_are_given_back() -> None:
    """Of two segments of 40 MiB one is free, of the other a half: 40 go back, and then 70 fit into 110."""
    allocator = CachingAllocator(110 * MIB)
    allocator.free(taken(allocator, 40 * MIB))
    kept, free = taken(allocator, 20 * MIB), taken(allocator, 20 * MIB)
    other = taken(allocator, 40 * MIB)
    allocator.free(free)
    allocator.free(other)
    assert allocator.malloc(70 * MIB, "compute") is None
    assert allocator.release_cached() == 1
    assert allocator.reserved_bytes == 40 * MIB
    assert taken(allocator, 70 * MIB).bytes == 70 * MIB
    assert kept.bytes == 20 * MIB


def test_a_new_block_is_not_looked_for_among_the_free_ones() -> None:
    allocator = CachingAllocator(50 * MIB)
    allocator.free(taken(allocator, 30 * MIB))
    assert allocator.malloc(30 * MIB, "compute", is_new=True) is None
    assert allocator.malloc_over_capacity(30 * MIB, "compute").bytes == 30 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_grow_by_what_is_missing() -> None:
    """30 MiB take two pages of 20; freed, 50 take one page more, not 50 of their own."""
    allocator = CachingAllocator(ROOM, is_expandable=True)
    allocator.free(taken(allocator, 30 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    taken(allocator, 50 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_give_back_the_pages_between_blocks() -> None:
    """Three blocks of 40 MiB; the middle one's two pages go back, and come back when 40 are needed there."""
    allocator = CachingAllocator(ROOM, is_expandable=True)
    _, middle, _ = (taken(allocator, 40 * MIB) for _ in range(3))
    allocator.free(middle)
    assert allocator.release_cached() == 1
    assert allocator.reserved_bytes == 80 * MIB
    taken(allocator, 40 * MIB)
    assert allocator.reserved_bytes == 120 * MIB


def test_expandable_segments_keep_the_pages_that_a_neighbour_shares() -> None:
    """Of 10, 40 and 10 MiB in a row the 40 lie from 10 to 50: pages of 20 MiB give back 20 to 40 alone."""
    allocator = CachingAllocator(ROOM, is_expandable=True)
    _, middle, _ = (taken(allocator, size * MIB) for size in (10, 40, 10))
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(middle)
    assert allocator.release_cached() == 1
    assert allocator.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("is_expandable", [False, True])
def test_a_copy_goes_on_as_the_original_would(is_expandable: bool) -> None:
    """The same requests end in the same books, and leave the original's alone."""
    draw = random.Random(3)
    allocator = CachingAllocator(ROOM, is_expandable=is_expandable)
    live = [taken(allocator, int(2 ** draw.uniform(8, 27))) for _ in range(300)]
    for block in live[::2]:
        allocator.free(block)
    allocator.release_cached()
    books = []
    for one in (allocator.copy(), allocator.copy(), allocator):
        again = random.Random(5)
        for _ in range(300):
            taken(one, int(2 ** again.uniform(8, 27)))
        books.append((one.active_bytes, one.reserved_bytes, one.num_segments, one.num_released))
    assert len(set(books)) == 1


@pytest.mark.parametrize("is_expandable", [False, True])
def test_books_balance_after_any_sequence(is_expandable: bool) -> None:
    """Random requests on two streams, freed in random order, with the cache given back now and then: no two
    blocks overlap, and when all are free everything can be given back (but for the ends of pages)."""
    draw = random.Random(7)
    allocator = CachingAllocator(ROOM, is_expandable=is_expandable)
    live: list[MemoryBlock] = []
    for number in range(3000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            size = int(2 ** draw.uniform(8, 27))
            live.append(taken(allocator, size, draw.choice(["compute", "all_gather"])))
        if number % 500 == 499:
            allocator.release_cached()
        assert allocator.active_bytes == sum(block.bytes for block in live) <= allocator.reserved_bytes
    for one in live:
        for other in live:
            if one is not other and one.pool is other.pool:
                assert one.address + one.bytes <= other.address or other.address + other.bytes <= one.address
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.active_bytes, allocator.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("count", [700, 2 * 2**20, 5 * 2**20, 19 * 2**20])
def test_a_passing_request_takes_what_malloc_would_and_changes_nothing(count: int) -> None:
    memory = CachingAllocator(2**30)
    request = memory.request(count, "compute")
    assert memory.transient_bytes(request) == 0  # the driver would be asked
    blocks = [memory.malloc(size, "compute") for size in (600, count, 3 * 2**20)]
    for block in blocks:
        assert block is not None
        memory.free(block)
    active, reserved, segments = memory.active_bytes, memory.reserved_by_pool(), memory.num_segments
    taken = memory.transient_bytes(request)
    assert (memory.active_bytes, memory.reserved_by_pool()) == (active, reserved)
    block = memory.malloc(count, "compute")
    assert block is not None
    assert (taken, segments) == (block.bytes, memory.num_segments)


def test_allocators_of_one_layout_give_the_same_blocks_whatever_their_capacity() -> None:
    """4 of the 20 MiB of one segment are taken, then 3 more; a segment more is another layout."""
    small, large = CachingAllocator(100 * MIB), CachingAllocator(ROOM)
    for allocator in (small, large):
        allocator.free(taken(allocator, 20 * MIB))
        taken(allocator, 4 * MIB)
    assert small.layout() == large.layout() == small.copy(ROOM).layout()
    assert taken(small, 3 * MIB).address == taken(large, 3 * MIB).address == 4 * MIB
    assert small.layout() == large.layout()
    large.free(taken(large, 30 * MIB))
    assert small.layout() != large.layout()


def test_oversize_blocks_are_not_split_and_serve_no_smaller_request() -> None:
    """max_split_size_mb 64: 40 MiB come from a segment of their own, 90 from 100, 70 not, because 30 would be
    left."""
    allocator = CachingAllocator(ROOM, max_split_bytes=64 * MIB)
    large = taken(allocator, 100 * MIB)
    allocator.free(large)
    assert taken(allocator, 40 * MIB).bytes == 40 * MIB
    assert allocator.reserved_bytes == 140 * MIB
    assert taken(allocator, 70 * MIB).bytes == 70 * MIB
    assert allocator.reserved_bytes == 210 * MIB
    assert taken(allocator, 90 * MIB) is large
    assert large.bytes == 100 * MIB


def test_blocks_below_the_limit_are_split_as_ever() -> None:
    allocator = CachingAllocator(ROOM, max_split_bytes=64 * MIB)
    allocator.free(taken(allocator, 60 * MIB))
    assert taken(allocator, 20 * MIB).bytes == 20 * MIB
    assert taken(allocator, 40 * MIB).bytes == 40 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_oversize_blocks_are_given_back_before_all_others() -> None:
    """250 MiB hold 100, 80 and 30. 70 are served from the 80. For 140 no single block would do, so that the
    largest go first, 100 and 80."""
    allocator = CachingAllocator(250 * MIB, max_split_bytes=64 * MIB)
    blocks = [taken(allocator, size * MIB) for size in (100, 80, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(70 * MIB, "compute") is blocks[1]
    allocator.free(blocks[1])
    assert allocator.malloc(140 * MIB, "compute") is None
    assert allocator.release_oversize(140 * MIB, "compute")
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.num_released == 2
    assert taken(allocator, 140 * MIB).bytes == 140 * MIB
    assert not CachingAllocator(ROOM).release_oversize(140 * MIB, "compute")


@pytest.mark.parametrize(
    ("count", "size"), [(1200, 1536), (5000, 5120), (6 * MIB, 6 * MIB), (9 * MIB, 10 * MIB)]
)
def test_sizes_are_rounded_to_parts_of_a_power_of_two(count: int, size: int) -> None:
    """Four parts: up to 4 x 512 bytes as ever, 5,000 to 4,096 + 1,024, 9 MiB to 8 + 2."""
    allocator = CachingAllocator(ROOM, roundup_divisions=4)
    assert allocator.request(count, "compute").size == size
    assert allocator.copy().request(count, "compute").size == size
