"""From a fleet's rates to a job's failures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import zsim
from zsim.goodput.scenario import DAY, Cause, Failures, failures_of
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
