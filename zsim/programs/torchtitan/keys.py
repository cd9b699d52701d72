"""torchtitan's keys: old spellings, effects on a step, and keys without one.

Read in torchtitan's `config_manager.py` (2024), `config/job_config.py` (0.1 and 0.2, TOML) and 0.3.0
(`config/configs.py`, `distributed/activation_checkpoint.py`, `trainer.py`: no TOML, a command line over
registered functions).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.formats.program import ConfigMapping

# Old key -> key in 0.2 and 0.3.
RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.enable_loss_parallel": "parallelism.enable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.enable_compiled_autograd": "parallelism.enable_compiled_autograd",
    "training.compile": "compile.enable",
    "training.enable_fp8_linear": "float8.enable_float8_linear",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (
        "float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
    "quantize.linear.float8.recipe_name": "float8.recipe_name",
    "quantize.linear.mx.recipe_name": "mx.recipe_name",
}

TENSOR_DEGREE = "parallelism.tensor_parallel_degree"
PIPELINE_DEGREE = "parallelism.pipeline_parallel_degree"
CONTEXT_DEGREE = "parallelism.context_parallel_degree"

EXPERT_DEGREE = "parallelism.expert_parallel_degree"
EXPERT_TENSOR_DEGREE = "parallelism.expert_tensor_parallel_degree"

# Keys that have an effect only with a degree above 1, with the types of their values.
TENSOR_KEYS: dict[str, type | tuple[type, ...]] = {
    "parallelism.disable_loss_parallel": bool,
    "parallelism.enable_loss_parallel": bool,
    "parallelism.enable_sequence_parallel": bool,
    "parallelism.enable_async_tensor_parallel": bool,
    "compile.enable_async_tensor_parallel": bool,
}
PIPELINE_KEYS: dict[str, type | tuple[type, ...]] = {
    "parallelism.pipeline_parallel_schedule": str,
    "parallelism.pipeline_parallel_schedule_csv": str,
    "parallelism.pipeline_parallel_microbatch_size": int,
    "parallelism.pipeline_parallel_microbatches": int,
    "parallelism.num_pp_microbatches": int,
    "parallelism.pipeline_parallel_layers_per_stage": int,
    "parallelism.pipeline_parallel_first_stage_less_layers": int,
    "parallelism.pipeline_parallel_last_stage_less_layers": int,
    "parallelism.pipeline_parallel_split_points": list,
    "parallelism.module_fqns_per_model_part": list,
}
EXPERT_KEYS: dict[str, type | tuple[type, ...]] = {
    EXPERT_TENSOR_DEGREE: int,
    "parallelism.expert_parallel_comm_backend": str,
}
CONTEXT_KEYS: dict[str, type | tuple[type, ...]] = {
    "parallelism.context_parallel_rotate_method": str,
    "parallelism.context_parallel_load_balancer": str,
}

# Switches that change a step in a way that zsim does not simulate.
REFUSED_SWITCHES = {
    "parallelism.enable_fsdp_symm_mem": "symmetric-memory collectives",
    "optimizer.early_step_in_backward": "optimizer steps inside the backward",
    "fault_tolerance.enable": "TorchFT's replicas",
    "float8.emulate": "emulated float8",
}

# Keys that a step depends on, with the types of their values.
KEYS: dict[str, type | tuple[type, ...]] = {
    "training.local_batch_size": int,
    "training.global_batch_size": int,
    "training.seq_len": int,
    "training.max_norm": (int, float),
    "training.mixed_precision_param": str,
    "training.mixed_precision_reduce": str,
    "training.enable_cpu_offload": bool,
    "training.dtype": str,
    "parallelism.data_parallel_replicate_degree": int,
    "parallelism.data_parallel_shard_degree": int,
    "parallelism.fsdp_reshard_after_forward": str,
    "parallelism.fsdp_defer_gradient_reduction": bool,
    "activation_checkpoint.mode": str,
    "activation_checkpoint.selective_ac_option": (str, int),
    "activation_checkpoint.early_stop": bool,
    "compile.enable": bool,
    "compile.components": list,
    "optimizer.name": str,
    "optimizer.implementation": str,
    "optimizer.fused": bool,
    "model.name": str,
    "model.flavor": str,
    "model.converters": list,
    "float8.enable_float8_linear": bool,
    "float8.enable_fsdp_float8_all_gather": bool,
    "float8.precompute_float8_dynamic_scale_for_fsdp": bool,
    "float8.recipe_name": str,
    "mx.recipe_name": str,
    TENSOR_DEGREE: int,
    PIPELINE_DEGREE: int,
    CONTEXT_DEGREE: int,
    **TENSOR_KEYS,
    **PIPELINE_KEYS,
    **CONTEXT_KEYS,
    EXPERT_DEGREE: int,
    **EXPERT_KEYS,
    **dict.fromkeys(REFUSED_SWITCHES, bool),
}

# Sections without effect on a step in its steady state.
IDLE_SECTIONS = (
    "job", "profiling", "profiler", "metrics", "lr_scheduler", "checkpoint", "comm", "validation",
    "validator", "memory_estimation", "tokenizer", "dataloader", "debug", "override", "liger_kernel",
)  # fmt: skip

# Keys of the other sections without effect on a step, or without the parallelism that they belong to.
IDLE_KEYS = {
    "training": (
        "dataset", "dataset_path", "steps", "gc_freq", "gc_debug", "seed", "deterministic", "warmup_steps",
    ),
    "parallelism": (
        "full_dtensor", "spmd_backend", "enable_compiled_autograd",
        "pipeline_parallel_expert_parallel_overlap", "context_parallel_ptrr_mask_key",
    ),
    "activation_checkpoint": (
        "per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns", "memory_budget",
        "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug",
    ),
    "compile": ("backend",),
    "optimizer": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "model": ("tokenizer_path", "hf_assets_path", "norm_type", "print_after_conversion"),
    "float8": ("filter_fqns", "moe_fqns_prototype"),
    "mx": ("filter_fqns", "mxfp8_dim1_cast_kernel_choice", "moe_fqns_prototype"),
    "fault_tolerance": (
        "process_group", "process_group_timeout_ms", "replica_id", "group_size", "min_replica_size",
        "semi_sync_method", "sync_steps", "should_quantize", "fragment_sync_delay", "fragment_update_alpha",
        "module_fqns_per_model_fragment", "num_fragments",
    ),
    "experimental": ("custom_import", "custom_args_module"),
}  # fmt: skip

SECTIONS = (*IDLE_SECTIONS, *IDLE_KEYS)

# (model, flavor) -> zsim's preset of the same shape.
PRESETS = {
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "8B"): "llama-3-8b",
    ("llama3", "70B"): "llama-3-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "8B"): "qwen3-8b",
}

# Settings of 0.3.0's registered functions beyond its defaults (models/llama3/config_registry.py).
REGISTERED: dict[tuple[str, str], dict[str, object]] = {
    ("llama3", "llama3_8b"): {"training.local_batch_size": 1, "training.seq_len": 8192, "model.flavor": "8B"},
    ("llama3", "llama3_70b"): {
        "training.local_batch_size": 8,
        "training.seq_len": 8192,
        "model.flavor": "70B",
        "parallelism.tensor_parallel_degree": 8,
        "activation_checkpoint.mode": "full",
    },
    ("llama3", "llama3_405b"): {
        "training.local_batch_size": 2,
        "training.seq_len": 8192,
        "model.flavor": "405B",
        "model.converters": ["float8"],
        "parallelism.tensor_parallel_degree": 8,
        "activation_checkpoint.mode": "full",
        "compile.enable": True,
    },
}

_TITAN = "torchtitan 0.2, config/job_config.py"
_TITAN_DEGREES = "torchtitan 0.2.2, config/job_config.py, distributed/pipeline_parallel.py"
# Key of [parallelism] -> torchtitan's, whose mesh has a single order.
DEGREES = {
    "tensor": "tensor_parallel_degree",
    "async_tensor": "enable_async_tensor_parallel, with compile.enable",
    "loss_parallel": "disable_loss_parallel",
    "pipeline": "pipeline_parallel_degree",
    "schedule": "pipeline_parallel_schedule",
    "schedule_csv": "pipeline_parallel_schedule_csv",
    "virtual_stages": "module_fqns_per_model_part",
    "first_stage_less_layers": "pipeline_parallel_first_stage_less_layers",
    "last_stage_less_layers": "pipeline_parallel_last_stage_less_layers",
    "layers_per_stage": "module_fqns_per_model_part",
    "passes": "training.global_batch_size",
    "context": "context_parallel_degree",
}

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    ConfigMapping("training.micro_batch_size", "file", "training.local_batch_size", _TITAN),
    ConfigMapping("training.gradient_accumulation_steps", "file", "training.global_batch_size", _TITAN),
    ConfigMapping(
        "training.activation_checkpointing",
        "file",
        "activation_checkpoint.mode",
        _TITAN,
        ("none", "full", "selective-op"),
    ),
    ConfigMapping("training.checkpoint_every", "file", "activation_checkpoint.selective_ac_option", _TITAN),
    ConfigMapping(
        "training.cross_entropy",
        "file",
        'compile.enable with compile.components = ["loss"]',
        "torchtitan 0.2, components/loss.py",
        ("fused",),
    ),
    ConfigMapping(
        "strategy.reshard_after_forward",
        "file",
        "parallelism.fsdp_reshard_after_forward",
        _TITAN,
        (True, False),
    ),
    ConfigMapping("strategy.replicate", "file", "parallelism.data_parallel_replicate_degree", _TITAN),
    ConfigMapping("strategy.cpu_offload", "file", "training.enable_cpu_offload", _TITAN),
    ConfigMapping("training.stored_dtype", "file", "training.dtype", _TITAN),
    ConfigMapping("strategy.no_sync", "file", "every micro-batch", "torchtitan 0.2, train.py", (False,)),
    *(ConfigMapping(f"parallelism.{key}", "file", name, _TITAN_DEGREES) for key, name in DEGREES.items()),
    ConfigMapping("parallelism.context_method", "file", "context_parallel_rotate_method", _TITAN_DEGREES),
    ConfigMapping(
        "parallelism.sequence_parallel",
        "file",
        "always",
        "torchtitan 0.2.2, models/llama3/infra/parallelize.py",
        (True, None),
    ),
)
