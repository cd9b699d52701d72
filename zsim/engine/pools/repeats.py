"""Where a list of allocations and frees repeats itself.

# [Note: a period that changes nothing]
A model's equal blocks allocate and free the same sizes in the same order. Where a period of changes leaves an
allocator exactly as it found it (the same free blocks, and blocks of the same addresses in use), the next
period of the same changes does so too, and need not be made.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints

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
