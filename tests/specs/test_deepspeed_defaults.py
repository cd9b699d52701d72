"""What an empty DeepSpeed JSON means: the defaults of DeepSpeed 0.19.8's source, written out."""

from __future__ import annotations

from typing import Any

from zsim.frameworks.deepspeed.settings.config import (
    AioConfig,
    DeepSpeedConfig,
    LeafModules,
    OptimizerOffload,
    ParameterOffload,
    ZeroConfig,
)
from zsim.frameworks.deepspeed.settings.load import load_deepspeed_config
from zsim.frameworks.deepspeed.settings.schema import ActivationCheckpointingBlock

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
        leaf_module=LeafModules(classes=MOE_BLOCKS),
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        zeropp_loco_param=None,
        mics_shard_size=-1,
        mics_hierarchical_params_gather=False,
        offload_param=None,
        offload_optimizer=None,
        zenflow=None,
    )
    assert config.gradient_clipping == 1.0
    assert config.notes == ()
    assert config.unsimulated == ()


def test_the_blocks_around_zero_have_deepspeeds_defaults() -> None:
    config = load({})
    assert config.stage == 0
    assert config.param_dtype == "fp32"
    assert config.aio == AioConfig(1_048_576, 8, 1, False)
    assert config.activation_checkpointing == ActivationCheckpointingBlock()
    assert not config.activation_checkpointing.cpu_checkpointing
    assert (config.master_weights_dtype, config.optimizer_states_dtype) == ("fp32", "fp32")


def test_offload_has_deepspeeds_defaults() -> None:
    zero_config = load(zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})).zero
    assert zero_config.offload_param == ParameterOffload(
        device="cpu",
        nvme_path=None,
        buffer_count=5,
        buffer_size=100_000_000,
        max_in_cpu=1_000_000_000,
        pin_memory=True,
    )
    assert zero_config.offload_optimizer == OptimizerOffload(
        device="cpu",
        nvme_path=None,
        buffer_count=4,
        pin_memory=True,
        pipeline_read=False,
        pipeline_write=False,
        ratio=1.0,
        super_offload=False,
    )


def test_leaf_modules_are_told_by_class_name_or_suffix() -> None:
    """The mixture-of-experts classes are leaves by default, in releases that have the key (0.18.0)."""
    named = load(zero(3, leaf_module={"names": "experts", "name_suffixes": ["mlp", "mlp"]})).zero
    assert named.leaf_module == LeafModules(classes=MOE_BLOCKS, names=("experts",), name_suffixes=("mlp",))
    own = load(zero(3, leaf_module={"classes": ["MyBlock"]})).zero
    assert own.leaf_module == LeafModules(classes=("MyBlock",))
    assert load(zero(3), version="0.18.0").zero.leaf_module == LeafModules(classes=MOE_BLOCKS)
    assert load(zero(3), version="0.17.6").zero.leaf_module == LeafModules()
