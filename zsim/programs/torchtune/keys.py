"""The keys of torchtune's files (0.7.0, bd2a0fc7: recipes/, models/, training/), behind their "
"section and a dot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

RELEASE = "torchtune 0.7"
_FULL = RELEASE + ".0, recipes/full_finetune_distributed.py"

_READ = (
    *declare(
        ("model._component_", str, "the model, with lora_ or qlora_ before it for adapters", "model"),
        ("model.lora_rank", int, "rank of the adapters", "training.lora.rank"),
        ("model.lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("model.lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("model.lora_attn_modules", list, "products of attention that are adapted", "training.lora.targets"),
        ("model.apply_lora_to_mlp", bool, "whether the MLP's are adapted", "training.lora.targets"),
        ("model.apply_lora_to_output", bool, "whether the head is adapted", "training.lora.targets"),
        ("checkpointer.checkpoint_dir", str, "the model's folder, for its config.json", "model"),
        ("tokenizer.max_seq_len", int, "tokens of a sequence", "training.sequence_length"),
        ("dataset.max_seq_len", int, "the same, in releases before 0.2", "training.sequence_length"),
        ("dataset.packed", bool, "whether documents fill sequences", "training.lengths"),
    ),
    ProgramKey(
        "batch_size", int, "sequences of a micro-batch", "training.micro_batch_size", is_plain=True, tuned=(),
        source=_FULL,
    ),
    ProgramKey(
        "gradient_accumulation_steps", int, "micro-batches of a step",
        "training.gradient_accumulation_steps", is_plain=True, default=1, tuned=(), source=_FULL,
    ),
    *declare(
        ("dtype", str, "the type of everything: bf16 or fp32", "training.stored_dtype"),
        ("optimizer._component_", str, "the optimizer", "training.optimizer"),
        ("optimizer.fused", bool, "whether its kernel is fused", "training.optimizer_implementation"),
        ("optimizer_in_bwd", bool, "whether weights are updated within backward, on one GPU",
         "strategy.optimizer_in_backward"),
        ("loss._component_", str, "the loss", "training.cross_entropy"),
        ("clip_grad_norm", (float, str), "norm that gradients are clipped to", "training.gradient_clipping"),
    ),
    ProgramKey(
        "compile", (bool, dict), "whether torch.compile is used", "training.compile", tuned=(True, False),
        source=_FULL,
    ),
    ProgramKey(
        "enable_activation_checkpointing", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_FULL,
    ),
    *declare(
        ("enable_activation_offloading", bool, "whether checkpoints are on the host until backward",
         "training.checkpoint_offload"),
        ("activation_offloading_use_streams", bool, "whether they are copied beside computation",
         "training.checkpoint_offload"),
        ("ac_mode", str, "which blocks", "training.activation_checkpointing"),
        ("ac_option", (int, str), "every n-th block", "training.checkpoint_every"),
    ),
    ProgramKey(
        "fsdp_cpu_offload", bool, "whether states are on the host between uses", "strategy.cpu_offload",
        is_plain=True, values={True: True, False: None}, tuned=(), source=_FULL, kinds=("fsdp2",),
    ),
    ProgramKey(
        "fsdp_reshard_after_forward", bool, "whether a unit is freed between forward and backward",
        "strategy.reshard_after_forward", is_plain=True, default=True, tuned=(True, False), source=_FULL,
        kinds=("fsdp2",),
    ),
    ProgramKey("custom_sharded_layers", list, "layers that are units of their own", "strategy.wrapping"),
    ProgramKey("data_parallel_shard_dim", int, "ranks that shard the model"),
    ProgramKey("data_parallel_replicate_dim", int, "replicas of the sharded model", "strategy.replicate"),
    ProgramKey("epochs", float, "passes over a data set whose size is said", "cost.epochs"),
    ProgramKey("tensor_parallel_dim", int, "ranks that share a layer's products", "parallelism.tensor"),
    ProgramKey("context_parallel_dim", int, "ranks that share a sequence", "parallelism.context"),
)  # fmt: skip
_REFUSED = (
    ("enable_fp8_training", 'products in fp8 of torchtune; expected training.precision = "fp8"'),
    ("model.use_dora", "DoRA, which norms every adapted weight"),
    ("model.decoder_trainable", "multimodal models"),
    ("model.encoder_trainable", "multimodal models"),
    ("expert_parallel_dim", "expert parallelism of torchtune"),
    ("layer_dropout.prob", "layers that are dropped"),
    ("early_exit_loss.layers", "losses of early exits"),
)
_NOTED = (
    ("use_loss_parallel_ctx_manager", "a loss over the ranks of a split head"),
    ("model.quantize_base", "weights in 4 bits; expected a model with qlora_ before it"),
)
KEYS: Mapping[str, ProgramKey] = {
    key.key: key
    for key in (
        *_READ,
        *(
            ProgramKey(name, (bool, str, int), meaning, treatment="refused", neutral=(1, -1))
            for name, meaning in _REFUSED
        ),
        *(ProgramKey(name, (bool, str, int), meaning, treatment="noted") for name, meaning in _NOTED),
    )
}
SILENT = silent_keys(
    """
    output_dir seed shuffle device resume_from_checkpoint save_adapter_weights_only max_steps_per_epoch
    log_every_n_steps log_peak_memory_stats log_level low_cpu_ram run_val_every_n_steps batch_size_val name
    enable_async_checkpointing save_every_n_epochs save_every_n_steps keep_last_n_checkpoints collate_fn
    cudnn_deterministic_mode optimizer.lr optimizer.weight_decay optimizer.betas optimizer.eps
    optimizer.amsgrad parallelize_plan loss.ignore_index loss.beta loss.label_smoothing
    loss.num_output_chunks base_model_path checkpointer.* ref_checkpointer.* tokenizer.* dataset.*
    dataset_val.* metric_logger.* profiler.* lr_scheduler.* tensor_parallel_plan.* fsdp.*
    """
)
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
