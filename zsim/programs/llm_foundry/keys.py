"""The keys of llm-foundry's YAML that a step depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_FOUNDRY = "llm-foundry 8c8dd48f, llmfoundry/utils/config_utils.py"
_COMPOSER = "composer 0.32.1, composer/utils/parallelism.py: FSDPConfig"
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

_KEYS = (
    ProgramKey("max_seq_len", int, "tokens of a sequence", "training.sequence_length", is_plain=True),
    ProgramKey("global_train_batch_size", int, "sequences of a step"),
    ProgramKey("device_train_batch_size", int, "sequences of a rank in a step"),
    ProgramKey(
        "device_train_microbatch_size", (int, str), "sequences of a micro-batch",
        "training.micro_batch_size", tuned=(), source=_FOUNDRY,
    ),
    ProgramKey(
        "precision", str, "the type of products", "training.precision",
        values={"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"},
    ),
    ProgramKey("model.name", str, "the kind of model", "model"),
    ProgramKey("model.pretrained_model_name_or_path", str, "the model", "model"),
    ProgramKey(
        "model.master_weights_dtype", str, "the type of parameters between steps", "training.stored_dtype"
    ),
    ProgramKey("model.loss_fn", str, "whose kernels compute the loss"),
    ProgramKey("model.attn_config.attn_impl", str, "the core of attention", "training.attention"),
    ProgramKey("model.use_flash_attention_2", bool, "the core of attention", "training.attention"),
    ProgramKey("model.peft_config.r", int, "rank of the adapters", "training.lora.rank"),
    ProgramKey("model.peft_config.lora_alpha", (int, float), "their scale", "training.lora.alpha"),
    ProgramKey("model.peft_config.target_modules", (list, str), "the modules that get one"),
    ProgramKey("model.peft_config.peft_type", str, "the kind of adapter"),
    ProgramKey(
        "optimizer.name", str, "the optimizer", "training.optimizer", is_plain=True,
        values={"decoupled_adamw": "adamw", "decoupled_lionw": "lion"}, default="decoupled_adamw",
    ),
    ProgramKey(
        "algorithms.gradient_clipping.clipping_threshold", float, "norm that gradients are clipped to",
        "training.gradient_clipping",
    ),
    ProgramKey("algorithms.gradient_clipping.clipping_type", str, "how they are clipped"),
    ProgramKey("compile_config", dict, "torch.compile"),
    ProgramKey("tp_config", dict, "tensor parallelism"),
    ProgramKey(
        "fsdp_config.sharding_strategy", str, "what FSDP shards", "strategy.sharding_strategy",
        is_plain=True, values={word: word for word in SHARDING}, default="FULL_SHARD", tuned=(),
        source=_COMPOSER,
    ),
    *declare(
        ("fsdp_config.mixed_precision", str, "the types that are gathered and reduced"),
        ("fsdp_config.mixed_precision.param_dtype", str, "the type that is gathered", "strategy.param_dtype"),
        ("fsdp_config.mixed_precision.reduce_dtype", str, "the type that is reduced", "strategy.reduce_dtype",
         ),
    ),
    ProgramKey(
        "fsdp_config.activation_checkpointing", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_COMPOSER,
    ),
    ProgramKey(
        "fsdp_config.activation_checkpointing_reentrant", bool, "torch's older way to do so",
        "training.checkpoint_is_reentrant",
    ),
    ProgramKey("fsdp_config.activation_cpu_offload", bool, "checkpoints on the host"),
    ProgramKey("fsdp_config.cpu_offload", bool, "states on the host between uses"),
    ProgramKey(
        "fsdp_config.backward_prefetch", str, "when the next unit is gathered in backward",
        "strategy.backward_prefetch", is_plain=True,
        values={"BACKWARD_PRE": "BACKWARD_PRE", "BACKWARD_POST": "BACKWARD_POST", "NONE": "none"},
        default="BACKWARD_POST", tuned=(), source=_COMPOSER,
    ),
    ProgramKey(
        "fsdp_config.forward_prefetch", bool, "whether it is gathered early in forward",
        "strategy.forward_prefetch", is_plain=True, tuned=(), source=_COMPOSER,
    ),
    ProgramKey(
        "fsdp_config.limit_all_gathers", bool, "whether the host waits so that two units exist at most",
        "strategy.limit_all_gathers", is_plain=True, default=True, tuned=(), source=_COMPOSER,
    ),
    ProgramKey("fsdp_config.data_parallel_replicate_degree", int, "replicas", "strategy.replicate"),
    ProgramKey("fsdp_config.data_parallel_shard_degree", int, "ranks that share the states of a replica"),
    ProgramKey("expandable_segments", bool, "torch's allocator", "training.expandable_segments"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Sections and keys without effect on a step.
IDLE = silent_keys(
    """
    variables tokenizer train_loader eval_loader eval_loaders scheduler optimizer max_duration eval_interval
    eval_first eval_subset_num_batches seed run_name callbacks loggers progress_bar log_to_console
    console_log_interval python_log_level log_config icl_tasks icl_subset_num_batches icl_seq_len
    eval_gauntlet device_eval_batch_size metadata dist_timeout autoresume profiler code_paths data_local
    data_remote global_seed spin_dataloaders train_subset_num_batches cuda_load_lazy flatten_metadata
    fsdp_config.state_dict_type fsdp_config.verbose fsdp_config.sync_module_states fsdp_config.use_orig_params
    fsdp_config.load_planner fsdp_config.save_planner fsdp_config.mixed_precision.buffer_dtype
    model.init_device model.pretrained model.use_auth_token model.trust_remote_code only_hf_checkpoint
    only_composer_checkpoint accumulate_train_batch_on_tokens save_folder save_latest_filename save_overwrite
    save_weights_only save_filename save_interval save_num_checkpoints_to_keep save_ignore_keys load_path
    load_weights_only load_strict_model_weights load_ignore_keys
    """
)
