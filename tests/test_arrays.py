"""Distinct values, and numbers that tell things apart."""

from __future__ import annotations

import numpy as np

from zsim.arrays import SplitMix64, factorize, unique


def test_distinct_values_are_sorted() -> None:
    assert unique(np.array([[3, 1], [3, -2]])) == [-2, 1, 3]


def test_values_are_numbered_in_the_order_in_which_they_come_first() -> None:
    words, places = factorize(("b", "a", "b", "c"))
    assert (words, places.tolist()) == (["b", "a", "c"], [0, 1, 0, 2])
    assert factorize("")[1].tolist() == []


def test_hashes_are_splitmix64() -> None:
    """The first outputs for the state 0 are published with the generator (Vigna, splitmix64.c):
    0xE220A8397B1DCDAF and 0x6E789E6AA1B965F4; here as signed numbers, halved."""
    first, second = SplitMix64(0).integers(2).tolist()
    assert first == (0xE220A8397B1DCDAF - 2**64) >> 1
    assert second == 0x6E789E6AA1B965F4 >> 1


def test_hashes_go_on_where_they_were_and_differ_by_seed() -> None:
    one, two = SplitMix64(5), SplitMix64(5)
    assert [*one.integers(2), *one.integers(3)] == [*two.integers(5)]
    assert len({*SplitMix64(5).integers(10_000), *SplitMix64(6).integers(10_000)}) == 20_000


def test_fractions_are_even_from_1_to_2() -> None:
    """Mean and variance of the uniform law: 1.5 and 1/12, within 4 standard errors of 100,000."""
    found = SplitMix64(7).fractions(100_000)
    assert found.min() >= 1.0
    assert found.max() < 2.0
    assert abs(found.mean() - 1.5) < 4 * (1 / 12 / 100_000) ** 0.5
    assert abs(found.var() - 1 / 12) < 0.001
