"""Types of the arrays that zsim counts and measures in, by their elements, and functions on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Value = TypeVar("Value", bound=Hashable)


def unique(values: Ints) -> list[int]:
    """The different values, sorted, as `np.unique` has them, which without further outputs imports
    numpy.ma.
    """
    values_sorted: list[int] = np.unique(values, return_index=True)[0].tolist()
    return values_sorted


def factorize(values: Sequence[Value]) -> tuple[list[Value], Ints]:
    """The different values in the order in which they come first, and the index of each value among them
    (pandas' `factorize`).
    """
    index_of = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return list(index_of), np.fromiter(map(index_of.__getitem__, values), np.int64, len(values))


class SplitMix64:
    """Pseudo-random numbers that tell things apart: SplitMix64 (Steele, Lea and Flood, Fast splittable
    pseudorandom number generators, 2014).

    numpy.random, which would do, takes long to import.
    """

    def __init__(self, seed: int) -> None:
        self._counter = seed << 32

    def integers(self, count: int) -> Ints:
        """From -2^62 to 2^62."""
        return self._next(count).view(np.int64) >> 1

    def fractions(self, count: int) -> Floats:
        """From 1 to 2."""
        random_fractions: Floats = 1.0 + (self._next(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return random_fractions

    def _next(self, count: int) -> npt.NDArray[np.uint64]:
        numbers = np.arange(self._counter + 1, self._counter + count + 1, dtype=np.uint64)
        self._counter += count
        numbers *= np.uint64(0x9E3779B97F4A7C15)
        numbers ^= numbers >> np.uint64(30)
        numbers *= np.uint64(0xBF58476D1CE4E5B9)
        numbers ^= numbers >> np.uint64(27)
        numbers *= np.uint64(0x94D049BB133111EB)
        numbers ^= numbers >> np.uint64(31)
        return numbers
