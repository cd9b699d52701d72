"""Master weights and moments in 16 bits (DeepSpeed 0.19.8 docs/_pages/config-json.md, its support matrix)."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.plan.make import make_plan
from zsim.plan.ops import HostWork, Plan
from zsim.specs.experiment.resolve import resolve

WIDTH, LAYERS = 1024, 4
MASTERS = {"bf16_master_weights_and_grads": True}
ALL = {**MASTERS, "bf16_optimizer_states": True}
CPU = {"offload_optimizer": {"device": "cpu"}}


def plan_of(bf16: dict[str, Any], zero: dict[str, Any], steps: int = 1) -> tuple[Plan, int]:
    """The plan on one GPU, which has the whole partition, and the number of parameters."""
    model = {
        "model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 16, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip
    config = {
        "bf16": {"enabled": True, **bf16},
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
    }
    job = resolve(
        Experiment(
            model=model, cluster="dgx-h100", gpus=1, strategy={"kind": "deepspeed", "config": config},
            training={"sequence_length": 512, "gradient_accumulation_steps": steps},
        )
    )  # fmt: skip
    return make_plan(job), job.model.numel


def bytes_per_parameter(plan: Plan, numel: int, category: str, device: str) -> float:
    memories = plan.programs[0].resident
    size = sum(memory.bytes for memory in memories if (memory.category, memory.device) == (category, device))
    return size / numel


@pytest.mark.parametrize(
    ("bf16", "zero", "device", "expected"),
    [
        ({}, {"stage": 1}, "gpu", 12),
        (ALL, {"stage": 1}, "gpu", 6),
        (ALL, {"stage": 2}, "gpu", 6),
        ({}, {"stage": 3}, "gpu", 12),
        (ALL, {"stage": 3}, "gpu", 6),
        ({}, {"stage": 2, **CPU}, "host", 12),
        (ALL, {"stage": 2, **CPU}, "host", 6),  # "~6 bytes/param, versus ~10 with moments in fp32"
        (MASTERS, {"stage": 2, **CPU}, "host", 10),
        (ALL, {"stage": 3, **CPU}, "host", 6),
        (MASTERS, {"stage": 3, **CPU}, "host", 10),
    ],
)
def test_masters_and_moments_take_the_bytes_of_their_types(
    bf16: dict[str, Any], zero: dict[str, Any], device: str, expected: int
) -> None:
    plan, numel = plan_of(bf16, zero)
    assert bytes_per_parameter(plan, numel, "optimizer_states", device) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("bf16", "expected"), [({}, 6), (ALL, 2)])
def test_gradients_of_16_bit_masters_are_their_own_sums(bf16: dict[str, Any], expected: int) -> None:
    """4 bytes in fp32 and 2 of sums, or 2 that are both (`buffer_to_accumulate_to_in_cpu`)."""
    plan, numel = plan_of(bf16, {"stage": 2, **CPU}, steps=2)
    assert bytes_per_parameter(plan, numel, "gradients", "host") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("bf16", "expected"), [({}, 28), (MASTERS, 22), (ALL, 14)])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_cpu_reads_and_writes_less(stage: int, bf16: dict[str, Any], expected: int) -> None:
    """Adam reads and writes master and moments and reads the gradient: 2 x (4 + 8) + 4 bytes in fp32,
    2 x (2 + 8) + 2 with 16-bit masters, and 2 x (2 + 4) + 2 with 16-bit moments as well.
    """
    plan, numel = plan_of(bf16, {"stage": stage, **CPU})
    works = [op.work for op in plan.programs[0].ops if isinstance(op.work, HostWork)]
    size = sum(work.bytes for work in works if work.kind == "optimizer")
    assert size / numel == pytest.approx(expected, rel=1e-3)
