"""torchtitan's keys: old spellings, effects on a step, and keys without one.

Read in torchtitan's `config_manager.py` (2024), `config/job_config.py` (0.1 and 0.2, TOML) and 0.3.0
(`config/configs.py`, `distributed/activation_checkpoint.py`, `trainer.py`: no TOML, a command line over
registered functions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, tuned_mappings
from zsim.specs.strategy.requirement import Refusal

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
FORCED_BALANCE = "debug.moe_force_load_balance"
EXPERT_TENSOR_DEGREE = "parallelism.expert_tensor_parallel_degree"

# torch 2.13's `get_schedule_class`, which compares in lower case.
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "interleaved-zero-bubble",
    "ZBVZeroBubble": "zbv-zero-bubble",
    "DualPipeV": "dualpipe-v",
}
COMM_BACKENDS = {"standard": "all-to-all", "deepep": "deepep"}
ROTATE_METHODS = {"allgather": "all-gather", "alltoall": "p2p"}
UNROTATED = "its context parallelism gathers or passes on keys and values, and exchanges no heads"
"""The reason why a job cannot be written whose ranks of context have none of these methods."""

# Switches that change a step in a way that zsim does not simulate.
REFUSED_SWITCHES = {
    "parallelism.enable_fsdp_symm_mem": "symmetric-memory collectives",
    "optimizer.early_step_in_backward": "optimizer steps inside the backward",
    "fault_tolerance.enable": "TorchFT's replicas",
    "float8.emulate": "emulated float8",
}

_TITAN = "torchtitan 0.2, config/job_config.py"
_TITAN_DEGREES = "torchtitan 0.2.2, config/job_config.py, distributed/pipeline_parallel.py"

# Keys that have an effect only with a degree above 1.
TENSOR_KEYS = (
    ProgramKey(
        "parallelism.disable_loss_parallel", bool, "whether the loss takes whole logits",
        "parallelism.loss_parallel", tuned=(), instruction="disable_loss_parallel", source=_TITAN_DEGREES,
    ),
    ProgramKey("parallelism.enable_loss_parallel", bool, "the same, until 0.1"),
    ProgramKey(
        "parallelism.enable_sequence_parallel", bool, "norms and residuals have a part of the sequence",
        "parallelism.sequence_parallel", is_plain=True, default=True, tuned=(True, None),
        instruction="always", source="torchtitan 0.2.2, models/llama3/infra/parallelize.py",
    ),
    ProgramKey(
        "parallelism.enable_async_tensor_parallel", bool, "whether products and their collectives overlap",
        "parallelism.async_tensor", tuned=(), source=_TITAN_DEGREES,
        instruction="enable_async_tensor_parallel, with compile.enable",
    ),
    ProgramKey("compile.enable_async_tensor_parallel", bool, "the same, from 0.3 on"),
)  # fmt: skip
PIPELINE_KEYS = (
    ProgramKey(
        "parallelism.pipeline_parallel_schedule", str, "the order of forwards and backwards",
        "parallelism.schedule", values=SCHEDULES, tuned=(), instruction="pipeline_parallel_schedule",
        source=_TITAN_DEGREES,
    ),
    ProgramKey(
        "parallelism.pipeline_parallel_schedule_csv", str, "a file with that order",
        "parallelism.schedule_csv", tuned=(), instruction="pipeline_parallel_schedule_csv",
        source=_TITAN_DEGREES,
    ),
    ProgramKey("parallelism.pipeline_parallel_microbatch_size", int, "sequences of a micro-batch"),
    ProgramKey("parallelism.pipeline_parallel_microbatches", int, "micro-batches of a pass, until 0.1"),
    ProgramKey("parallelism.num_pp_microbatches", int, "micro-batches of a pass, after 0.3"),
    ProgramKey("parallelism.pipeline_parallel_layers_per_stage", int, "layers of a stage"),
    ProgramKey(
        "parallelism.pipeline_parallel_first_stage_less_layers", int, "layers that the first stage lacks",
        "parallelism.first_stage_less_layers", is_plain=True, default=1, tuned=(),
        instruction="pipeline_parallel_first_stage_less_layers", source=_TITAN_DEGREES,
    ),
    ProgramKey(
        "parallelism.pipeline_parallel_last_stage_less_layers", int, "layers that the last stage lacks",
        "parallelism.last_stage_less_layers", is_plain=True, default=1, tuned=(),
        instruction="pipeline_parallel_last_stage_less_layers", source=_TITAN_DEGREES,
    ),
    ProgramKey("parallelism.pipeline_parallel_split_points", list, "first layers of the stages, until 0.1"),
    ProgramKey(
        "parallelism.module_fqns_per_model_part", list, "modules of every stage",
        "parallelism.layers_per_stage", tuned=(), instruction="module_fqns_per_model_part",
        source=_TITAN_DEGREES,
    ),
)  # fmt: skip
CONTEXT_KEYS = (
    ProgramKey(
        "parallelism.context_parallel_rotate_method", str, "how ranks see the keys and values of others",
        "parallelism.context_method", is_plain=True, values=ROTATE_METHODS, default="allgather", tuned=(),
        instruction="context_parallel_rotate_method", source=_TITAN_DEGREES,
    ),
    ProgramKey("parallelism.context_parallel_load_balancer", str, "which tokens a rank has"),
)  # fmt: skip
EXPERT_KEYS = (
    ProgramKey(
        EXPERT_TENSOR_DEGREE, int, "ranks that share an expert's products", "parallelism.expert_tensor",
        is_plain=True, tuned=(), source=_TITAN_DEGREES,
    ),
    ProgramKey(
        "parallelism.expert_parallel_comm_backend", str, "the library that dispatches tokens",
        "parallelism.dispatcher", is_plain=True, values=COMM_BACKENDS, tuned=(), source=_TITAN_DEGREES,
    ),
    ProgramKey(FORCED_BALANCE, bool, "whether tokens are given their experts in turn"),
)  # fmt: skip
_DEGREES = (
    ProgramKey(
        TENSOR_DEGREE, int, "ranks that share a layer's products", "parallelism.tensor", tuned=(),
        instruction="tensor_parallel_degree", source=_TITAN_DEGREES,
    ),
    ProgramKey(
        PIPELINE_DEGREE, int, "ranks of a pipeline", "parallelism.pipeline", tuned=(),
        instruction="pipeline_parallel_degree", source=_TITAN_DEGREES,
    ),
    ProgramKey(
        CONTEXT_DEGREE, int, "ranks that share a sequence", "parallelism.context", tuned=(),
        instruction="context_parallel_degree", source=_TITAN_DEGREES,
    ),
)  # fmt: skip

# Keys that a step depends on.
_STEP_KEYS = (
    ProgramKey(
        "training.local_batch_size", int, "sequences of a rank in a pass", "training.micro_batch_size",
        is_plain=True, default=8, tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "training.global_batch_size", int, "sequences of a step",
        "training.gradient_accumulation_steps", tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "training.seq_len", int, "tokens of a sequence", "training.sequence_length", is_plain=True,
        default=2048,
    ),
    ProgramKey(
        "training.max_norm", (int, float), "norm that gradients are clipped to",
        "training.gradient_clipping", is_plain=True, default=1.0,
    ),
    ProgramKey("training.mixed_precision_param", str, "the type of products and of what is gathered"),
    ProgramKey("training.mixed_precision_reduce", str, "the type in which gradients are reduced"),
    ProgramKey(
        "training.enable_cpu_offload", bool, "whether states are on the host between uses",
        "strategy.cpu_offload", is_plain=True, default=False, tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "training.dtype", str, "the type that parameters are kept in", "training.stored_dtype",
        is_plain=True, values={"float32": "fp32", "bfloat16": "bf16"}, tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "parallelism.data_parallel_replicate_degree", int, "replicas of the sharded model",
        "strategy.replicate", is_plain=True, default=1, tuned=(), source=_TITAN,
    ),
    ProgramKey("parallelism.data_parallel_shard_degree", int, "ranks that shard it"),
    ProgramKey(
        "parallelism.fsdp_reshard_after_forward", str, "whether a unit is freed between forward and backward",
        "strategy.reshard_after_forward", is_plain=True,
        values={"default": None, "always": True, "never": False}, default="default", tuned=(True, False),
        source=_TITAN,
    ),
    ProgramKey(
        "parallelism.fsdp_defer_gradient_reduction", bool, "whether the last micro-batch alone reduces",
        "strategy.no_sync", is_plain=True, default=False, tuned=(False,), instruction="every micro-batch",
        source="torchtitan 0.2, train.py",
    ),
    ProgramKey(
        "activation_checkpoint.mode", str, "what backward computes again",
        "training.activation_checkpointing", tuned=("none", "full", "selective-op"), source=_TITAN,
    ),
    ProgramKey(
        "activation_checkpoint.selective_ac_option", (str, int), "every how many blocks, or by op",
        "training.checkpoint_every", tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "activation_checkpoint.early_stop", bool, "whether recomputing ends with what backward needs",
        "training.checkpoint_stops_early",
    ),
    ProgramKey(
        "compile.enable", bool, "whether torch.compile is used", "training.compile", tuned=(), source=_TITAN,
    ),
    ProgramKey(
        "compile.components", list, "on the model, the loss, or both", "training.cross_entropy",
        tuned=("fused",), instruction='compile.enable with compile.components = ["loss"]',
        source="torchtitan 0.2, components/loss.py",
    ),
    ProgramKey(
        "loss.num_chunks", int, "parts of a sequence that have head and loss by themselves, since 0.3",
        "training.cross_entropy",
    ),
    ProgramKey("optimizer.name", str, "the optimizer", "training.optimizer"),
    ProgramKey("optimizer.implementation", str, "its kernels", "training.optimizer_implementation"),
    ProgramKey("optimizer.fused", bool, "the same, until 0.1"),
    ProgramKey("model.name", str, "the model"),
    ProgramKey("model.flavor", str, "its size"),
    ProgramKey("model.attn_backend", str, "its kernels of attention, in a function of the registry"),
    ProgramKey(
        "model.converters", list, "what replaces its layers, such as float8", "training.precision",
        tuned=("fp8",), instruction='model.converters = ["float8"]', source=_TITAN,
    ),
    ProgramKey("float8.enable_float8_linear", bool, "whether products are in fp8, until 0.0"),
    ProgramKey("float8.enable_fsdp_float8_all_gather", bool, "whether weights are gathered in fp8"),
    ProgramKey(
        "float8.precompute_float8_dynamic_scale_for_fsdp", bool, "whether their scales are agreed on at once"
    ),
    ProgramKey(
        "float8.recipe_name", str, "the scales of fp8", "training.fp8_recipe",
        tuned=("torchao-tensorwise", "torchao-rowwise"), source=_TITAN,
    ),
    ProgramKey("mx.recipe_name", str, "the scales of mxfp8", "training.fp8_recipe"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {
    key.key: key
    for key in (
        *_STEP_KEYS,
        *_DEGREES,
        *TENSOR_KEYS,
        *PIPELINE_KEYS,
        *CONTEXT_KEYS,
        ProgramKey(
            EXPERT_DEGREE,
            int,
            "ranks that share the experts",
            "parallelism.expert",
            tuned=(),
            source=_TITAN_DEGREES,
        ),
        *EXPERT_KEYS,
        *(ProgramKey(key, bool, feature) for key, feature in REFUSED_SWITCHES.items()),
    )
}
# Settings that need a key of another.
_MORE = (
    ProgramKey(
        "parallelism.module_fqns_per_model_part", list, "modules of every stage",
        "parallelism.virtual_stages", tuned=(), instruction="module_fqns_per_model_part",
        source=_TITAN_DEGREES,
    ),
    ProgramKey(
        "training.global_batch_size", int, "sequences of a step", "parallelism.passes", tuned=(),
        source=_TITAN_DEGREES,
    ),
)  # fmt: skip
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings((*KEYS.values(), *_MORE))
# Keys of [parallelism] as 0.3 has them too, which always gathers for context parallelism.
DEGREES = tuple(
    row for row in CONFIG_MAPPINGS if row.source == _TITAN_DEGREES and row.key != "parallelism.context_method"
)

# Sections without effect on a step in its steady state.
IDLE_SECTIONS = (
    "job", "profiling", "profiler", "metrics", "lr_scheduler", "checkpoint", "comm", "validation",
    "validator", "memory_estimation", "tokenizer", "dataloader", "debug", "override", "liger_kernel",
)  # fmt: skip

# Keys of the other sections without effect on a step, or without the parallelism that they belong to.
IDLE_KEYS = {
    "training": (
        "dataset", "dataset_path", "steps", "gc_freq", "gc_debug", "seed", "deterministic", "warmup_steps",
        "disable_cuda_graphs",
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
    "loss": ("global_vocab_size", "loss_fn"),
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
_QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
_SMALL: dict[str, object] = {"hidden_size": 256, "vocab_size": 2048}
_QWEN3_SMALL = _SMALL | {
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
# Shapes of its tests' models (torchtitan b5bcd76c models/*/__init__.py `_debugmodel`).
DEBUG_MODELS: dict[tuple[str, str], dict[str, object]] = {
    ("llama3", "debugmodel"): {
        "extends": "llama-3-8b", **_SMALL, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 768,
    },
    ("qwen3", "debugmodel"): {"extends": "qwen3-0.6b", **_QWEN3_SMALL, "intermediate_size": 3072},
    ("qwen3", "debugmodel_non_fused_qkv"): {
        "extends": "qwen3-0.6b", **_QWEN3_SMALL, "intermediate_size": 3072,
    },
    ("qwen3", "debugmodel_moe"): {
        "extends": "qwen3-30b-a3b", **_QWEN3_SMALL, "moe_intermediate_size": 768, "num_experts": 64,
    },
    ("deepseek_v3", "debugmodel"): {
        "extends": "deepseek-v2-lite", **_SMALL, "num_hidden_layers": 6, "intermediate_size": 1024,
        "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 3,
    },
    ("gpt_oss", "debugmodel"): {
        "extends": "gpt-oss-20b", **_SMALL, "num_hidden_layers": 4, "num_local_experts": 8,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
PRESETS = {
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "8B"): "llama-3-8b",
    ("llama3", "70B"): "llama-3-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama3", "3B"): "llama-3.2-3b",
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in _QWEN3_SIZES},
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
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

REFUSALS = tuple(Refusal(key, feature) for key, feature in REFUSED_SWITCHES.items())
