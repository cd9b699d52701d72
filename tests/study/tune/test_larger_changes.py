"""What makes a job fit that no switch makes fit: other degrees of parallelism, adapters."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.report.memory import Remedy
from zsim.specs.experiment.load import change_experiment
from zsim.study.tune.remedy import remedy_of


def remedy(kind: str, **given: Any) -> tuple[zsim.Experiment, Remedy]:
    training = {"sequence_length": 2048, "gradient_accumulation_steps": 8}
    data = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "training": training, "strategy": {"kind": kind}}
    experiment = zsim.Experiment(**{**data, **given})
    found = remedy_of(experiment)
    assert found is not None
    return experiment, found


def test_experts_on_several_ranks_are_a_remedy_of_megatrons() -> None:
    """Mixtral's 46.7 billion parameters are 93 GB in bf16, more than a GPU, whatever shards the states over
    data parallel ranks; on 8 ranks in each of 2 stages the experts, 45.1 billion, are a sixteenth of that:
    7.2 GB with half of the rest. The batch stays: fewer replicas make more micro-batches."""
    experiment, found = remedy("megatron", gpus=16)
    degrees = [found.overrides.get(f"parallelism.{name}", 1) for name in ("pipeline", "tensor", "expert")]
    assert degrees == [2, 1, 8]
    replicas = 16 // (degrees[0] * degrees[1])
    assert found.overrides["training.gradient_accumulation_steps"] * replicas == 8 * 16
    after = zsim.simulate(change_experiment(experiment, found.overrides)).report
    assert after.out_of_memory is None
    assert after.peaks["gpu"].total == found.gpu_peak_bytes
    assert after.peaks["gpu"].by_category["parameters"] == pytest.approx(7.2e9, rel=0.01)


def test_adapters_are_a_remedy_where_there_are_no_degrees() -> None:
    """Under DDP every GPU holds Llama 2's 13 billion parameters with 16 bytes each: 208 GB. Frozen in bf16
    they are 26."""
    experiment, found = remedy("ddp", model="llama-2-13b", gpus=8)
    assert found.overrides["training.lora.rank"] == 16
    assert zsim.simulate(change_experiment(experiment, found.overrides)).report.out_of_memory is None
