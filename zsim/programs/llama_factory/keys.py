"""The keys of LLaMA-Factory's files beside TrainingArguments (0.9.6.dev0, ff6d4d12: hparams/*_args.py)."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.programs.huggingface.adapters import AdapterKeys
from zsim.programs.huggingface.arguments import ARGUMENT_KEYS, CLIPPING, SILENT_ARGUMENTS
from zsim.programs.trainer.keys import CONFIG_MAPPINGS as TRAINER_MAPPINGS
from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program_key import ProgramKey, declare, index_keys

RELEASE = "LLaMA-Factory 0.9.6"
ADAPTERS = AdapterKeys(
    "lora_rank", 8, "lora_alpha", 16, "lora_dropout", 0.0, "lora_target", "additional_target"
)

_READ = (
    *declare(
        ("model_name_or_path", str, "the model, as an id of the Hub or a folder", "model"),
        ("stage", str, "pt, sft, dpo or kto; others are refused by name", "training.reference"),
        ("pref_loss", str, "the loss of stage dpo; orpo and simpo have no reference", "training.reference"),
        ("ref_model", str, "another model as the reference, which is refused"),
        ("finetuning_type", str, "lora (where it is left out) or full"),
        ("cutoff_len", int, "tokens of a sequence", "training.sequence_length"),
        ("packing", bool, "whether documents fill sequences", "training.lengths"),
        ("neat_packing", bool, "the same, with attention by document", "training.lengths"),
        ("lora_rank", int, "rank of the adapters", "training.lora.rank"),
        ("lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("lora_target", (str, list), "modules that are adapted, all where left out", "training.lora.targets"),
        ("additional_target", (str, list), "modules that are trained whole", "training.lora.modules_to_save"),
        ("quantization_bit", int, "4 or 8: bits of frozen products", "training.lora.quantized"),
        ("quantization_method", str, "whose; bitsandbytes' is read"),
        ("quantization_type", str, "the type of the 4 bits, of which all have the same bytes"),
        ("double_quantization", bool, "whether their scales are quantised too",
         "training.lora.double_quantization"),
        ("pure_bf16", bool, "whether everything is in bf16, without autocast", "training.stored_dtype"),
        ("disable_gradient_checkpointing", bool, "backward does not compute every block again",
         "training.activation_checkpointing"),
        ("use_reentrant_gc", bool, "whether a second output of a block is held",
         "training.checkpoint_is_reentrant"),
        ("use_unsloth_gc", bool, "whether checkpoints are kept on the host", "training.checkpoint_offload"),
        ("flash_attn", str, "the kernels of attention", "training.attention"),
        ("enable_liger_kernel", bool, "whether Liger's kernels are used", "training.liger"),
        ("freeze_vision_tower", bool, "whether a multimodal model's tower is not trained, as by default",
         "training.frozen"),
        ("freeze_multi_modal_projector", bool, "the same of its projector, as by default", "training.frozen"),
        ("ray_num_workers", int, "GPUs that Ray launches it on", "gpus"),
        ("do_train", bool, "whether the file is of a training at all"),
    ),
)  # fmt: skip
_MEGATRON = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "context_parallel_size", "use_distributed_optimizer", "sequence_parallel",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip
_REFUSED = (
    ("use_galore", "GaLore, which projects gradients onto bases that an SVD renews"),
    ("use_apollo", "APOLLO, which scales gradients by a random projection of them"),
    ("use_badam", "BAdam, which trains a block of layers at a time"),
    ("use_adam_mini", "Adam-mini, which keeps a state per block of a tensor"),
    ("use_muon", 'the Muon of LLaMA-Factory; expected training.optimizer = "muon"'),
    ("use_dora", "DoRA, which norms every adapted weight"),
    ("use_llama_pro", "LLaMA Pro, which trains the blocks that it adds"),
    ("use_unsloth", "unsloth's model"),
    ("use_mca", 'Megatron-Core under LLaMA-Factory; expected strategy "megatron"'),
    ("use_megatron_bridge", 'Megatron-Bridge under LLaMA-Factory; expected strategy "megatron"'),
    ("use_hyper_parallel", "HyperParallel"),
    ("use_kt", "KTransformers, which computes experts on the host"),
    ("mixture_of_depths", "mixtures of depths, in which layers leave tokens out"),
    ("shift_attn", "shifted sparse attention"),
    ("fp8", 'products in fp8 of LLaMA-Factory; expected training.precision = "fp8"'),
    ("freeze_language_model", "a language model that is not trained"),
    ("use_asft_loss", "ASFT, which asks a reference model"),
    *((name, 'Megatron-Core under LLaMA-Factory; expected strategy "megatron"') for name in _MEGATRON),
)
_NOTED = (
    ("upcast_layernorm", "norms in fp32"),
    ("upcast_lmhead_output", "logits in fp32"),
    ("moe_aux_loss_coef", "the loss of balanced experts"),
    ("use_dft_loss", "another loss"),
    ("use_eaft_loss", "another loss"),
    ("resize_vocab", "a larger vocabulary"),
    ("add_tokens", "a larger vocabulary"),
    ("add_special_tokens", "a larger vocabulary"),
    ("pissa_init", "adapters from an SVD of the weights"),
    ("compute_accuracy", "an accuracy in evaluations"),
    ("include_effective_tokens_per_second", "counts of tokens"),
    ("fp8_backend", "the library of fp8"),
    ("use_v1_kernels", "kernels of its own for experts and linear attention"),
)
KEYS: Mapping[str, ProgramKey] = {**ARGUMENT_KEYS, **index_keys(*_READ, refused=_REFUSED, noted=_NOTED)}
SILENT = SILENT_ARGUMENTS | silent_keys(
    """
    dataset eval_dataset template template_dir media_dir train_on_prompt mask_history streaming buffer_size
    mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers
    max_samples val_size ignore_pad_token_for_loss tool_format default_system enable_thinking
    preserve_thinking tokenized_path data_shared_file_system adapter_name_or_path adapter_folder
    create_new_adapter use_rslora loraplus_lr_ratio loraplus_lr_embedding pissa_iter pissa_convert
    new_special_tokens_config init_special_tokens split_special_tokens use_fast_tokenizer offload_folder
    use_kv_cache infer_dtype print_param_status plot_loss disable_shuffling early_stopping_steps use_swanlab
    asft_alpha eaft_alpha rope_scaling quantization_device_map packing_mode kt_config use_audio_in_video
    crop_to_patches image_do_pan_and_scan pref_beta pref_ftx pref_bco_weight simpo_gamma swanlab_* galore_*
    apollo_* badam_* image_* video_* audio_* export_* hf_hub_* ms_hub_* om_hub_* ray_* ppo_*
    freeze_trainable* freeze_extra*
    """
)
CONFIG_MAPPINGS = TRAINER_MAPPINGS

# Keys that files of the newer engine alone have (v1/config/).
ENGINE_MARKS = (
    "dist_config", "model_class", "peft_config", "kernel_config", "train_dataset", "init_config",
    "optim_config", "quant_config",
)  # fmt: skip
ENGINE_ADAPTERS = AdapterKeys(
    "r", 8, "lora_alpha", 16, "lora_dropout", 0.05, "target_modules", "modules_to_save"
)
ENGINE_KEYS: Mapping[str, ProgramKey] = {
    key.key: key
    for key in (
        CLIPPING,
        ProgramKey("model", str, "the model, as an id of the Hub or a folder", "model"),
        ProgramKey("stage", str, "the word of the command: sft, dpo or rm", "training.reference"),
        ProgramKey("micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size"),
        ProgramKey("global_batch_size", int, "sequences of a step, of all ranks"),
        ProgramKey("cutoff_len", int, "tokens of a sequence", "training.sequence_length"),
        ProgramKey("num_train_epochs", int, "passes over a data set whose size is said", "cost.epochs"),
        ProgramKey("max_steps", int, "steps of a run"),
        ProgramKey(
            "enable_activation_checkpointing", bool, "whether backward computes every block again",
            "training.activation_checkpointing",
        ),
        ProgramKey("flash_attn", str, "the kernels of attention", "training.attention"),
        ProgramKey("bf16", bool, "whether parameters are gathered in bf16", "training.precision"),
        ProgramKey("dist_config", dict, "the plugin that shards: fsdp2, deepspeed or none", "strategy.kind"),
        ProgramKey("deepspeed", (str, dict), "DeepSpeed's JSON", "strategy.config"),
        ProgramKey("mp_replicate_size", int, "replicas of the sharded model", "strategy.replicate"),
        ProgramKey("cp_size", int, "ranks that share a sequence", "parallelism.context"),
        ProgramKey("cp_mode", str, "how they do", treatment="refused", neutral=("ulysses",)),
        ProgramKey("peft_config", dict, "adapters", "training.lora"),
        ProgramKey("quant_config", dict, "frozen weights in 4 or 8 bits", "training.lora.quantized"),
        ProgramKey("kernel_config", dict, "kernels; auto is none on GPUs", "training.liger"),
        ProgramKey("optim_config", dict, "the optimizer", "training.optimizer"),
        ProgramKey("pref_loss", str, "the loss of dpo", "training.reference"),
        ProgramKey(
            "batching_strategy", str, "batches without padding, or of about as many tokens",
            treatment="noted", neutral=("normal",),
        ),
    )
}  # fmt: skip
ENGINE_SILENT = SILENT | silent_keys(
    """
    model_class init_config train_dataset batching_workers dp_size mp_shard_size dist_timeout save_epochs
    lr_scheduler_config sample_backend max_new_tokens custom_chat_template ld_alpha dpo_label_smoothing
    """
)
