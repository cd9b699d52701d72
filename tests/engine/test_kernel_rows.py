"""Kernels in a row: their times are those that a wake-up for each of them gives, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zsim
from zsim.engine.executor import Executor
from zsim.engine.simulate import Outcome, simulate_job
from zsim.fluid.pool import exact_delay
from zsim.specs.experiment.resolve import resolve

MEGATRON = {"kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({"kind": "ddp"}, {}),
    "fsdp2": ({"kind": "fsdp2"}, {}),
    "zero-3": ({"kind": "deepspeed", "stage": 3}, {}),
    "megatron": (MEGATRON, {}),
    "one hardware queue": (MEGATRON, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    "interleaved": (MEGATRON, {"pipeline": 4, "virtual_stages": 2}),
}


def outcome_of(name: str, *, unfold: bool) -> Outcome:
    strategy, parallelism = JOBS[name]
    training = {"sequence_length": 1024, "gradient_accumulation_steps": 4, "activation_checkpointing": "full"}
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", gpus=16, training=training, strategy=strategy,
        parallelism=parallelism,
    )  # fmt: skip
    return simulate_job(resolve(experiment), unfold=unfold)


@pytest.mark.parametrize("unfold", [False, True], ids=["folded", "unfolded"])
@pytest.mark.parametrize("name", JOBS)
def test_a_row_takes_the_time_of_its_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, *, unfold: bool
) -> None:
    outcome = outcome_of(name, unfold=unfold)
    begin = Executor.begin

    def begin_without_rows(executor: Executor) -> None:
        executor.on_finish = lambda: None  # as with other jobs on the clock, which look at what has ended
        begin(executor)

    monkeypatch.setattr(Executor, "begin", begin_without_rows)
    single = outcome_of(name, unfold=unfold)
    for column in ("issue_seconds", "start_seconds", "end_seconds"):
        assert np.array_equal(getattr(outcome.trace, column), getattr(single.trace, column))
    assert outcome.trace.step_seconds == single.trace.step_seconds
    assert outcome.stats.events == single.stats.events


@pytest.mark.parametrize("now", [0.0, 1 / 3, 0.1, 7.7])
def test_an_exact_delay_ends_at_the_time(now: float) -> None:
    """There is one wherever the delay is finer than the time."""
    time = now
    for step in range(1, 200):
        time += 1 / (7 * step)
        delay = exact_delay(now, time)
        assert delay is not None or time - now > now
        assert delay is None or now + delay == time
