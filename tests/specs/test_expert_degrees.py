"""What is refused of expert parallelism, each in a paragraph with the nearest right value."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.strategy.expert_degrees import assume_loads

MEGATRON = {"kind": "megatron"}
TITAN = {"kind": "fsdp2", "wrapping": "torchtitan"}
HUGGINGFACE = {"kind": "fsdp2", "wrapping": "huggingface"}


def resolved(strategy: dict[str, Any], parallelism: dict[str, Any], model: str = "mixtral-8x7b") -> Job:
    training = {"sequence_length": 4096}
    data: dict[str, Any] = {"model": model, "cluster": "dgx-h100", "nodes": 4, "training": training}
    return resolve(Experiment(**data, strategy=strategy, parallelism=parallelism))


@pytest.mark.parametrize(
    ("strategy", "parallelism", "message"),
    [
        (MEGATRON, {"expert": 3}, "3, which does not divide the 8 routed experts .* nearest that does is 2"),
        (MEGATRON, {"expert_tensor": 3}, "does not divide the 14,336 features of an expert"),
        (MEGATRON, {"expert": 8, "expert_tensor": 8}, r"expert 64|do not divide the 32 GPUs"),
        (MEGATRON, {"tensor": 2, "expert": 4}, "which Megatron refuses to train; expected sequence_parallel"),
        (MEGATRON, {"dispatcher": "deepep"}, "'deepep' with expert = 1, which Megatron refuses"),
        (
            MEGATRON,
            {"expert": 4, "capacity_factor": 1.5, "dispatcher": "all-gather"},
            "Megatron drops tokens with 'all-to-all' only",
        ),
        ({**MEGATRON, "moe_pad_to_capacity": True}, {"expert": 4}, "without parallelism.capacity_factor"),
        (
            TITAN,
            {"expert": 4, "dispatcher": "all-gather"},
            "torchtitan has no 'all-gather'; expected",
        ),
        (
            TITAN,
            {"expert": 4, "tensor": 4, "expert_tensor": 2},
            "takes 1 or the degree .* none from 0.3",
        ),
        (TITAN, {"expert": 4, "capacity_factor": 1.5}, "torchtitan drops no tokens"),
        ({**TITAN, "replicate": 8}, {"expert": 8}, "do not divide the 32 GPUs of a pipeline stage in 8 repl"),
        (
            {**MEGATRON, "distributed_optimizer": True, "optimizer_instances": 2},
            {"expert": 8, "expert_tensor": 4, "tensor": 4, "sequence_parallel": True},
            "expert: 8 ranks x expert_tensor 4 do not divide the 32 GPUs of a pipeline stage in 2 replicas",
        ),
        (MEGATRON, {"expert": 4, "expert_imbalance": 5}, "one of 4 ranks has at most 4 times the mean"),
        (
            MEGATRON,
            {"expert": 4, "expert_imbalance": [1, 2]},
            "found 2 loads .* expected 4, one per",
        ),
        (
            MEGATRON,
            {"expert": 4, "expert_imbalance": "loss-free"},
            "unknown spread 'loss-free'; did you",
        ),
        (MEGATRON, {"expert_padding": True}, "'megatron', which pads no expert to the fullest; expected"),
        ({"kind": "fsdp2"}, {"expert_padding": True, "expert_imbalance": 5}, "takes at most 4 times it"),
        (
            {"kind": "fsdp2"},
            {"expert_padding": True, "expert_imbalance": [8, 0, 0, 0, 0, 0, 0, 0]},
            "the fullest expert has 8 times the mean",
        ),
        (MEGATRON, {"expert": 4, "expert_imbalance": "seed:x"}, "expected a whole number behind 'seed:'"),
    ],
)
def test_what_does_not_go_is_refused(
    strategy: dict[str, Any], parallelism: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        resolved(strategy, parallelism)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert", 8), ("dispatcher", "deepep"), ("capacity_factor", 2.0), ("expert_imbalance", 1.5),
        ("expert_padding", True),
    ],
)  # fmt: skip
def test_a_dense_model_has_no_experts(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"parallelism.{key}: found .* 'llama-3-8b' has no routed experts"):
        resolved(MEGATRON, {key: value}, "llama-3-8b")


@pytest.mark.parametrize(
    ("strategy", "parallelism"),
    [
        (HUGGINGFACE, {"expert": 4}),
        ({"kind": "fsdp1"}, {"expert": 4}),
        (HUGGINGFACE, {"tensor": 2}),
    ],
)
def test_what_zsim_lacks_is_said(strategy: dict[str, Any], parallelism: dict[str, Any]) -> None:
    with pytest.raises(
        NotSimulatedError, match=r"expected (strategy 'megatron', ('deepspeed', )?or 'fsdp2' with|1)"
    ):
        resolved(strategy, parallelism)


@pytest.mark.parametrize(("key", "value"), [("tensor", 2), ("expert", 4), ("capacity_factor", 2.0)])
def test_padded_experts_are_whole_on_every_rank(key: str, value: Any) -> None:
    with pytest.raises(
        NotSimulatedError, match=f"parallelism.{key}: found {value} with expert_padding, which"
    ):
        resolved({"kind": "fsdp2"}, {"expert_padding": True, key: value})


def test_what_is_left_out_is_the_frameworks_own() -> None:
    """Megatron: expert_tensor = tensor; torchtitan: 1; both all-to-alls."""
    megatron = resolved(MEGATRON, {"tensor": 2, "sequence_parallel": True, "expert": 4}).parallelism.experts
    assert (megatron.tensor, megatron.dispatcher) == (2, "all-to-all")
    titan = resolved(TITAN, {"tensor": 2, "expert": 4}).parallelism.experts
    assert (titan.tensor, titan.dispatcher) == (1, "all-to-all")


@pytest.mark.parametrize(
    ("strategy", "parallelism", "dispatcher"),
    [
        ({}, {}, "hybridep"),
        ({"version": "0.14"}, {}, "all-to-all"),
        ({"overlap_shared_experts": True}, {}, "all-to-all"),
        ({}, {"capacity_factor": 1.5}, "all-to-all"),
        ({}, {"dispatcher": "all-gather"}, "all-gather"),
    ],
)
def test_megatron_takes_hybridep_where_an_nvlink_domain_spans_nodes(
    strategy: dict[str, Any], parallelism: dict[str, Any], dispatcher: str
) -> None:
    """As the recipes of NVL72 have it, from Megatron-Core 0.15 on, unless something needs all-to-alls."""
    job = resolve(
        Experiment(
            model="qwen3-30b-a3b",
            cluster="gb200-nvl72",
            nodes=4,
            training={"sequence_length": 4096},
            strategy=MEGATRON | strategy,
            parallelism={"expert": 16} | parallelism,
        )
    )
    assert job.parallelism.experts.dispatcher == dispatcher
    notes = [note for note in job.notes if note.startswith("parallelism.dispatcher is left out")]
    assert len(notes) == ("dispatcher" not in parallelism)


def test_padded_experts_are_as_full_as_under_a_trained_router() -> None:
    """Of 8 experts, two a token, one has at most 4 times the mean, and 0.92 of it at a run's start."""
    job = resolved({"kind": "fsdp2"}, {"expert_padding": True})
    experts = stacked_experts(job.model)
    assert experts is not None
    low, high = (assume_loads(job.parallelism.experts, experts, end).padding for end in ("low", "high"))
    assert 1 < low < job.parallelism.experts.padding < 2
    assert high == pytest.approx(3.68)
    assert any("padded to the fullest's rows" in note for note in job.notes)
