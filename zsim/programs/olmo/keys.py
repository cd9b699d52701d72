"""The keys of OLMo's YAML that a step depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, tuned_mappings

_OLMO = "OLMo 59a53e3f, olmo/config.py"
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# Strategy -> (blocks between two that are checkpointed, or None where no such number says it).
CHECKPOINTS = {
    "whole_layer": 1, "one_in_two": 2, "one_in_three": 3, "one_in_four": 4, "one_in_eight": 8,
}  # fmt: skip

_KEYS = (
    ProgramKey("global_train_batch_size", int, "sequences of a step"),
    ProgramKey(
        "device_train_microbatch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
        is_plain=True, default=16, tuned=(), source=_OLMO,
    ),
    ProgramKey(
        "precision", str, "the type of products", "training.precision",
        values={"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"},
    ),
    ProgramKey("distributed_strategy", str, "DDP, FSDP or a single GPU"),
    ProgramKey("model.max_sequence_length", int, "tokens of a sequence", "training.sequence_length"),
    ProgramKey("model.flash_attention", bool, "the core of attention", "training.attention"),
    ProgramKey("activation_checkpointing", (str, bool), "what backward computes again"),
    ProgramKey("compile", dict, "torch.compile"),
    ProgramKey(
        "optimizer.name", str, "the optimizer", "training.optimizer", is_plain=True,
        values={"adamw": "adamw", "lionw": "lion"}, default="adamw",
    ),
    ProgramKey("max_grad_norm", float, "norm that gradients are clipped to", "training.gradient_clipping"),
    ProgramKey("fused_loss", bool, "whether the loss is one kernel", "training.cross_entropy"),
    ProgramKey(
        "fsdp.sharding_strategy", str, "what FSDP shards", "strategy.sharding_strategy", is_plain=True,
        values={word: word for word in SHARDING}, default="FULL_SHARD", tuned=(), source=_OLMO,
    ),
    ProgramKey("fsdp.wrapping_strategy", str, "what a unit is", "strategy.wrapping"),
    ProgramKey("fsdp.precision", str, "the types that are gathered and reduced"),
    ProgramKey("fsdp.hybrid_sharding_num_model_replicas", int, "replicas", "strategy.replicate"),
    ProgramKey("ddp.grad_sync_mode", str, "when DDP reduces", "strategy.no_sync"),
    ProgramKey("model", dict, "the model"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Sections and keys without effect on a step.
IDLE = silent_keys(
    """
    run_name seed epoch dry_run data evaluators eval_interval tokenizer scheduler optimizer max_duration
    stop_at stop_after eval_subset_num_batches eval_on_load device_eval_batch_size wandb speed_monitor
    console_log_interval gen1_gc_interval remote_save_folder sharded_checkpointer new_style_checkpoints
    canceled_check_interval force_save_unsharded no_pre_train_checkpoint try_load_latest_save
    restore_dataloader fast_forward_batches early_stopping_factor save_folder save_overwrite save_interval
    save_interval_ephemeral save_interval_unsharded save_num_checkpoints_to_keep
    save_num_unsharded_checkpoints_to_keep save_data_indices load_path load_path_sharded_checkpointer
    reset_optimizer_state reset_trainer_state time_limit extra_steps_after_cancel python_profiling
    torch_profiling hf_datasets_cache_dir module_outputs_save_steps max_grad_norm_ratio softmax_auxiliary_loss
    auxiliary_loss_multiplier fsdp.use_orig_params instance_filter
    """
)
