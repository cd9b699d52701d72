"""The plans hold the model states that the ZeRO paper's table says."""

from __future__ import annotations

from itertools import accumulate

import pytest

import zsim
from tests.oracles.model_states import model_state_bytes
from zsim.plan.make import make_plan
from zsim.specs.experiment.resolve import resolve

CATEGORIES = ("parameters", "gradients", "optimizer_states")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 4, 16, 64, 256, 1024])
def test_a_plan_holds_the_states_of_the_papers_table(stage: int, gpus: int) -> None:
    """2 + 2 + 12 bytes per parameter (1910.02054, section 3.1), each divided by the ranks as the stage says.
    In 16-bit training with Adam; the paper has no padding, which is at most a rank's worth of elements for
    every tensor, 1e-3 of 6.7e9 parameters on 1,024 ranks."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "fp16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    }
    experiment = zsim.Experiment(
        model="llama-2-7b",
        cluster="dgx-2",
        gpus=gpus,
        training={"sequence_length": 128},
        strategy={"config": config},
    )
    job = resolve(experiment)
    plan = make_plan(job)
    expected = model_state_bytes(job.model.numel, stage, gpus)
    for category in CATEGORIES:
        start = sum(memory.bytes for memory in plan.resident if memory.category == category)
        changes = [change.bytes for change in plan.memory if change.category == category]
        assert max(accumulate(changes, initial=start)) == pytest.approx(
            getattr(expected, category), rel=1e-3
        ), category


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_torch_optim_makes_its_states_in_the_first_update(kind: str) -> None:
    """Two for each tensor."""
    experiment = zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        gpus=8,
        training={"sequence_length": 128, "micro_batch_size": 1},
        strategy={"kind": kind},
    )
    plan = make_plan(resolve(experiment))
    (states,) = (memory for memory in plan.resident if memory.category == "optimizer_states")
    assert states.lazy_tensors
    assert sum(states.lazy_tensors) == states.bytes
    assert len(states.lazy_tensors) % 2 == 0
