"""The keys of transformers' TrainingArguments (5.23, training_args.py), for all programs that "
"pass them on."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program_key import ProgramKey, index_keys

TRANSFORMERS = "transformers 5.23.0, "
ARGUMENTS = TRANSFORMERS + "training_args.py"

BATCH = ProgramKey(
    "per_device_train_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
    is_plain=True, default=8, tuned=(), source=ARGUMENTS,
)  # fmt: skip
ACCUMULATION = ProgramKey(
    "gradient_accumulation_steps", int, "micro-batches of a step", "training.gradient_accumulation_steps",
    is_plain=True, default=1, tuned=(), source=ARGUMENTS,
)  # fmt: skip
CLIPPING = ProgramKey(
    "max_grad_norm", float, "norm that gradients are clipped to", "training.gradient_clipping",
    is_plain=True, default=1.0,
)  # fmt: skip
CHECKPOINTING = ProgramKey(
    "gradient_checkpointing", bool, "whether backward computes every block again",
    "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
    tuned=("none", "full"), source=ARGUMENTS,
)  # fmt: skip
REENTRANT = ProgramKey(
    "gradient_checkpointing_kwargs", dict, "`use_reentrant`: whether a second output of a block is held",
    "training.checkpoint_is_reentrant",
)  # fmt: skip
COMPILE = ProgramKey(
    "torch_compile", bool, "whether torch.compile is used", "training.compile", is_plain=True,
    values={True: True, False: None}, tuned=(True, False), source=ARGUMENTS,
)  # fmt: skip
LIGER = ProgramKey(
    "use_liger_kernel", bool, "whether Liger's kernels are used", "training.liger", is_plain=True,
    values={True: True, False: None},
)  # fmt: skip
EPOCHS = ProgramKey(
    "num_train_epochs", float, "passes over a data set whose size is said (3 where left out)", "cost.epochs"
)
BUCKET = ProgramKey(
    "ddp_bucket_cap_mb", float, "MiB of gradients in a bucket of DDP", "strategy.bucket_cap_mb",
    is_plain=True, tuned=(), source=ARGUMENTS,
)  # fmt: skip

_READ = (
    BATCH,
    ACCUMULATION,
    CLIPPING,
    EPOCHS,
    ProgramKey("bf16", bool, "whether products are in bf16", "training.precision"),
    ProgramKey("fp16", bool, "whether products are in fp16", "training.precision"),
    ProgramKey("optim", str, "the optimizer and its kernels", "training.optimizer"),
    CHECKPOINTING,
    REENTRANT,
    COMPILE,
    LIGER,
    ProgramKey("liger_kernel_config", dict, "which of Liger's kernels", "training.cross_entropy"),
    ProgramKey("deepspeed", (str, dict), "DeepSpeed's JSON, or its content", "strategy.config"),
    ProgramKey(
        "fsdp", (str, list), "what FSDP shards, in words", "strategy.sharding_strategy", tuned=(),
        source=ARGUMENTS,
    ),
    ProgramKey("fsdp_config", (str, dict), "Accelerate's keys of FSDP, or a file with them"),
    BUCKET,
    ProgramKey(
        "accelerator_config", (str, dict),
        "`gradient_accumulation_kwargs.sync_each_batch`: whether gradients are reduced in every micro-batch",
        "strategy.no_sync",
    ),
)  # fmt: skip

# Names of values that are another job.
_REFUSED = (
    ("use_cpu", "training on CPUs"),
    ("no_cuda", "training on CPUs"),
    ("use_mps_device", "training on Apple's GPUs"),
    ("parallelism_config", "a ParallelismConfig from a file of arguments"),
    ("sharded_ddp", "fairscale's sharded DDP"),
    ("tp_size", "transformers' tensor parallelism"),
    ("auto_find_batch_size", "a batch that is halved until it fits; give the size that it finds"),
)
_NOTED = (
    ("torch_compile_mode", "a mode of torch.compile"),
    ("torch_compile_backend", "a backend of torch.compile"),
    ("optim_args", "arguments of the optimizer"),
    ("optim_target_modules", "modules of the optimizer"),
    ("label_smoothing_factor", "another loss"),
    ("neftune_noise_alpha", "noise on the embedding"),
    ("torch_empty_cache_steps", "emptying torch's cache"),
    ("ddp_find_unused_parameters", "a search for unused parameters in every forward"),
    ("include_num_input_tokens_seen", "counts of tokens, gathered in every step"),
    ("split_batches", "batches that are cut over the ranks"),
    ("group_by_length", "sequences of like length in a batch"),
    ("length_column_name", "sequences of like length in a batch"),
)
ARGUMENT_KEYS: Mapping[str, ProgramKey] = index_keys(
    *_READ,
    refused=_REFUSED,
    noted=_NOTED,
    types=(bool, str, int, float, dict),
    neutral=("inductor", "default", 0, 0.0, "length"),
)

# TrainingArguments that a step's time and memory do not depend on: duration, learning rate, evaluation,
# saving, logging, data loading (which zsim takes as fast enough), the Hub.
SILENT_ARGUMENTS = silent_keys(
    """
    output_dir overwrite_output_dir do_train do_eval do_predict evaluation_strategy prediction_loss_only
    per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size max_eval_samples
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_steps lr_scheduler_type
    lr_scheduler_kwargs warmup_ratio warmup_steps log_level log_level_replica log_on_each_node
    nan_inf_filter seed data_seed jit_mode_eval bf16_full_eval fp16_full_eval fp16_opt_level
    half_precision_backend tf32 local_rank ddp_backend ddp_timeout ddp_broadcast_buffers tpu_num_cores debug
    past_index run_name disable_tqdm remove_unused_columns label_names load_best_model_at_end
    metric_for_best_model greater_is_better ignore_data_skip report_to project trackio_space_id
    resume_from_checkpoint include_inputs_for_metrics include_for_metrics mp_parameters full_determinism
    average_tokens_across_devices use_legacy_prediction_loop include_tokens_per_second batch_eval_metrics
    eval_do_concat_batches gradient_checkpointing_enable push_to_hub skip_memory_metrics
    predict_with_generate generation_max_length generation_num_beams generation_config sortish_sampler
    auto_resume restore_callback_states_from_checkpoint enable_jit_checkpoint use_cache tags
    trust_remote_code model_revision tokenizer_name config_name cache_dir token use_auth_token
    use_fast_tokenizer model_kwargs chat_template low_cpu_mem_usage eval_* save_* logging_* hub_*
    push_to_hub_* dataloader_* dataset_* wandb_* report_*
    """
)
