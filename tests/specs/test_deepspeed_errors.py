"""What is wrong with a DeepSpeed JSON, said in one sentence that begins with the file and the key.

Every check mirrors one of DeepSpeed's own assertions (0.19.8) unless the test says that zsim is stricter.
"""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config

BF16 = {"bf16": {"enabled": True}}


def load(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    options.setdefault("world_size", 8)
    return load_deepspeed_config(
        {"train_micro_batch_size_per_gpu": 1, **config}, name="ds.json", hidden_size=4096, **options
    )


def message(config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(config, **options)
    return str(caught.value)


def zero_message(stage: int, /, **keys: Any) -> str:
    text = message({**BF16, "zero_optimization": {"stage": stage, **keys}})
    prefix = "ds.json: zero_optimization"
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"stage3_param_persitence_threshold": 1e5},
            ": unknown key 'stage3_param_persitence_threshold'; did you mean "
            "'stage3_param_persistence_threshold'?",
        ),
        ({"overlap_com": True}, ": unknown key 'overlap_com'; did you mean 'overlap_comm'?"),
        (
            {"grad_hooks": True},
            ": unknown key 'grad_hooks'; expected one of 43, such as compute_grad_norm, "
            "zero_quantized_weights, overlap_comm, reduce_bucket_size, log_trace_cache_warnings, "
            "legacy_stage1",
        ),
        (
            {"offload_optimizer": {"device": "cpu", "buffer_size": 1e8}},
            ".offload_optimizer: unknown key 'buffer_size'; did you mean "
            "'zero_optimization.offload_param.buffer_size'?",
        ),
        (
            {"offload_param": {"device": "cpu", "max_in_nvme": 1e9}},
            ".offload_param: unknown key 'max_in_nvme'; did you mean 'max_in_cpu'?",
        ),
        (
            {"offload_param": {"device": "disk"}},
            ".offload_param.device: found 'disk', expected 'none', 'cpu' or 'nvme'",
        ),
        ({"leaf_module": {"clases": []}}, ".leaf_module: unknown key 'clases'; did you mean 'classes'?"),
        ({"stage": 4}, ".stage: found 4, expected less than or equal to 3"),
        ({"stage": -1}, ".stage: found -1, expected greater than or equal to 0"),
        ({"stage": True}, ".stage: expected a number, found true"),
        (
            {"reduce_bucket_size": -5},
            ".reduce_bucket_size: found -5, expected greater than or equal to 0",
        ),
        ({"reduce_bucket_size": float("nan")}, ".reduce_bucket_size: found nan, expected a finite number"),
        (
            {"sub_group_size": float("inf")},
            ".sub_group_size: found inf, expected a finite number",
        ),
        (
            {"stage3_max_live_parameters": 1.5},
            ".stage3_max_live_parameters: found 1.5, expected a valid integer, got a number with a "
            "fractional part",
        ),
        ({"reduce_bucket_size": 0}, ".reduce_bucket_size: found 0, expected at least 1 element"),
        (
            {"legacy_stage1": True},
            ".legacy_stage1: the old stage 1 left DeepSpeed with 0.5.9; expected false",
        ),
    ],
)
def test_a_wrong_key_or_value_in_zero_optimization_is_named(keys: dict[str, Any], expected: str) -> None:
    assert zero_message(keys.pop("stage", 3), **keys) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimisation": {}}, "unknown key 'zero_optimisation'; did you mean 'zero_optimization'?"),
        ({"bf16": {"enable": True}}, "bf16: unknown key 'enable'; did you mean 'enabled'?"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale: found -1, expected"),
        ({"fp16": {"enabled": True, "loss_scale": float("nan")}}, "fp16.loss_scale: found nan, expected"),
        ({"gradient_clipping": -0.1}, "gradient_clipping: found -0.1, expected greater than or equal to 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: found nan, expected a finite number"),
        ({"train_batch_size": 0}, "train_batch_size: found 0, expected greater than or equal to 1"),
        ({"communication_data_type": "int8"}, "communication_data_type: found 'int8', expected 'bf16'"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype: found 'int8', expected"),
        ({"zero_optimization": "stage2"}, "zero_optimization: found 'stage2', expected a table"),
        ({"optimizer": {"type": "AdmW"}}, "optimizer.type: 'AdmW' is not an optimizer of DeepSpeed 0.19.8"),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "activation_checkpointing: unknown",
        ),
    ],
)
def test_a_wrong_key_or_value_outside_zero_is_named(config: dict[str, Any], expected: str) -> None:
    assert message(config).startswith(f"ds.json: {expected}")


