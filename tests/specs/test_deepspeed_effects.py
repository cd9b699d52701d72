"""Keys of a DeepSpeed JSON that do nothing, that are not simulated, and the table of what is in force."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, TrainingValues
from zsim.frameworks.deepspeed.settings.effects import describe_settings
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.unsimulated import refuse_unsimulated

HIDDEN = 4096


def load(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    options.setdefault("world_size", 8)
    options.setdefault("hidden_size", HIDDEN)
    return load_deepspeed_config({"train_micro_batch_size_per_gpu": 1, **config}, name="ds.json", **options)


def zero(stage: int, /, **keys: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("config", "values", "origin"),
    [
        ({"bf16": {"enabled": True}}, TrainingValues(), "file"),
        ({"bf16": {"enabled": True}}, TrainingValues(precision="bf16"), "file"),
        ({"bf16": {"enabled": True}}, TrainingValues(precision="fp8"), "experiment"),
        ({}, TrainingValues(precision="bf16"), "experiment"),
        ({"bf16": {"enabled": "auto"}}, TrainingValues(), "auto"),
        ({}, TrainingValues(), "default 0.19.8"),
    ],
)
def test_settings_say_who_chose_the_precision(
    config: dict[str, Any], values: TrainingValues, origin: str
) -> None:
    rows = {row.key: row.origin for row in describe_settings(load(config, training=values), 1)}
    assert rows["precision"] == origin


def test_keys_without_effect_are_named_once_per_reason() -> None:
    config = load(
        zero(
            2,
            allgather_partitions=True,
            allgather_bucket_size=2e8,
            stage3_prefetch_bucket_size=1e7,
            sub_group_size=1e9,
            overlap_comm=True,
            reduce_scatter=True,
        )
    )
    assert config.notes == (
        "ds.json: zero_optimization: allgather_partitions: no effect: read by nothing",
        "ds.json: zero_optimization: allgather_bucket_size: no effect: the step gathers in one "
        "piece since 0.12.4",
        "ds.json: zero_optimization: sub_group_size, stage3_prefetch_bucket_size: no effect at stage 2",
    )


def test_keys_of_stages_1_and_2_have_no_effect_at_stage_3() -> None:
    config = load(zero(3, round_robin_gradients=True, use_multi_rank_bucket_allreduce=False))
    assert config.notes == (
        "ds.json: zero_optimization: use_multi_rank_bucket_allreduce, round_robin_gradients: "
        "no effect at stage 3",
    )


def test_a_multi_rank_bucket_needs_reduce_scatter() -> None:
    config = load(zero(2, use_multi_rank_bucket_allreduce=False, reduce_scatter=False))
    assert config.notes == (
        "ds.json: zero_optimization: use_multi_rank_bucket_allreduce: no effect: without reduce_scatter a "
        "bucket is all-reduced anyway",
    )


def test_nvme_for_the_optimizer_is_the_cpu_below_stage_3() -> None:
    config = load(zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}))
    assert config.zero.offload_optimizer is not None
    assert config.zero.offload_optimizer.device == "cpu"
    assert any("'nvme' means the CPU below stage 3" in note for note in config.notes)


def test_offload_that_the_stage_does_not_know_is_a_note() -> None:
    config = load(zero(2, offload_param={"device": "cpu"}))
    assert config.zero.offload_param is None
    assert config.notes == ("ds.json: zero_optimization: offload_param: no effect at stage 2",)
    refuse_unsimulated(config)


def test_activation_checkpointing_and_timers_are_noted() -> None:
    config = load(
        {
            **zero(2),
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
            "wall_clock_breakdown": True,
            "comms_logger": {"enabled": True, "verbose": False},
            "flops_profiler": {"enabled": False},
            "aio": {"block_size": 1048576},
        }
    )
    assert config.activation_checkpointing.partition_activations
    assert len(config.notes) == 3
    assert config.notes[0] == "ds.json: aio: no effect without offload to nvme"
    assert (
        "as if the model calls deepspeed.checkpointing; torch's checkpoint would ignore it" in config.notes[1]
    )
    assert config.notes[2].startswith("ds.json: wall_clock_breakdown, comms_logger: DeepSpeed waits")


def test_keys_that_do_not_touch_a_step_are_taken_silently() -> None:
    config = load(
        {
            **zero(1, load_from_fp32_weights=False, elastic_checkpoint=True, ignore_unused_parameters=False),
            "steps_per_print": 10,
            "dump_state": True,
            "checkpoint": {"tag_validation": "Warn"},
            "tensorboard": {"enabled": True, "output_path": "logs"},
            "wandb": {"enabled": False},
            "csv_monitor": {"enabled": False},
            "scheduler": {"type": "WarmupDecayLR", "params": {}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "dataloader_drop_last": True,
            "autotuning": {"enabled": False},
            "data_efficiency": {"enabled": False},
        }
    )
    assert config.notes == ()
    assert config.unsimulated == ()


def test_comments_are_read_past_with_a_note() -> None:
    config = load({**zero(1), "_comment": "for the small box", "//": 1})
    assert config.notes == ("ds.json: read as comments: _comment, //",)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/n", "super_offload": True}},
            "offload_optimizer.super_offload",
        ),
        (
            {
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4},
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
            },
            "zenflow",
        ),
    ],
)
def test_what_is_not_simulated_at_stage_3_is_refused_by_name(extra: dict[str, Any], key: str) -> None:
    config = load(zero(3, **extra))
    with pytest.raises(NotSimulatedError, match=f"^ds.json: zero_optimization.{key}: zsim does not simulate"):
        refuse_unsimulated(config)


@pytest.mark.parametrize(
    ("version", "extra", "key"),
    [
        (
            "0.16.9",
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "compression_training",
        ),
        ("0.16.9", {"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ("0.16.9", {"sparse_gradients": True}, "sparse_gradients"),
        ("0.19.7", {"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ("0.19.8", zero(1, zenflow={}, offload_optimizer={"device": "cpu"}), "zero_optimization.zenflow"),
    ],
)
def test_older_blocks_are_refused_by_name(version: str, extra: dict[str, Any], key: str) -> None:
    config = load({**zero(2), **extra}, version=version)
    with pytest.raises(NotSimulatedError, match=f"^ds.json: {key}: zsim does not simulate .* yet$"):
        refuse_unsimulated(config)


@pytest.mark.parametrize(
    "extra",
    [
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"sparse_gradients": False},
        {"sequence_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 1}},
        {"optimizer": {"type": "Adam"}},
        {"optimizer": {"params": {"lr": 1e-4}}},
    ],
)
def test_blocks_that_are_there_but_off_are_simulated(extra: dict[str, Any]) -> None:
    assert load({**zero(2), **extra}, version="0.16.9").unsimulated == ()


@pytest.mark.parametrize(
    "extra",
    [
        {"zero_hpz_partition_size": 1},
        {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        {"offload_param": {"device": "none"}},
        {"offload_optimizer": {"device": "none"}},
        {"zenflow": None},
    ],
)
def test_the_same_keys_switched_off_and_zero_plus_plus_are_simulated(extra: dict[str, Any]) -> None:
    config = load(zero(3, **extra))
    assert config.unsimulated == ()


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_zero_plus_plus_below_stage_3_is_a_note(key: str) -> None:
    config = load(zero(2, **{key: True}))
    assert config.notes == (f"ds.json: zero_optimization: {key}: no effect at stage 2",)
    refuse_unsimulated(config)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        (
            {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}},
            "tensor_parallel.vocab_parallel_lm_head",
        ),
        ({"compile": {"deepcompile": True, "free_activation": True}}, "compile.free_activation"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-4}}}, "optimizer.type"),
        ({"optimizer": {"type": "RMSprop"}}, "optimizer.type"),
    ],
)
def test_blocks_that_change_the_step_are_refused_by_name(extra: dict[str, Any], key: str) -> None:
    config = load({**zero(2), **extra})
    with pytest.raises(NotSimulatedError, match=f"^ds.json: {key}: zsim does not simulate .* yet$"):
        refuse_unsimulated(config)


def test_everything_unsimulated_is_named() -> None:
    offload = {"device": "nvme", "nvme_path": "/n", "super_offload": True}
    config = load({**zero(3, offload_optimizer=offload), "hybrid_engine": {"enabled": True}})
    with pytest.raises(NotSimulatedError) as caught:
        refuse_unsimulated(config)
    assert str(caught.value) == (
        "ds.json: zero_optimization.offload_optimizer.super_offload: zsim does not simulate SuperOffload "
        "with states on NVMe, only with device 'cpu', yet (nor 'hybrid_engine')"
    )


def test_settings_say_value_origin_and_effect() -> None:
    config = load(
        {**zero(2, reduce_bucket_size="auto", overlap_comm=True), "gradient_clipping": 0.5},
        training=TrainingValues(gradient_accumulation_steps=4),
    )
    rows = {row.key: (row.value, row.origin, row.effect) for row in describe_settings(config, 1)}
    assert rows["zero_optimization.reduce_bucket_size"] == (
        "16,777,216",
        "auto",
        "elements reduced at a time",
    )
    assert rows["zero_optimization.overlap_comm"][:2] == ("true", "file")
    assert rows["zero_optimization.contiguous_gradients"][:2] == ("true", "default 0.19.8")
    assert rows["zero_optimization.stage3_prefetch_bucket_size"] == (
        "50,000,000",
        "default 0.19.8",
        "no effect at stage 2",
    )
    assert rows["zero_optimization.stage3_model_persistence_threshold"][0] == "unlimited"
    assert rows["gradient_clipping"][:2] == ("0.5", "file")
    assert rows["gradient_accumulation_steps"][:2] == ("4", "experiment")
    assert rows["train_batch_size"][:2] == ("32", "worked out")
    assert rows["precision"][:2] == ("bf16", "file")
    assert "zero_optimization.mics_shard_size" not in rows
