"""Allocations that repeat: where they are found, and that a run without repetitions equals one with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.devices.caching_allocator import UNLIMITED, CachingAllocator
from zsim.engine.pools import FREE, PoolEvents, PoolReplay, PoolRun, PoolRuns, find_repeats

REQUESTS = ((11 * 2**20, "gather"), (24 * 2**20, "gather"), (70_000, "reduce"), (5 * 2**20, "reduce"))


def part_of(slots: list[tuple[int, int]], blocks: int, before: list[int]) -> PoolEvents:
    """Tensors of `before` that are never freed by then, and then `blocks` equal blocks: each allocates the
    requests of its `slots` one after the other, and frees each so many changes later."""
    changes = [(number - 2 * len(before), number, kind) for number, kind in enumerate(before)]
    tensor = len(before)
    for block in range(blocks):
        for slot, (kind, life) in enumerate(slots):
            at = 2 * (block * len(slots) + slot)
            changes += [(at, tensor, kind), (at + 2 * life + 1, tensor, FREE)]
            tensor += 1
    end = max(at for at, _, _ in changes) + 1
    changes += [(end, number, FREE) for number in range(len(before))]
    changes.sort(key=lambda change: change[0])
    _, tensors, kinds = (np.array(column, dtype=np.int64) for column in zip(*changes, strict=True))
    return PoolEvents(tensors, kinds, REQUESTS, 2 * np.arange(len(tensors)))


def twice(step: PoolEvents) -> PoolEvents:
    """The changes of two steps, the second one with tensors of its own."""
    tensors = np.concatenate([step.tensors, step.tensors + step.tensors.max() + 1])
    return PoolEvents(tensors, np.tile(step.kinds, 2), REQUESTS, 2 * np.arange(len(tensors)))


def passes(part: PoolEvents, *, come_back: bool, counted_from: int = 0) -> list[PoolRun]:
    run = part, part.positions, counted_from
    both = PoolRuns(CachingAllocator(UNLIMITED), run, run, expects_repeats=come_back)
    return [both.nth(0), both.nth(1)]


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of changes that are made from now on."""
    found: list[int] = []
    make = PoolReplay.make

    def counting(self: PoolReplay, first: int, end: int) -> None:
        found.append(end - first)
        make(self, first, end)

    monkeypatch.setattr(PoolReplay, "make", counting)
    return found


def test_a_hundred_equal_blocks_are_one_repeat() -> None:
    """Four requests and four frees a block, each freed within its block or the next."""
    part = part_of([(0, 0), (1, 2), (2, 1), (3, 4)], 100, [1])
    made_at = {
        int(t): place for place, (t, k) in enumerate(zip(part.tensors, part.kinds, strict=True)) if k != FREE
    }
    (found,) = find_repeats(part.kinds, np.array([made_at[int(tensor)] for tensor in part.tensors]))
    assert found.period == 8
    assert found.first < 16
    assert found.end > len(part) - 16


def test_what_never_repeats_has_no_repeats() -> None:
    kinds = np.arange(500)
    assert find_repeats(kinds, np.arange(500)) == []
    assert find_repeats(kinds[:10], np.arange(10)) == []


def test_a_period_that_comes_back_is_made_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of([(0, 0), (1, 2), (2, 1), (3, 4)], 100, [1])
    number = made(monkeypatch)
    passes(part, come_back=True)
    assert sum(number) < len(part) / 2
    number.clear()
    passes(part, come_back=False)
    assert sum(number) == 2 * len(part)


@settings(max_examples=150, deadline=None)
@given(
    slots=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=2, max_size=9),
    blocks=st.integers(1, 60),
    before=st.lists(st.integers(0, 3), max_size=3),
    counted_fraction=st.floats(0, 1),
)
def test_a_run_with_repeats_left_out_equals_a_run_of_all_changes(
    slots: list[tuple[int, int]], blocks: int, before: list[int], counted_fraction: float
) -> None:
    part = part_of(slots, blocks, before)
    counted_from = 2 * int(counted_fraction * len(part))
    assert_equal(
        passes(part, come_back=True, counted_from=counted_from),
        passes(part, come_back=False, counted_from=counted_from),
    )


def test_repeats_of_the_step_before_the_counted_one_are_made_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = twice(part_of([(0, 0), (1, 2), (2, 1), (3, 4)], 100, [1]))
    number = made(monkeypatch)
    passes(part, come_back=True, counted_from=len(part))
    assert sum(number) < len(part) / 2


def assert_equal(some: list[PoolRun], others: list[PoolRun]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.reserved, one.segments, one.has_grown, one.pools) == (
            other.reserved, other.segments, other.has_grown, other.pools,
        )  # fmt: skip
        np.testing.assert_array_equal(one.active_changes, other.active_changes)
        np.testing.assert_array_equal(one.positions, other.positions)


def test_a_second_step_that_begins_like_the_first_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass grows, so that its second step begins with more free blocks than its first."""
    part = twice(part_of([(0, 0), (1, 2), (2, 1), (3, 4)], 3, [1]))
    number = made(monkeypatch)
    passes(part, come_back=False, counted_from=part.positions[len(part) // 2 - 4])
    assert sum(number) == 1.5 * len(part)


@settings(max_examples=150, deadline=None)
@given(
    slots=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=9),
    blocks=st.integers(1, 12),
    before=st.lists(st.integers(0, 3), max_size=3),
    come_back=st.booleans(),
    before_end=st.integers(0, 5),
)
def test_a_run_with_a_step_left_out_equals_a_run_of_all_changes(
    slots: list[tuple[int, int]], blocks: int, before: list[int], come_back: bool, before_end: int
) -> None:
    part = twice(part_of(slots, blocks, before))
    counted_from = max(0, len(part) - 2 * before_end)
    short = passes(part, come_back=come_back, counted_from=counted_from)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolReplay, "_half", lambda _self: 0)
        assert_equal(short, passes(part, come_back=come_back, counted_from=counted_from))
