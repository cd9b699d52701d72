"""The batch-size triangle and the precision of a DeepSpeed JSON, alone and merged with the experiment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import BatchSizes, DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config, resolve_batch

sizes = st.integers(min_value=1, max_value=64)


def load(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    return load_deepspeed_config(config, name="ds.json", world_size=16, hidden_size=64, **options)


@given(micro=sizes, steps=sizes, world=sizes)
def test_any_two_give_the_third(micro: int, steps: int, world: int) -> None:
    """train = micro x steps x world, whichever is left out."""
    train = micro * steps * world
    expected = BatchSizes(train, micro, steps)
    for train_, micro_, steps_ in (
        (train, micro, None),
        (train, None, steps),
        (None, micro, steps),
        (train, micro, steps),
    ):
        found = resolve_batch(
            "x",
            world_size=world,
            train_batch_size=train_,
            micro_batch_size=micro_,
            gradient_accumulation_steps=steps_,
        )
        assert found == expected


def test_one_alone_means_one_accumulation_step() -> None:
    assert resolve_batch("x", world_size=4, train_batch_size=32) == BatchSizes(32, 8, 1)
    assert resolve_batch("x", world_size=4, micro_batch_size=3) == BatchSizes(12, 3, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"train_batch_size": 100, "micro_batch_size": 2, "gradient_accumulation_steps": 4},
            "train_batch_size: found 100, expected train_micro_batch_size_per_gpu 2 x "
            "gradient_accumulation_steps 4 x 16 GPUs = 128",
        ),
        (
            {"train_batch_size": 100, "micro_batch_size": 3},
            "train_batch_size: found 100, expected a multiple of train_micro_batch_size_per_gpu 3 x 16 GPUs "
            "= 48 (gradient_accumulation_steps follows)",
        ),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": 2},
            "train_batch_size: found 8, expected a multiple of gradient_accumulation_steps 2 x 16 GPUs = 32 "
            "(train_micro_batch_size_per_gpu follows)",
        ),
        (
            {"train_batch_size": 8},
            "train_batch_size: found 8, expected a multiple of 16 GPUs = 16 (train_micro_batch_size_per_gpu "
            "follows, gradient_accumulation_steps is 1)",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "train_micro_batch_size_per_gpu: missing; give it, or train_batch_size, here or as [training] "
            "micro_batch_size",
        ),
        ({"micro_batch_size": 0}, "train_micro_batch_size_per_gpu: found 0, expected at least 1"),
    ],
)
def test_a_triangle_that_does_not_close_names_its_sides(given: dict[str, int], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_batch("ds.json", world_size=16, **given)
    assert str(caught.value) == f"ds.json: {expected}"


def test_the_experiment_fills_what_the_file_leaves_open() -> None:
    config = load({"train_batch_size": 256}, training=TrainingValues(micro_batch_size=2))
    assert config.batch == BatchSizes(256, 2, 8)
    origins = dict(config.origins)
    assert origins["train_batch_size"] == "file"
    assert origins["train_micro_batch_size_per_gpu"] != "file"
    config = load(
        {"train_micro_batch_size_per_gpu": 2}, training=TrainingValues(gradient_accumulation_steps=3)
    )
    assert config.batch == BatchSizes(96, 2, 3)
    origins = dict(config.origins)
    assert origins["train_micro_batch_size_per_gpu"] == "file"
    assert origins["gradient_accumulation_steps"] != "file"


def test_the_triangle_is_closed_after_the_merge() -> None:
    with pytest.raises(InputError, match=r"found 256, expected a multiple of .* 3 x 16 GPUs = 48"):
        load({"train_batch_size": 256}, training=TrainingValues(micro_batch_size=3))


def test_auto_batches_that_the_experiment_leaves_open_are_one_sequence() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    assert load(auto).batch == BatchSizes(16, 1, 1)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        assert load({key: "auto"}).batch == BatchSizes(16, 1, 1)


def test_a_file_without_any_batch_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"^ds.json: train_micro_batch_size_per_gpu: missing"):
        load({"zero_optimization": {"stage": 2}})


MICRO = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("config", "precision", "origin"),
    [
        ({"bf16": {"enabled": True}}, "bf16", "file"),
        ({"bfloat16": {"enabled": True}}, "bf16", "file"),
        ({"fp16": {"enabled": True}}, "fp16", "file"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16", "file"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32", "file"),
        ({"fp16": {"enabled": False}}, "fp32", "default 0.19.8"),
        ({}, "fp32", "default 0.19.8"),
    ],
)
def test_the_precision_is_the_enabled_block(config: dict[str, Any], precision: str, origin: str) -> None:
    """Neither enabled is fp32, as in DeepSpeed; it is the file's own word only when both are switched off."""
    loaded = load({**MICRO, **config})
    assert (loaded.precision, dict(loaded.origins)["precision"]) == (precision, origin)
    assert loaded.param_dtype == loaded.communication_dtype == loaded.grad_accum_dtype == precision


def test_a_silent_file_takes_the_experiments_precision() -> None:
    config = load(MICRO, training=TrainingValues(precision="fp16"))
    assert (config.precision, dict(config.origins)["precision"]) == ("fp16", "experiment")
    assert config.param_dtype == "fp16"


def test_fp8_is_bf16_to_deepspeed() -> None:
    config = load({**MICRO, "bf16": {"enabled": True}}, training=TrainingValues(precision="fp8"))
    assert (config.precision, config.param_dtype, config.communication_dtype) == ("fp8", "bf16", "bf16")
    with pytest.raises(InputError, match=r"the file says fp16, but .* precision is 'fp8'"):
        load({**MICRO, "fp16": {"enabled": True}}, training=TrainingValues(precision="fp8"))


