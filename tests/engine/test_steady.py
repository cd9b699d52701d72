"""The steady step: what a step is when another came before."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.engine.simulate import simulate_job
from zsim.plan.make import make_plan
from zsim.plan.passes.repeated_step import is_drained, repeat_step
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve


def job_of(**strategy: Any) -> Job:
    training = {"sequence_length": 512, "micro_batch_size": 64}
    return resolve(
        zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=8, training=training, strategy=strategy)
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [({"kind": "ddp"}, False), ({"kind": "fsdp1"}, False), ({"kind": "fsdp2"}, False), ({"stage": 2}, True)],
)
def test_only_a_host_that_reads_the_norm_drains_the_queue(strategy: dict[str, Any], expected: bool) -> None:
    assert is_drained(make_plan(job_of(**strategy))) is expected


def test_the_second_run_waits_for_the_first_ones_optimizer() -> None:
    plan = make_plan(job_of(kind="fsdp2"))
    count = len(plan.ops)
    both = repeat_step(plan)
    assert len(both.ops) == 2 * count
    last = max(number for number, op in enumerate(plan.ops) if op.stream == "compute" and op.work)
    first_gather = next(op for op in both.ops[count:] if op.stream == "all_gather")
    assert last in first_gather.after
    assert all(wait >= count for op in both.ops[count:] for wait in op.host_waits)


@pytest.mark.parametrize("strategy", [{"kind": "ddp"}, {"kind": "fsdp1"}, {"kind": "fsdp2"}])
def test_a_step_after_another_does_not_wait_for_its_first_launches(strategy: dict[str, Any]) -> None:
    """From an idle machine the GPU waits for the host's start of the step, 3 ms of Python and more; in the
    steady step that happened while the GPU was still busy with the step before."""
    job = job_of(**strategy)
    cold = simulate_job(job, plan=make_plan(job)).trace
    steady = simulate_job(job).trace
    assert steady.step_seconds < cold.step_seconds - 2e-3
    assert len(steady) == len(cold)
    assert steady.start_seconds.min() >= 0
    assert steady.end_seconds.max() == pytest.approx(steady.step_seconds, rel=1e-9)
