"""From a fleet's rates to a job's failures."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

import zsim
from tests.goodput.scenarios import save, scenario
from zsim.goodput.runs import run_seeds
from zsim.goodput.scenario import DAY, Cause, Failures, Recovery, failures_of
from zsim.goodput.search import estimate_repairs
from zsim.goodput.views import goodput_lines
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.failures import FailuresTable

NODE_DAY = 1000 * DAY  # seconds of a rate of 1 per 1,000 node-days


@cache
def job_on(cluster: str) -> Job:
    return resolve(
        zsim.Experiment(model="llama-3.2-1b", cluster=cluster, nodes=1, strategy={"kind": "fsdp2"})
    )


def failures(nodes: int = 1, cluster: str = "dgx-h100", **table: Any) -> Failures:
    return failures_of(FailuresTable(**table), job_on(cluster), nodes)


def test_the_rate_is_of_nodes_of_eight_gpus() -> None:
    """4 per 1,000 node-days: 400 in 1,000 days on 100 nodes of 8; a GB200 tray of 4 GPUs counts half."""
    assert failures(100, per_1000_node_days=4.0).per_second * NODE_DAY == pytest.approx(400)
    trays = failures(100, "gb200-nvl72", per_1000_node_days=4.0)
    assert trays.per_second * NODE_DAY == pytest.approx(200)


@pytest.mark.parametrize(
    ("nodes", "exponent", "times"),
    [
        (1, 2.0, 1),
        (4096, 2.0, 4096),  # 32,768 GPUs, up to which it is in proportion
        (8192, 1.0, 8192),
        (8192, 2.0, 8192 * 2),  # twice as many: 2^2 times the rate
        (32_768, 1.5, 32_768 * 8**0.5),  # eight times as many: 8^1.5
        (8192, 0.5, 8192 * 2**-0.5),
    ],
)
def test_above_so_many_gpus_the_rate_grows_with_a_power_of_them(
    nodes: int, exponent: float, times: float
) -> None:
    found = failures(nodes, per_1000_node_days=1.0, exponent=exponent)
    assert found.per_second * NODE_DAY == pytest.approx(times)


def test_from_where_the_power_counts_is_a_setting() -> None:
    """16 GPUs, twice `exponent_above_gpus`, with the power 3: 2^3 times the rate of a node."""
    found = failures(2, per_1000_node_days=1.0, exponent=3.0, exponent_above_gpus=8)
    assert found.per_second * NODE_DAY == pytest.approx(8)


def test_slow_nodes_are_as_many_as_there_are_nodes_and_know_no_power() -> None:
    """2 per 1,000 node-days: 20 on 10 nodes of 8, 10 on as many of 4. Failures alone have an exponent."""
    table: dict[str, Any] = {"stragglers_per_1000_node_days": 2.0, "straggler_slowdown": 1.3,
                             "straggler_takes": "2 h", "exponent": 2.0, "exponent_above_gpus": 8}  # fmt: skip
    found = failures(10, **table)
    assert found.stragglers_per_second * NODE_DAY == pytest.approx(20)
    assert (found.straggler_slowdown, found.straggler_takes) == (1.3, 7200.0)
    assert failures(10, "gb200-nvl72", **table).stragglers_per_second * NODE_DAY == pytest.approx(10)
    assert failures(10, per_1000_node_days=1.0).stragglers_per_second == 0.0


def test_what_happens_by_the_day_is_in_seconds() -> None:
    found = failures(
        3, planned_per_day=4.0, planned_takes="10 min", preemptions_per_day=2.0, preemption_takes="1 h",
        preemption_notice="30 s", ageing=((1.0, 0.5), (30.0, 0.25)), per_1000_node_days=1.0,
    )  # fmt: skip
    assert found.planned_every == 6 * 3600
    assert found.planned_takes == 600
    assert found.preemptions_per_second == pytest.approx(2 / DAY)
    assert (found.preemption_takes, found.preemption_notice) == (3600, 30)
    assert found.ageing == ((DAY, 0.5), (30 * DAY, 0.25))
    assert failures(3, per_1000_node_days=1.0).planned_every is None


def test_the_law_and_what_fails_together_are_the_tables() -> None:
    found = failures(
        law="weibull", shape=0.7, rack_fraction=0.1, rack_nodes=4, leaf_fraction=0.2, leaf_nodes=16,
        per_1000_node_days=1.0,
    )  # fmt: skip
    assert (found.law, found.shape) == ("weibull", 0.7)
    assert (found.rack_fraction, found.rack_nodes) == (0.1, 4)
    assert (found.leaf_fraction, found.leaf_nodes) == (0.2, 16)
    assert failures(per_1000_node_days=1.0).shape == 1.0


def test_without_causes_a_part_of_the_failures_keeps_its_node() -> None:
    found = failures(per_1000_node_days=1.0, transient_fraction=0.25, repair="2 h", repair_median="1 h")
    lost, transient = found.causes
    assert lost == Cause("node lost", 0.75, repair_seconds=7200.0, repair_median=3600.0)
    assert transient == Cause("transient", 0.25, keeps_node=True)


def test_a_cause_has_its_own_repair_or_that_of_all_failures() -> None:
    causes = {
        "bad-cable": {"share": 3.0, "repair": "1 h", "nodes": 2, "detect": "5 s"},
        "gpu": {"share": 1.0, "repair": "4 h", "repair_median": "3 h"},
        "host": {"share": 2.0},
        "software": {"share": 4.0, "keeps_node": True},
        "silent": {"share": 0.5, "found_later": "2 h"},
    }
    found = failures(causes=causes, per_1000_node_days=1.0, repair="6 h", repair_median="1 h")
    cable, gpu, host, software, silent = found.causes
    assert cable == Cause("bad cable", 3.0, nodes=2, repair_seconds=3600.0, detect_seconds=5.0)
    assert (gpu.repair_seconds, gpu.repair_median) == (4 * 3600.0, 3 * 3600.0)
    assert (host.repair_seconds, host.repair_median) == (6 * 3600.0, 3600.0)
    assert (software.keeps_node, software.weight) == (True, 4.0)
    assert silent.found_later == 7200.0


def test_rates_of_causes_add_up_and_are_their_weights() -> None:
    """A cause without a rate of its own, next to those that have one, is refused by the table."""
    found = failures(10, causes={"a": {"per_1000_node_days": 1.5}, "b": {"per_1000_node_days": 0.0}})
    assert found.per_second * NODE_DAY == pytest.approx(15)
    assert [cause.weight for cause in found.causes] == [1.5, 0.0]


# -- Waits for repairs by their law, beside those that are drawn -------------------------------------------


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
