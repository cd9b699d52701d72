"""Runs of very many failures: a part of each stands for all of it."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.goodput.scenarios import SOFTWARE, save, scenario
from zsim.goodput.ledger import RunLedger
from zsim.goodput.runs import Runs, num_parts, num_seeds, pilot_of, run_seeds, shorten_scenario
from zsim.goodput.scenario import Cause, Failures, Recovery, Scenario


def often_failing(steps: int, mean: float = 1_000.0, **more: Any) -> Scenario:
    """A failure every 1,000 s of a job that starts in 200 and saves every 50."""
    return scenario(
        steps, 50, save(2.0), startup=200.0, failures=Failures(1 / mean, SOFTWARE),
        recovery=Recovery(detect_seconds=20.0), **more,
    )  # fmt: skip


def test_four_parts_have_the_mean_and_the_spread_of_the_whole() -> None:
    """100,000 steps, some 150 failures, and four times 25,000: means within their errors, spreads (which a
    sum of four independent parts has twice that of one) within three tenths of each other."""
    whole = often_failing(100_000)
    runs = run_seeds(whole, 100)
    parts = run_seeds(shorten_scenario(whole, 4), 100, 1_000).combine(whole, 4)
    assert parts.mean_days == pytest.approx(runs.mean_days, abs=3 * (runs.days_error + parts.days_error))
    assert stdev(parts.days) == pytest.approx(stdev(runs.days), rel=0.3)
    assert parts.goodput_fraction == pytest.approx(runs.goodput_fraction, rel=0.02)
    for ledger in parts.ledgers:
        assert ledger.useful + sum(ledger.seconds.values()) == pytest.approx(ledger.elapsed)
        assert ledger.useful == pytest.approx(100_000.0)


def test_a_part_of_a_run_is_grown_by_hand() -> None:
    """Parts of 10 and 14 s: of four, a mean of 48 and twice the deviation of 2."""
    ledgers = tuple(
        RunLedger(useful=8.0, elapsed=seconds, failures={"gpu": count}, is_finished=True)
        for seconds, count in ((10.0, 3), (14.0, 5))
    )
    found = Runs(scenario(8, 1), 1, ledgers).combine(scenario(32, 1), 4).ledgers
    assert [one.elapsed for one in found] == pytest.approx([44.0, 52.0])
    assert [one.useful for one in found] == pytest.approx([32.0, 32.0])
    assert [one.failures["gpu"] for one in found] == [14, 18]
    assert all(one.is_finished for one in found)


def test_a_part_has_its_share_of_steps_days_and_years_of_age() -> None:
    one = often_failing(1_000, horizon_seconds=800.0, limit_seconds=4_000.0)
    one = replace(one, failures=replace(one.failures, ageing=((100.0, 2.0),)))
    part = shorten_scenario(one, 4)
    assert part.phases[0].steps == 250
    assert (part.horizon_seconds, part.limit_seconds) == (200.0, 1_000.0)
    assert part.failures.ageing == ((25.0, 2.0),)
    assert part.failures.per_second == one.failures.per_second


def test_an_ordinary_run_is_simulated_whole() -> None:
    one = often_failing(400_000)
    pilot = pilot_of(one, 1)
    assert pilot.is_complete
    assert num_parts(one, 100, pilot) == 1
    assert num_seeds(100, 1, pilot) == 100


def test_a_run_of_a_hundred_thousand_failures_is_simulated_in_part() -> None:
    """Of 100 seeds each has 4,000 of them, so that all have 400,000."""
    one = often_failing(70_000_000)
    pilot = pilot_of(one, 1)
    assert not pilot.is_complete
    expected = (
        fmean(ledger.num_failures for ledger in run_seeds(shorten_scenario(one, 100), 20).ledgers) * 100
    )
    assert pilot.all_failures == pytest.approx(expected, rel=0.1)
    assert num_parts(one, 100, pilot) == pytest.approx(expected / 4_000, rel=0.1)


def test_parts_are_long_against_repairs_else_fewer_seeds_are_drawn() -> None:
    """Repairs of a year: no part of this run is long against them, and 2 million failures are enough."""
    one = often_failing(70_000_000)
    lost = (Cause("node", 1e-9, repair_seconds=3e7), *SOFTWARE)
    one = replace(one, failures=replace(one.failures, causes=lost))
    pilot = pilot_of(one, 1)
    assert num_parts(one, 100, pilot) == 1
    assert num_seeds(100, 1, pilot) == max(20, int(2_000_000 / pilot.all_failures))


def test_without_a_save_in_a_part_the_run_is_whole() -> None:
    """Saved ten times in all: no part of it has ten."""
    one = often_failing(10_000_000, mean=100_000.0)
    one = replace(one, phases=(replace(one.phases[0], saves=replace(one.phases[0].saves, every=10**6)),))
    pilot = pilot_of(one, 1, 5)
    assert not pilot.is_complete
    assert num_parts(one, 1_000_000, pilot) == 1
