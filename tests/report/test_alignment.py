"""Aligning two sequences: what stays the same, and what happened to the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.comparison import alignment
from zsim.comparison.alignment import align


def longest_common(first: str, second: str) -> int:
    """The length of a longest common subsequence, by the table of all prefixes."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else longer
    return table[-1][-1]


@given(st.text("abc", max_size=14), st.text("abc", max_size=14))
def test_as_many_entries_as_possible_are_matched_in_order(first: str, second: str) -> None:
    found = align(first, second)
    assert all(first[i] == second[j] for i, j in found.same)
    assert list(found.same) == sorted(found.same)
    assert all(i < k and j < m for (i, j), (k, m) in zip(found.same, found.same[1:], strict=False))
    assert len(found.same) == longest_common(first, second)


@given(st.text("abcd", max_size=14), st.text("abcd", max_size=14))
def test_every_entry_ends_up_in_one_place(first: str, second: str) -> None:
    found = align(first, second, lambda i, j: 0.7)
    pairs = (*found.same, *found.moved, *found.changed)
    assert sorted([*(i for i, _ in pairs), *found.only_first]) == list(range(len(first)))
    assert sorted([*(j for _, j in pairs), *found.only_second]) == list(range(len(second)))


def test_one_lost_entry_costs_one_line() -> None:
    found = align("gather the parameters", "gather he parameters")
    assert (found.only_first, found.only_second, found.moved) == ((7,), (), ())


def test_two_entries_that_changed_places_are_one_move() -> None:
    found = align("abcdef", "abdcef")
    assert (found.only_first, found.only_second) == ((), ())
    assert len(found.moved) == 1


def test_an_entry_that_stands_far_away_is_not_the_same_one() -> None:
    """x is lost at the beginning and another one comes 20 places later."""
    found = align("x" + "abcdefghijklmnopqrst", "abcdefghijklmnopqrst" + "x")
    assert (found.only_first, found.only_second, found.moved) == ((0,), (20,), ())


def test_entries_between_the_same_neighbours_are_a_change_when_alike_enough() -> None:
    assert align("abc", "aXc", lambda i, j: 0.5).changed == ((1, 1),)
    found = align("abc", "aXc", lambda i, j: 0.4)
    assert (found.changed, found.only_first, found.only_second) == ((), (1,), (1,))


def test_sequences_without_anything_in_common_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 edits: only the common ends are matched, and the result says so."""
    monkeypatch.setattr(alignment, "MAX_EDITS", 20)
    found = align("<" + "a" * 50 + ">", "<" + "b" * 50 + ">")
    assert found.is_complete is False
    assert found.same == ((0, 0), (51, 51))