def test_a_block_switched_off_contradicts_the_experiment() -> None:
    with pytest.raises(InputError, match=r"^ds.json: fp16.enabled: found false, but .* precision is 'fp16'"):
        load({**MICRO, "fp16": {"enabled": False}}, training=TrainingValues(precision="fp16"))
    both_off = {"fp16": {"enabled": False}, "bf16": {"enabled": False}}
    with pytest.raises(InputError, match=r"^ds.json: bf16.enabled: the file says fp32, but .* is 'bf16'"):
        load({**MICRO, **both_off}, training=TrainingValues(precision="bf16"))
    assert load({**MICRO, **both_off}, training=TrainingValues(precision="fp32")).precision == "fp32"


def test_both_precisions_at_once_are_refused() -> None:
    with pytest.raises(InputError, match="bf16 and fp16 are both enabled; expected one of them"):
        load({**MICRO, "bf16": {"enabled": True}, "fp16": {"enabled": True}})
    with pytest.raises(InputError, match="'bf16', and both are there; give one"):
        load({**MICRO, "bf16": {"enabled": True}, "bfloat16": {"enabled": True}})


@pytest.mark.parametrize("name", ["fp32", "FP32"])
def test_gradients_may_travel_in_another_type(name: str) -> None:
    config = load({**MICRO, "bf16": {"enabled": True}, "communication_data_type": name})
    assert (config.communication_dtype, config.grad_accum_dtype) == ("fp32", "bf16")


def test_the_stated_weight_type_must_be_the_one_trained_in() -> None:
    config = {**MICRO, "bf16": {"enabled": True}}
    load({**config, "data_types": {"param_dtype": "bfloat16"}})
    with pytest.raises(InputError, match=r"data_types.param_dtype: found fp32, expected bf16"):
        load({**config, "data_types": {"param_dtype": "fp32"}})


@pytest.mark.parametrize(
    ("bf16", "zero", "expected"),
    [
        ({"bf16_optimizer_states": True}, {"stage": 2}, "needs bf16.bf16_master_weights_and_grads"),
        ({"bf16_master_weights_and_grads": True}, {"stage": 2}, "needs zero_optimization.offload_optimizer"),
        (
            {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            {"stage": 0},
            "found true at stage 0, expected stage 1, 2 or 3",
        ),
    ],
)
def test_low_precision_master_weights_are_checked(
    bf16: dict[str, Any], zero: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        load({**MICRO, "bf16": {"enabled": True, **bf16}, "zero_optimization": zero})


@pytest.mark.parametrize(
    ("device", "version", "states"),
    [("none", "0.18.3", "bf16"), ("cpu", "0.19.1", "bf16"), ("cpu", "0.19.0", "fp32")],
)
def test_moments_of_bf16_masters_are_bf16_where_the_release_passes_it_on(
    device: str, version: str, states: str
) -> None:
    """DeepSpeed's #8010 (0.19.1) passes `bf16_optimizer_states` on to DeepSpeedCPUAdam."""
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    config = load({**MICRO, "bf16": bf16, "zero_optimization": zero}, version=version)
    assert (config.master_weights_dtype, config.optimizer_states_dtype) == ("bf16", states)
    assert not config.unsimulated


def test_low_precision_masters_need_a_release_that_has_them() -> None:
    """0.18.3's #7700 brings those of bf16. Those of fp16 are older, at stage 2 alone."""
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    fp16 = {"enabled": True, "fp16_master_weights_and_grads": True}
    cpu = {"device": "cpu"}
    load(
        {**MICRO, "fp16": fp16, "zero_optimization": {"stage": 2, "offload_optimizer": cpu}}, version="0.10.3"
    )
    with pytest.raises(InputError, match=r"at stage 2 with DeepSpeed 0.18.2; expected .* from 0.18.3 on"):
        load({**MICRO, "bf16": bf16, "zero_optimization": {"stage": 2}}, version="0.18.2")
    with pytest.raises(InputError, match=r"at stage 1 with DeepSpeed 0.18.2; expected stage 2"):
        load(
            {**MICRO, "fp16": fp16, "zero_optimization": {"stage": 1, "offload_optimizer": cpu}},
            version="0.18.2",
        )


def test_low_precision_masters_on_nvme_are_not_simulated() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    config = load({**MICRO, "bf16": bf16, "zero_optimization": zero})
    assert [setting.reason for setting in config.unsimulated] == [
        "master weights in bf16 with states on NVMe"
    ]


@pytest.mark.parametrize(
    ("optimizer", "zero", "name", "implementation"),
    [
        (None, {"stage": 2}, None, "fused"),
        ({"type": "Adam"}, {"stage": 2}, "adam", "fused"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"stage": 2}, "adamw", "torch"),
        ({"type": "AdamW"}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "adamw", "cpu"),
        ({"type": "AdamW"}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "adamw", "cpu"),
        (
            {"type": "AdamW", "params": {"torch_adam": True}},
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "adamw",
            "torch",
        ),
    ],
)
def test_which_adam_steps(
    optimizer: dict[str, Any] | None, zero: dict[str, Any], name: str | None, implementation: str
) -> None:
    config = load({**MICRO, "bf16": {"enabled": True}, "optimizer": optimizer, "zero_optimization": zero})
    assert (config.optimizer.name, config.optimizer.implementation) == (name, implementation)
