"""A rank whose ops run one after the other: its times without a clock are those of the executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import simpy

from zsim.engine.folding import find_classes
from zsim.engine.jitter.steps import run_once
from zsim.engine.one_stream import is_one_rank, serial_times
from zsim.engine.prepare import PreparedJob, StepRequest, prepare
from zsim.plan.make import make_plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}
    return {"kind": "deepspeed", "config": config}


def job_of(strategy: dict[str, Any], **tables: Any) -> Job:
    """Two micro-batches, of sequences so short that the host is ahead of the GPU at times only."""
    training = {"micro_batch_size": 1, "sequence_length": 512, "global_batch_size": 32}
    return resolve(
        Experiment(
            model="llama-2-7b",
            cluster="dgx-a100-80gb",
            nodes=2,
            training=training,
            strategy=strategy,
            **tables,
        )
    )


def prepared_of(job: Job, *, is_serial: bool = False) -> PreparedJob:
    request = replace(StepRequest.of(job, make_plan(job)), is_serial=is_serial)
    classes, _ = find_classes(request, unfold=False)
    return prepare(request, classes, simpy.Environment())


@pytest.mark.parametrize(
    "strategy",
    [deepspeed(1), deepspeed(2), deepspeed(3), {"kind": "fsdp2"}, {"kind": "ddp"}],
    ids=["zero-1", "zero-2", "zero-3", "fsdp2", "ddp"],
)
def test_its_times_are_those_on_a_clock(strategy: dict[str, Any]) -> None:
    """To the last bit, of every op: the host is blocked on some and ahead of others, and FSDP2 and DDP run
    two steps in a row."""
    job = job_of(strategy)
    times = serial_times(prepared_of(job))
    run = run_once(prepared_of(job, is_serial=True))
    (lane,) = run.executor.ranks
    assert times.issue == lane.issue
    assert times.ended == lane.ended
    assert times.step_seconds == run.step_seconds


def test_a_slower_gpu_and_its_collectives_are_as_slow_here() -> None:
    job = job_of(deepspeed(3), faults={"slow_gpus": {str(rank): 1.5 for rank in range(16)}})
    times = serial_times(prepared_of(job))
    assert times.step_seconds == run_once(prepared_of(job, is_serial=True)).step_seconds
    assert times.step_seconds > 1.1 * serial_times(prepared_of(job_of(deepspeed(3)))).step_seconds


def test_ranks_that_differ_and_offloading_need_a_clock() -> None:
    offloaded = deepspeed(3, offload_optimizer={"device": "cpu"})
    assert is_one_rank(prepared_of(job_of(deepspeed(3))))
    assert not is_one_rank(prepared_of(job_of(offloaded)))
    assert not is_one_rank(prepared_of(job_of(deepspeed(3), faults={"slow_gpus": {"3": 1.5}})))