def test_unknown_top_level_keys_are_refused_though_deepspeed_reads_past_them() -> None:
    assert message({"train_micro_batch_size": 2}) == (
        "ds.json: unknown key 'train_micro_batch_size'; did you mean 'train_micro_batch_size_per_gpu'?"
    )


def test_lenient_turns_unknown_keys_into_notes() -> None:
    config = load(
        {
            "zero_optimization": {"stage": 3, "overlap_coms": 1, "offload_param": {"max_in_nvme": 3}},
            "trian_batch_size": 8,
        },
        lenient=True,
    )
    assert sorted(config.notes) == [
        "ds.json: trian_batch_size: unknown to DeepSpeed; ignored",
        "ds.json: zero_optimization.offload_param.max_in_nvme: unknown to DeepSpeed; ignored",
        "ds.json: zero_optimization.overlap_coms: unknown to DeepSpeed; ignored",
    ]


def test_lenient_still_refuses_wrong_values() -> None:
    assert "found -1" in message(
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": -1, "x": 1}}, lenient=True
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_an_odd_allgather_bucket_is_refused_at_stages_1_and_2(stage: int) -> None:
    assert zero_message(stage, allgather_bucket_size=5) == (
        ".allgather_bucket_size: found 5, expected an even number"
    )


def test_an_odd_allgather_bucket_is_nobodys_business_at_stage_3() -> None:
    load({**BF16, "zero_optimization": {"stage": 3, "allgather_bucket_size": 5}})


@pytest.mark.parametrize("stage", [2, 3])
def test_scaling_gradients_first_does_not_go_with_reduce_scatter(stage: int) -> None:
    config = {**BF16, "zero_optimization": {"stage": stage}}
    assert message({**config, "gradient_predivide_factor": 2.0}) == (
        f"ds.json: gradient_predivide_factor: found 2, expected 1.0 at stage {stage} with "
        "zero_optimization.reduce_scatter"
    )
    assert message({**config, "prescale_gradients": True}) == (
        f"ds.json: prescale_gradients: found true, expected false at stage {stage} with "
        "zero_optimization.reduce_scatter"
    )
    without = {**BF16, "zero_optimization": {"stage": stage, "reduce_scatter": False}}
    assert load({**without, "gradient_predivide_factor": 2.0}) == load(without)


def test_scaling_gradients_first_is_fine_at_stage_1() -> None:
    config = {**BF16, "zero_optimization": {"stage": 1}}
    assert load({**config, "prescale_gradients": True}) == load(config)


def test_summing_gradients_does_not_go_with_stage_3() -> None:
    config = {**BF16, "gradient_allreduce_op": "sum"}
    assert message({**config, "zero_optimization": {"stage": 3}}) == (
        "ds.json: gradient_allreduce_op: found 'sum', expected 'mean' with stage 3"
    )
    stage_2 = {"zero_optimization": {"stage": 2}}
    assert load({**config, **stage_2}) == load({**BF16, **stage_2})


def test_partial_offload_is_for_stage_3() -> None:
    offload = {"device": "cpu", "ratio": 0.5}
    assert zero_message(2, offload_optimizer=offload) == (
        ".offload_optimizer.ratio: found 0.5 at stage 2, expected 1.0; only stage 3 offloads a part"
    )
    assert zero_message(3, offload_optimizer={**offload, "ratio": 1.5}).startswith(
        ".offload_optimizer.ratio: found 1.5, expected less than or equal to 1"
    )


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
def test_nvme_needs_a_path(block: str) -> None:
    assert zero_message(3, **{block: {"device": "nvme"}}) == (
        f".{block}.nvme_path: missing; device 'nvme' needs the path of a folder"
    )


def test_secondary_shards_must_divide_the_world() -> None:
    assert zero_message(3, zero_hpz_partition_size=3) == (
        ".zero_hpz_partition_size: found 3, expected a divisor of the 8 GPUs"
    )
    load({**BF16, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}})  # taken as 8
    odd = {**BF16, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    assert "found 2, expected a divisor of the 7 GPUs" in message(odd, world_size=7)


def test_quantized_gradients_need_reduce_scatter() -> None:
    assert zero_message(3, zero_quantized_gradients=True, reduce_scatter=False) == (
        ".zero_quantized_gradients: needs reduce_scatter, which is false"
    )


@pytest.mark.parametrize(
    ("stage", "extra", "expected"),
    [
        (3, {}, "is for stages 1 and 2; the stage is 3"),
        (2, {}, "needs gradient_clipping 0, which is 1"),
        (2, {"offload_optimizer": {"device": "cpu"}}, "needs gradient_clipping 0"),
    ],
)
def test_leaving_out_the_gradient_norm_is_checked(stage: int, extra: dict[str, Any], expected: str) -> None:
    assert expected in zero_message(stage, compute_grad_norm=False, **extra)


def test_the_gradient_norm_can_be_left_out_without_clipping() -> None:
    config = {"bf16": {"enabled": True}, "gradient_clipping": 0}
    zero = {"stage": 2, "compute_grad_norm": False}
    assert not load({**config, "zero_optimization": zero}).zero.compute_grad_norm
    offloaded = {**zero, "offload_optimizer": {"device": "cpu"}}
    assert "does not go with optimizer offload" in message({**config, "zero_optimization": offloaded})
    accumulated = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {**zero, "stage": 1}}
    assert "does not go with bf16 weights and fp32 accumulation" in message({**config, **accumulated})


