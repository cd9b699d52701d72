"""Tensor, pipeline and other parallelisms in an experiment are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import experiment_from

DATA = {"model": "llama-3-8b", "cluster": "dgx-h100"}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("strategy.tensor_parallel", "tensor"),
        ("strategy.pipeline_parallel", "pipeline"),
        ("strategy.context_parallel", "context"),
        ("strategy.expert_parallel", "expert"),
        ("strategy.tp", "tensor"),
        ("strategy.pp_size", "pipeline"),
        ("strategy.tensor_model_parallel_size", "tensor"),
        ("strategy.expert_tensor_parallel_degree", "expert tensor"),
        ("training.cp", "context"),
        ("parallelism.tensor_parallel_degree", "tensor"),
        ("sequence_parallel", "sequence"),
    ],
)
def test_a_parallelism_is_refused_by_name(key: str, kind: str) -> None:
    with pytest.raises(
        NotSimulatedError, match=f"test: {key}: zsim does not simulate {kind} parallelism yet"
    ):
        experiment_from(dict(DATA), {key: 8}, origin="test")


@pytest.mark.parametrize("strategy", [{"kind": "ddp", "tp": 2}, {"stage": 3, "tp": 2}, {"tp": 2}])
def test_whatever_the_strategy_is(strategy: dict[str, Any]) -> None:
    with pytest.raises(NotSimulatedError, match=r"strategy\.tp: zsim does not simulate tensor parallelism"):
        zsim.Experiment(**DATA, strategy=strategy)


@pytest.mark.parametrize("key", ["tensor", "parallel", "sequence", "data_parallel"])
def test_other_unknown_keys_are_unknown(key: str) -> None:
    with pytest.raises(InputError, match=f"unknown key '{key}'"):
        zsim.Experiment(**DATA, strategy={"kind": "fsdp2", key: 2})
