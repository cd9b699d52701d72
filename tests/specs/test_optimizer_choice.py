"""Which framework takes which optimizer, and what it says where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

ONE = {"train_micro_batch_size_per_gpu": 1}


def job(strategy: dict[str, Any], **training: Any) -> Any:
    table = {"sequence_length": 512, "precision": "bf16", **training}
    return resolve(Experiment(model="gpt2", cluster="dgx-h100", gpus=8, training=table, strategy=strategy))


@pytest.mark.parametrize(
    ("strategy", "training", "sentence"),
    [
        ({"kind": "fsdp2"}, {"optimizer": "adamw-8bit"}, "got mixed torch.Tensor and DTensor"),
        ({"kind": "fsdp2"}, {"optimizer": "lion"}, "of a DTensor, as FSDP2's parameters are, is 0"),
        (
            {"kind": "megatron", "version": "0.15.3"},
            {"optimizer": "muon"},
            "has 'muon' from 0.16 on; found strategy.version '0.15.3'",
        ),
        (
            {"kind": "megatron", "version": "0.17.1", "distributed_optimizer": True},
            {"optimizer": "muon"},
            "0.17.1 refuses 'muon' with the distributed optimizer",
        ),
        ({"kind": "fsdp1"}, {"optimizer": "muon"}, "flat parameters are vectors"),
        ({"kind": "deepspeed", "stage": 2}, {"optimizer": "adamw-8bit"}, "zero_allow_untested_optimizer"),
        ({"kind": "megatron"}, {"optimizer": "adamw-bf16"}, "needs the distributed optimizer"),
        ({"kind": "megatron"}, {"optimizer": "adafactor"}, "Megatron has no 'adafactor'; expected one of"),
        ({"kind": "megatron"}, {"optimizer": "adagrad"}, "Megatron has no 'adagrad'"),
        ({"kind": "megatron"}, {"optimizer": "adamw-8bit"}, "Megatron has no 'adamw-8bit'"),
        ({"kind": "megatron"}, {"optimizer": "lion"}, "has 'lion' from 0.17 on; found strategy.version"),
        (
            {"kind": "megatron", "version": "0.17.1", "distributed_optimizer": True},
            {"optimizer": "lion"},
            "with the distributed optimizer from 0.19 on",
        ),
        ({"kind": "ddp"}, {"optimizer": "lion", "optimizer_implementation": "foreach"}, "one implementation"),
        ({"kind": "ddp"}, {"paged_states": "host"}, "not paged; expected training.optimizer to be one of"),
        ({"kind": "ddp"}, {"stochastic_rounding": True}, "expected stored_dtype = 'bf16'"),
        ({"kind": "ddp"}, {"optimizer": "admw"}, "did you mean 'adamw'"),
    ],
)
def test_a_pair_that_a_framework_refuses_is_one_sentence(
    strategy: dict[str, Any], training: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        job(strategy, **training)


@pytest.mark.parametrize(
    ("strategy", "training", "sentence"),
    [
        (
            {
                "kind": "megatron",
                "version": "0.18.2",
                "distributed_optimizer": True,
                "precision_aware_optimizer": True,
            },
            {"optimizer": "muon"},
            "precision_aware_optimizer: not simulated beside 'muon'",
        ),
        ({"kind": "deepspeed", "stage": 0}, {"optimizer": "muon"}, "not simulated at stage 0"),
        ({"kind": "fsdp2", "cpu_offload": True}, {"optimizer": "adafactor"}, "strategy.cpu_offload"),
        ({"kind": "ddp"}, {"optimizer": "shampoo"}, "preconditioners"),
    ],
)
def test_what_zsim_lacks_is_said_with_its_reason(
    strategy: dict[str, Any], training: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(NotSimulatedError, match=sentence):
        job(strategy, **training)


def test_the_json_names_the_optimizer() -> None:
    """DeepSpeed's Lion: one moment; a different name in [training] is a contradiction."""
    lion = {
        "kind": "deepspeed",
        "config": {**ONE, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}},
    }
    assert job(lion).training.optimizer == "lion"
    with pytest.raises(InputError, match=r"found 'sgd', but .* says optimizer.type, which is 'lion'"):
        job(lion, optimizer="sgd")


def test_an_untested_optimizer_is_allowed_by_its_key() -> None:
    config = {**ONE, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    assert job({"kind": "deepspeed", "config": config}, optimizer="sgd").training.optimizer == "sgd"


def test_offload_demands_deepspeeds_own_cpu_optimizer() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**ONE, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    with pytest.raises(InputError, match="zero_force_ds_cpu_optimizer"):
        job({"kind": "deepspeed", "config": config}, optimizer="sgd_momentum")


def test_megatrons_lion_keeps_one_moment_and_passes_nine_times() -> None:
    """GPT-2 has 124,439,808 parameters: an fp32 master and a moment on every rank without the distributed
    optimizer, 8 bytes each; 36 bytes moved each, three kernels a tensor."""
    from zsim.plan.make import make_plan
    from zsim.plan.ops import Kernels

    lion = job({"kind": "megatron", "version": "0.17.1"}, optimizer="lion")
    program = make_plan(lion).programs[0]
    states = sum(one.bytes for one in program.resident if one.category == "optimizer_states")
    numel = lion.model.numel
    assert states == 8 * numel
    (step,) = (op.work for op in program.ops if op.name == "optimizer step")
    assert isinstance(step, Kernels)
    assert step.kernels[0].hbm_bytes == 36 * numel
    assert step.kernels[0].launches % 3 == 0


def test_states_on_the_host_are_not_simulated_where_they_are_partitions() -> None:
    config = {**ONE, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    strategy = {"kind": "deepspeed", "config": config}
    with pytest.raises(NotSimulatedError, match=r"paged_states: found 'host' under DeepSpeed"):
        job(strategy, optimizer="paged-adamw", paged_states="host")
    assert job(strategy, optimizer="paged-adamw")