def test_max_grad_norm_is_not_an_optimizer_parameter() -> None:
    assert message({**BF16, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}) == (
        "ds.json: optimizer.params.max_grad_norm: DeepSpeed refuses it; expected 'gradient_clipping'"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            TrainingValues(micro_batch_size=2),
            "train_micro_batch_size_per_gpu: found 4, but [training] micro_batch_size is 2",
        ),
        (
            TrainingValues(gradient_accumulation_steps=8),
            "gradient_accumulation_steps: found 2, but [training] gradient_accumulation_steps is 8",
        ),
        (
            TrainingValues(gradient_clipping=1.0),
            "gradient_clipping: found 0.3, but [training] gradient_clipping is 1",
        ),
        (
            TrainingValues(precision="fp16"),
            "bf16.enabled: the file says bf16, but [training] precision is 'fp16'",
        ),
    ],
)
def test_file_and_experiment_must_not_disagree(values: TrainingValues, expected: str) -> None:
    config = {
        **BF16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    }
    assert message(config, training=values) == f"ds.json: {expected}; make them equal or leave one out"
    load(config, training=TrainingValues(4, 2, "bf16", 0.3))


def test_lamb_needs_a_dynamic_loss_scale() -> None:
    lamb = {"optimizer": {"type": "Lamb"}}
    assert message({**lamb, "fp16": {"enabled": True, "loss_scale": 128}}) == (
        "ds.json: optimizer.type: 'Lamb' needs dynamic loss scaling (fp16.loss_scale 0)"
    )
    assert load({**lamb, "fp16": {"enabled": True}}).optimizer.name == "lamb"
    assert load(lamb).optimizer.name == "lamb"


def test_keys_that_deepspeed_does_not_look_for_are_noted() -> None:
    """`DeepSpeedConfig` takes what it knows from the object and looks at nothing else."""
    found = load({"cuda_visible_devices": "0", "comms_config": {"verbose": False}})
    assert found.notes == (
        "ds.json: no effect, since DeepSpeed reads no such key: cuda_visible_devices, comms_config",
    )
    assert load({"data_parallel_size": 4}).notes == ()  # `deepspeed.initialize` looks for it


def test_a_block_that_compiles_nothing_by_itself_says_so() -> None:
    (note,) = load({"compile": {"backend": "inductor"}}).notes
    assert note.startswith("ds.json: compile: compiles nothing by itself")
