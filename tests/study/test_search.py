"""Searches ask few questions and give the same answer as asking all."""

from __future__ import annotations

import pytest

from zsim.study.search import least_number


@pytest.mark.parametrize("least", [*range(12), 99])
def test_the_least_number_is_found_with_questions_that_grow_as_its_logarithm(least: int) -> None:
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return number >= least

    assert least_number(is_enough, 0, 100) == least
    assert len(asked) <= 15


def test_where_only_the_last_number_is_enough_it_is_found_and_beyond_there_is_none() -> None:
    """Doubling from 1 passes 9: the last is asked for all the same."""
    assert least_number(lambda number: number >= 9, 1, 10) == 9
    assert least_number(lambda number: number >= 10, 1, 10) is None


def test_numbers_that_are_not_allowed_are_never_asked_for() -> None:
    """Of multiples of 5 below 100 the first that is at least 42."""
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return number >= 42

    def allowed(start: int, end: int) -> int | None:
        return next((number for number in range(start, end) if number % 5 == 0), None)

    assert least_number(is_enough, 0, 100, allowed) == 45
    assert all(number % 5 == 0 for number in asked)
