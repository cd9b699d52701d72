"""Searches ask few questions and give the same answer as asking all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.study.search import least_count, least_gpus, least_number


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


COUNTS = [48, *range(56, 65_537, 8)]


@pytest.mark.parametrize(("fixed", "shared"), [(0.0, 100.0), (0.5, 1e3), (0.9, 5e3), (0.999, 60.0)])
def test_the_least_count_is_found_with_few_questions_where_loads_fall_with_the_count(
    fixed: float, shared: float
) -> None:
    """fixed + shared / count is at most 1 from shared / (1 - fixed) on."""
    asked: list[int] = []

    def load_of(count: int) -> float:
        asked.append(count)
        return fixed + shared / count

    least = least_count(load_of, COUNTS, lambda count: True)
    assert least == next(count for count in COUNTS[1:] if fixed + shared / count <= 1)
    assert len(asked) <= 6


def test_a_load_that_no_count_brings_to_one_is_given_up_soon() -> None:
    asked: list[int] = []

    def load_of(count: int) -> float:
        asked.append(count)
        return 1.1 + 100 / count

    assert least_count(load_of, COUNTS, lambda count: True) is None
    assert len(asked) <= 4


@given(st.lists(st.integers(0, 3), min_size=2, max_size=200), st.integers(0, 220), st.integers(1, 7))
def test_the_least_allowed_count_is_that_of_trying_all(drops: list[int], place: int, step: int) -> None:
    """Loads that fall in any way, with jumps; every `step`-th count is allowed."""
    counts = [8 * number for number in range(1, len(drops) + 1)]
    loads = [1 + (place - sum(drops[: number + 1])) / 10 for number in range(len(drops))]
    allowed = counts[::step]
    every = [count for count in allowed[1:] if loads[counts.index(count)] <= 1]
    found = least_count(lambda count: loads[counts.index(count)], counts, allowed.__contains__)
    assert found == (every[0] if every else None)


# -- The least GPUs that would do --------------------------------------------------------------------------


def test_numbers_of_gpus_that_a_plan_refuses_are_passed_over() -> None:
    """Hybrid FSDP1 with two replicas has no plan on two GPUs, where one rank is left to a group."""
    experiment = zsim.Experiment(
        model="gpt2-xl",
        cluster="dgx-a100-40gb",
        nodes=2,
        training={"sequence_length": 1024, "micro_batch_size": 16},
        strategy={"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 2},
    )
    assert not zsim.simulate(experiment).report.fits
    found = least_gpus(experiment)
    assert found is None or found > 2
