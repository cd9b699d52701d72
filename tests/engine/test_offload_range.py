"""The error bar of an offloaded step."""

from __future__ import annotations

from typing import Any

import zsim
from zsim.engine import offload_range as module
from zsim.engine.offload_range import offload_range
from zsim.engine.simulate import simulate_job
from zsim.specs.job import resolve

CPU = {"device": "cpu"}


def experiment_of(**zero: Any) -> zsim.Experiment:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return zsim.Experiment(
        model="gpt2", cluster="dgx-h100", gpus=4, training={"sequence_length": 256, "micro_batch_size": 1},
        strategy={"config": config},
    )  # fmt: skip


def test_the_step_lies_between_its_ends_and_the_report_says_so() -> None:
    report = zsim.simulate(experiment_of(offload_optimizer=CPU)).report
    assert report.offload is not None
    assert report.offload.range_seconds is not None
    fast, slow = report.offload.range_seconds
    assert fast < report.step_seconds < slow
    assert report.to_dict()["offload"]["range_seconds"] == (fast, slow)
    assert report.evidence["offload"] == "assumed"


def test_a_step_that_offloads_nothing_has_none() -> None:
    assert offload_range(simulate_job(resolve(experiment_of()))) is None


def test_a_long_plan_is_not_run_again(monkeypatch: Any) -> None:
    outcome = simulate_job(resolve(experiment_of(offload_optimizer=CPU)))
    monkeypatch.setattr(module, "MOST_OPS", len(outcome.plan.ops) - 1)
    assert offload_range(outcome) is None
