"""Where a list of allocations and frees repeats itself.

# [Note: a period that changes nothing]
A model's equal blocks allocate and free the same sizes in the same order. Where a period of changes leaves an
allocator exactly as it found it (the same free blocks, and blocks of the same addresses in use), the next
period of the same changes does so too, and need not be made.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints

_WINDOW = 16  # changes that must be the same before two places count as the same place of a period
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # any odd number: equal windows have equal hashes
_LEAST_PERIODS = 4


class Repeat(NamedTuple):
    """Changes from `first` to before `end`, each of which is the same as the one `period` changes later, as
    far as this is before `end` too."""

    first: int
    end: int
    period: int


def repeats(kinds: Ints, made_at: Ints) -> list[Repeat]:
    """The repeats of at least `_LEAST_PERIODS` periods among changes, which do not overlap. `kinds`: of
    allocations, what is asked for; `made_at`: per change the place at which its tensor is allocated. Frees
    are the same that free what was allocated as many changes ago."""
    count = len(kinds)
    ago = np.arange(count) - made_at
    codes = np.where(ago > 0, -1 - ago, kinds)
    if count < _LEAST_PERIODS * _WINDOW:
        return []
    hashes = np.zeros(count - _WINDOW + 1, dtype=np.uint64)
    for place in range(_WINDOW):
        hashes = hashes * _FACTOR + codes[place : place + len(hashes)].astype(np.uint64)
    order = np.argsort(hashes, kind="stable")
    is_again = hashes[order][1:] == hashes[order][:-1]
    distance = np.zeros(len(hashes) + 1, dtype=np.int64)  # to the next window that is the same; 0: none
    distance[order[:-1][is_again]] = np.diff(order)[is_again]
    edges = [0, *(np.flatnonzero(np.diff(distance)) + 1).tolist(), len(distance)]
    found: list[Repeat] = []
    for first, last in pairwise(edges):
        period = int(distance[first])
        end = last + period + _WINDOW - 1
        first = max(first, found[-1].end) if found else first
        if period and end - first >= _LEAST_PERIODS * period:
            assert np.array_equal(codes[first : end - period], codes[first + period : end])
            found.append(Repeat(first, end, period))
    return found
