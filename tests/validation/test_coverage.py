"""The bars of the shipped intervals, each source judged by the others; no simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.expect import there
from validation.published.coverage import JudgedRun, coverage_of, leave_one_source_out, mean_of_sources
from validation.published.measured_experiments import recorded_experiments
from validation.published.open_settings import open_spreads, read_steps
from validation.published.predict import shipped_tables
from validation.published.recorded import recorded_runs
from validation.published.shipped import shipped_texts
from validation.published.strangers import strangers_runs
from validation.published.strangers_page import GROUPS, found_out, strangers_lines
from validation.published.table import read_runs
from zsim.validated.runs import ESTIMATES, TABLE, shipped_estimates, validated_runs


@pytest.fixture(scope="module")
def all_judged() -> list[JudgedRun]:
    return leave_one_source_out(validated_runs(), shipped_estimates()["open"])


@pytest.fixture(scope="module")
def judged(all_judged: list[JudgedRun]) -> list[JudgedRun]:
    """The sources that were predicted blind, as a user's job is."""
    return [row for row in all_judged if row.run.is_blind]


def test_over_all_rows_72_to_90_percent_lie_within(judged: list[JudgedRun]) -> None:
    found = there(coverage_of(judged))
    assert 0.72 <= found.covered <= 0.90
    assert 0.65 <= found.covered_by_source <= 0.95


@pytest.mark.parametrize("group", [name for name in GROUPS if GROUPS[name] is not None])
def test_in_each_group_at_least_60_percent_do(judged: list[JudgedRun], group: str) -> None:
    """Of groups of few rows, one in ten less: offloading are 19 rows of 7 sources."""
    holds = GROUPS[group]
    assert holds is not None
    found = there(coverage_of(row for row in judged if holds(row.run)))
    assert found.covered >= (0.60 if found.rows > 30 else 0.50)


def test_misses_lie_on_both_sides(judged: list[JudgedRun]) -> None:
    """None of the two is more than four fifths of them."""
    found = there(coverage_of(judged))
    assert 0.2 <= found.above / (1 - found.covered) <= 0.8


def test_half_the_intervals_are_narrower_than_three_tenths_each_way(judged: list[JudgedRun]) -> None:
    """The trade against coverage that docs/accuracy.md publishes, over all runs and those of one node."""
    assert there(coverage_of(judged)).half_width <= 0.30
    assert there(coverage_of(judged, lambda job: not job.is_several)).half_width <= 0.30


def test_intervals_as_wide_as_blind_sources_ask_for_hold_more_often_for_studied_ones(
    all_judged: list[JudgedRun], judged: list[JudgedRun]
) -> None:
    found = there(coverage_of(row for row in all_judged if not row.run.is_blind))
    assert found.covered >= 0.90
    assert found.covered_by_source >= 0.90
    assert found.covered > there(coverage_of(judged)).covered + 0.05


def test_a_run_is_judged_without_its_own_source(make_judged: Callable[[float], JudgedRun]) -> None:
    """Ten sources right to 1 %, and one that is off by `error`: its interval does not know of it."""
    assert make_judged(0.5).validation.high == pytest.approx(make_judged(0.01).validation.high)
    assert not make_judged(0.5).is_covered
    assert make_judged(0.5).is_above


@pytest.fixture
def make_judged() -> Callable[[float], JudgedRun]:
    def build(error: float) -> JudgedRun:
        first = validated_runs()[0]
        runs = [
            replace(first, row_id=f"r{n}", source=f"s{n}", error=0.0, stranger_error=0.01 * (-1) ** n)
            for n in range(10)
        ]
        own = replace(first, row_id="own", source="own", error=0.0, stranger_error=error)
        return leave_one_source_out([*runs, own])[-1]

    return build


def test_the_page_names_what_was_found_out(all_judged: list[JudgedRun]) -> None:
    """Sources predicted blind stand first, as a stranger before as studied; vTrain's table guesses
    recomputation."""
    page = "\n".join(strangers_lines(all_judged))
    assert page.index("| LoRA |") < page.index("developed with")
    assert page.index("as a stranger, mean") < page.index("as studied, mean")
    assert "act_ckpt" in found_out("vtrain-single")
    assert found_out("someone") == []
    assert len([line for line in page.split("largest causes")[1].splitlines() if line.startswith("| ")]) == 11


def test_sources_count_once_in_their_mean() -> None:
    """Three rows of one source at 1, one of another at 0."""
    assert mean_of_sources([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"]) == 0.5


def test_the_shipped_table_has_every_published_row_that_was_predicted() -> None:
    """As `python validation/published/accuracy.py` leaves it: rows with a time and of no skipped role, with
    the recorded ones of tables that the checkout has not."""
    published = {run.row_id for run in read_runs(shipped_tables()).runs}
    tables = (recorded_runs(), strangers_runs(), recorded_experiments())
    recorded = {run.row_id for table in tables for run in table}
    validated = [run.row_id for run in validated_runs()]
    assert len(validated) == len(set(validated))
    assert recorded <= set(validated) <= published | recorded
    assert len(published & set(validated)) > 0.95 * len(published)


def test_degrees_and_mixtures_of_every_framework_are_among_them() -> None:
    kinds = {(run.features.framework, run.features.model_ranks > 1) for run in validated_runs()}
    assert {("Megatron", True), ("FSDP", True), ("DeepSpeed", True)} <= kinds
    assert {run.features.framework for run in validated_runs() if run.features.is_mixture} >= {"Megatron"}


@pytest.mark.slow
def test_the_shipped_estimates_are_those_of_the_shipped_table() -> None:
    table, estimates = shipped_texts(validated_runs(), open_spreads(read_steps()))
    assert TABLE.read_text(encoding="utf-8") == table
    assert ESTIMATES.read_text(encoding="utf-8") == estimates
