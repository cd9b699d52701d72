"""What an empty DeepSpeed JSON means: the defaults of DeepSpeed 0.19.8's source, written out."""

from __future__ import annotations

from typing import Any

from zsim.specs.strategy.deepspeed.config import (
    ActivationCheckpointingConfig,
    AioConfig,
    DeepSpeedConfig,
    LeafModules,
    LossScaling,
    OptimizerOffload,
    ParameterOffload,
    ZeroConfig,
)
from zsim.specs.strategy.deepspeed.load import load_deepspeed_config

MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def load(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    options.setdefault("world_size", 8)
    options.setdefault("hidden_size", 4096)
    return load_deepspeed_config({"train_micro_batch_size_per_gpu": 1, **config}, name="ds.json", **options)


def zero(stage: int, /, **keys: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **keys}}


def test_an_empty_stage_3_block_has_deepspeeds_defaults() -> None:
    config = load(zero(3))
    assert (config.stage, config.version, config.optimizer_wrapper) == (3, "0.19.8", "zero3")
    assert config.zero == ZeroConfig(
        stage=3,
        contiguous_gradients=True,
        reduce_scatter=True,
        reduce_bucket_size=500_000_000,
        use_multi_rank_bucket_allreduce=True,
        allgather_bucket_size=500_000_000,
        gathers_step_in_buckets=False,
        overlap_comm=True,
        round_robin_gradients=False,
        compute_grad_norm=True,
        parameter_alignment=False,
        sub_group_size=1_000_000_000,
        prefetch_bucket_size=50_000_000,
        param_persistence_threshold=100_000,
        model_persistence_threshold=9_223_372_036_854_775_807,
        max_live_parameters=1_000_000_000,
        max_reuse_distance=1_000_000_000,
        module_granularity_threshold=0,
        use_all_reduce_for_fetch_params=False,
        allgather_sequential=False,
        gather_16bit_weights_on_model_save=False,
        memory_efficient_linear=True,
        enable_sanity_checks=False,
        leaf_module=LeafModules(MOE_BLOCKS, (), ()),
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        has_loco=False,
        mics_shard_size=-1,
        mics_hierarchical_params_gather=False,
        offload_param=None,
        offload_optimizer=None,
        zenflow=False,
    )
    assert config.gradient_clipping == 1.0
    assert config.notes == ()
    assert config.unsimulated == ()


def test_the_blocks_around_zero_have_deepspeeds_defaults() -> None:
    config = load({})
    assert config.stage == 0
    assert config.fp16 == LossScaling(
        enabled=False,
        auto_cast=False,
        loss_scale=None,
        initial_scale_power=16,
        loss_scale_window=1000,
        hysteresis=2,
        min_loss_scale=1,
    )
    assert config.aio == AioConfig(1_048_576, 8, 1, False, True, False)
    assert config.activation_checkpointing == ActivationCheckpointingConfig(False, False, False, None)
    assert (config.prescale_gradients, config.gradient_predivide_factor) == (False, 1.0)
    assert config.gradient_allreduce_op == "mean"
    assert (config.master_weights_dtype, config.optimizer_states_dtype) == ("fp32", "fp32")


def test_offload_has_deepspeeds_defaults() -> None:
    zero_config = load(zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})).zero
    assert zero_config.offload_param == ParameterOffload("cpu", None, 5, 100_000_000, 1_000_000_000, True)
    assert zero_config.offload_optimizer == OptimizerOffload(
        device="cpu",
        nvme_path=None,
        buffer_count=4,
        pin_memory=True,
        pipeline_read=False,
        pipeline_write=False,
        ratio=1.0,
        super_offload=False,
        cpuadam_cores_fraction=0.8,
    )


def test_leaf_modules_are_told_by_class_name_or_suffix() -> None:
    """The mixture-of-experts classes are leaves by default, in releases that have the key (0.18.0)."""
    named = load(zero(3, leaf_module={"names": "experts", "name_suffixes": ["mlp", "mlp"]})).zero
    assert named.leaf_module == LeafModules(MOE_BLOCKS, ("experts",), ("mlp",))
    own = load(zero(3, leaf_module={"classes": ["MyBlock"]})).zero
    assert own.leaf_module == LeafModules(("MyBlock",), (), ())
    assert load(zero(3), version="0.18.0").zero.leaf_module == LeafModules(MOE_BLOCKS, (), ())
    assert load(zero(3), version="0.17.6").zero.leaf_module == LeafModules((), (), ())
