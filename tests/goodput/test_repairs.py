"""Waits for repairs by their law, beside those that are drawn."""

from __future__ import annotations

import dataclasses

import pytest

import zsim
from tests.goodput.scenarios import save, scenario
from zsim.goodput.closed_forms import estimate_repairs
from zsim.goodput.runs import run_seeds
from zsim.goodput.scenario import Cause, Failures, Recovery
from zsim.goodput.text import goodput_lines

HOUR = 3600.0
LOST = Cause("node lost", 0.5, repair_seconds=4 * HOUR, repair_median=2.2 * HOUR)  # deviation 1.09
FAILURES = Failures(1 / (100 * HOUR), (LOST, Cause("transient", 0.5, keeps_node=True)))


@pytest.mark.parametrize("horizon", [None, 300 * HOUR])
def test_drawn_waits_approach_the_laws(horizon: float | None) -> None:
    """A node is lost every 200 hours and back after 4, 2 % of the time; 3,000 runs draw 4,500 repairs, whose
    mean is known to 1.5 / sqrt(4,500) = 2.2 %."""
    one = scenario(300, 10, save(0.0), step=HOUR, failures=FAILURES, horizon_seconds=horizon)
    runs = run_seeds(one, 3000)
    found = estimate_repairs(runs)
    assert found is not None
    assert found.drawn_seconds == pytest.approx(found.waiting_seconds, rel=0.07)
    assert found.goodput_fraction == pytest.approx(runs.goodput_fraction, abs=0.002)


def test_the_mean_of_the_law_needs_few_seeds() -> None:
    """By LANL's law half of the time is in 1 of 39 repairs, exp(3.79) x 54 min = 40 h and more; 20 runs draw
    30 repairs, and what is left to chance is their number alone."""
    lanl = dataclasses.replace(LOST, repair_seconds=6 * HOUR, repair_median=0.9 * HOUR)
    one = scenario(300, 10, save(0.0), step=HOUR, failures=Failures(1 / (100 * HOUR), (lanl,)))
    found = [estimate_repairs(run_seeds(one, 20, first)) for first in (1, 1000, 2000, 3000)]
    fractions = [each.goodput_fraction for each in found if each is not None]
    assert found[0] is not None
    assert 1 / found[0].half_fraction == pytest.approx(39, abs=1)
    assert found[0].half_seconds == pytest.approx(40 * HOUR, rel=0.01)
    assert len(fractions) == 4
    assert max(fractions) - min(fractions) < 0.01


@pytest.mark.parametrize(
    ("failures", "recovery"),
    [
        (FAILURES, Recovery(spares=1)),
        (FAILURES, Recovery(policy="shrink")),
        (dataclasses.replace(FAILURES, rack_fraction=0.5, rack_nodes=4), Recovery()),
        (dataclasses.replace(FAILURES, causes=(Cause("lost", 1.0, repair_seconds=HOUR),)), Recovery()),
    ],
)
def test_other_waits_and_laws_are_left_to_the_seeds(failures: Failures, recovery: Recovery) -> None:
    runs = run_seeds(scenario(3, 1, save(0.0), failures=failures, recovery=recovery), 2)
    assert estimate_repairs(runs) is None


@pytest.mark.parametrize(("spares", "is_said"), [(0, True), (1, False)])
def test_the_text_says_what_long_repairs_would_change(spares: int, is_said: bool) -> None:
    """20 seeds drew a third less than the law's mean."""
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=32,
        training={"sequence_length": 8192, "activation_checkpointing": "full"},
        run={
            "tokens": "1T", "recovery": {"restart": "4 min", "spares": spares}, "seeds": 20,
            "checkpoint": {"every": "1 h", "blocking": "5 s", "durable": "60 s", "load": "1 min"},
        },
    )  # fmt: skip
    run = zsim.simulate_run(experiment, compares=False)
    text = " ".join(goodput_lines(run))
    assert ("Half of all time in repair is in 1 of 34 repairs" in text) == is_said
    assert (run.to_dict()["goodput_by_mean_repairs_fraction"] is not None) == is_said
