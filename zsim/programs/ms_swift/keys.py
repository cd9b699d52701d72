"""The keys of ms-swift's files beside TrainingArguments (4.6.0.dev0, 3602360a: arguments/, "
"trainers/arguments.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zsim.programs.huggingface.adapters import AdapterKeys
from zsim.programs.huggingface.arguments import ARGUMENT_KEYS, BATCH, SILENT_ARGUMENTS
from zsim.programs.trainer.keys import CONFIG_MAPPINGS as TRAINER_MAPPINGS
from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program_key import ProgramKey, declare, index_keys

RELEASE = "ms-swift 4.6"
ADAPTERS = AdapterKeys(
    "lora_rank", 8, "lora_alpha", 32, "lora_dropout", 0.05, "target_modules", "modules_to_save",
    "target_parameters",
)  # fmt: skip
TUNER_KEYS = ("tuner_type", "train_type", "sft_type")

_READ = (
    replace(BATCH, default=1),
    *declare(
        ("model", str, "the model, as an id of a hub or a folder", "model"),
        ("tuner_type", str, "lora (where it is left out) or full"),
        ("train_type", str, "the same, in older files"),
        ("sft_type", str, "the same, in older files"),
        ("rlhf_type", str, "dpo, kto, orpo, cpo, simpo, rm or grpo; others are refused", "training.reference",
         ),
        ("num_generations", int, "GRPO: completions of a prompt", "rl.samples_per_prompt"),
        ("max_completion_length", int, "GRPO: tokens of a completion", "rl.lengths.max_response"),
        ("steps_per_generation", int, "GRPO: micro-batches of a rollout", "rl.prompts_per_step"),
        ("generation_batch_size", int, "GRPO: completions of a rollout", "rl.prompts_per_step"),
        ("num_iterations", int, "GRPO: passes over a rollout", "rl.epochs"),
        ("advantage_estimator", str, "GRPO: grpo, rloo or reinforce_plus_plus", "rl.algorithm"),
        ("beta", float, "weight of the reference, 0.04 of GRPO where left out", "rl.reference"),
        ("use_vllm", bool, "GRPO: whether vLLM makes completions"),
        ("vllm_mode", str, "GRPO: colocate or server", "rl.placement"),
        ("vllm_tensor_parallel_size", int, "GRPO: ranks of a replica", "rl.rollout.tensor"),
        ("vllm_gpu_memory_utilization", float, "GRPO: part of the memory that vLLM takes",
         "rl.rollout.gpu_memory_utilization"),
        ("vllm_enforce_eager", bool, "GRPO: no CUDA graphs", "rl.rollout.enforce_eager"),
        ("vllm_max_num_seqs", int, "GRPO: sequences that run at once", "rl.rollout.max_num_seqs"),
        ("vllm_enable_prefix_caching", bool, "GRPO: prompts are computed once", "rl.rollout.prefix_caching"),
        ("sleep_level", int, "GRPO: how vLLM sleeps while training", "rl.offload.sleep_level"),
        ("offload_model", bool, "GRPO: whether weights are on the host in rollouts", "rl.offload.parameters"),
        ("offload_optimizer", bool, "GRPO: whether states are on the host in rollouts",
         "rl.offload.optimizer"),
        ("async_generate", bool, "GRPO: rollouts one step ahead, which are left out"),
        ("chord_sft_dataset", (str, list), "GRPO: fine-tuning between, which is refused"),
        ("reward_model", (str, list), "GRPO: models that reward, which are refused"),
        ("task_type", str, "causal_lm or seq_cls; others are refused by name", "training.labels"),
        ("num_labels", int, "outputs of the head of seq_cls", "training.labels"),
        ("ref_model", str, "another model as the reference, which is refused"),
        ("use_ray", bool, "whether Ray starts the processes"),
        ("device_groups", dict, "the GPUs that Ray gives to each part", "gpus"),
        ("torch_dtype", str, "the type in which weights are loaded", "training.precision"),
        ("max_length", int, "tokens of a sequence", "training.sequence_length"),
        ("packing", bool, "whether documents fill sequences", "training.lengths"),
        ("packing_length", int, "how long those sequences are", "training.sequence_length"),
        ("attn_impl", str, "the kernels of attention", "training.attention"),
        ("lora_rank", int, "rank of the adapters", "training.lora.rank"),
        ("lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("lora_dtype", str, "the type of adapters", "training.lora.dtype"),
        ("target_modules", (str, list), "modules that are adapted, all-linear where left out",
         "training.lora.targets"),
        ("target_regex", str, "a pattern of modules that are adapted", "training.lora.targets"),
        ("target_parameters", list, "stacked weights that are adapted", "training.lora.target_parameters"),
        ("modules_to_save", list, "modules that are trained whole", "training.lora.modules_to_save"),
        ("quant_method", str, "the library of quantised weights"),
        ("quant_bits", int, "4 or 8: bits of frozen products", "training.lora.quantized"),
        ("bnb_4bit_use_double_quant", bool, "whether their scales are quantised too",
         "training.lora.double_quantization"),
        ("bnb_4bit_quant_type", str, "the type of the 4 bits, of which all have the same bytes"),
        ("sequence_parallel_size", int, "ranks that share a sequence and exchange heads",
         "parallelism.context"),
        ("zero_hpz_partition_size", int, "ZeRO++'s secondary shards, in the JSON", "strategy.config"),
        ("deepspeed_autotp_size", int, "AutoTP's ranks, in the JSON", "strategy.config"),
        ("freeze_parameters", list, "parameters that are not trained", "training.frozen"),
        ("freeze_vit", bool, "whether a multimodal model's tower is not trained, as by default",
         "training.frozen"),
        ("freeze_aligner", bool, "the same of its projector, as by default", "training.frozen"),
    ),
)  # fmt: skip
_REFUSED = (
    ("use_galore", "GaLore, which projects gradients onto bases that an SVD renews"),
    ("lisa_activated_layers", "LISA, which trains a few layers at a time"),
    ("use_dora", "DoRA, which norms every adapted weight"),
    ("freeze_parameters_ratio", "a share of the parameters that is not trained"),
    ("freeze_parameters_regex", "parameters that a pattern freezes; expected freeze_parameters"),
    ("trainable_parameters", "parameters of which only named ones are trained; expected training.frozen"),
    (
        "trainable_parameters_regex",
        "parameters of which only named ones are trained; expected training.frozen",
    ),
    ("freeze_llm", "a language model that is frozen beside its towers"),
    ("optimizer", "an optimizer of ms-swift's own"),
    ("sampler_type", "sampling (swift sample), which trains nothing"),
    ("sampler_engine", "sampling (swift sample), which trains nothing"),
    ("teacher_model", "distillation from a teacher"),
)
_NOTED = (
    ("padding_free", "batches without padding"),
    ("enable_dft_loss", "another loss"),
    ("enable_channel_loss", "losses by channel"),
    ("use_logits_to_keep", "logits of some tokens only"),
    ("router_aux_loss_coef", "the loss of balanced experts"),
    ("new_special_tokens", "a larger vocabulary"),
    ("experts_impl", "kernels of experts"),
    ("device_map", "where the model is placed"),
    ("max_memory", "where the model is placed"),
    ("use_swift_lora", "ms-swift's own adapters"),
    ("bnb_4bit_quant_storage", "the type that 4-bit weights are stored in"),
    ("rope_scaling", "the rotary embedding"),
    ("init_strategy", "weights that are drawn"),
    ("callbacks", "callbacks of one's own"),
    ("loss_type", "another loss"),
    ("multi_turn_scheduler", "responses of several turns"),
    ("dynamic_sample", "rollouts that are repeated for groups of equal rewards"),
    ("vllm_enable_lora", "adapters that vLLM adds by itself"),
)
KEYS: Mapping[str, ProgramKey] = {
    **ARGUMENT_KEYS,
    **index_keys(*_READ, refused=_REFUSED, noted=_NOTED, neutral=(0, 0.0)),
}
SILENT = SILENT_ARGUMENTS | silent_keys(
    """
    reward_funcs reward_weights num_generations_eval log_completions epsilon epsilon_high delta min_p
    repetition_penalty stop_words overlong_filter soft_max_length soft_cache_length scale_rewards
    log_entropy top_entropy_quantile importance_sampling_level tau_pos tau_neg kl_in_reward
    move_model_batches max_turns completion_length_limit_scope use_gym_env gym_env max_resample_times
    dataset_shuffle sync_ref_model reward_model_plugin rpo_alpha cpo_alpha simpo_gamma label_smoothing
    dataset val_dataset cached_dataset cached_val_dataset split_dataset_ratio columns system template
    template_backend model_name model_author model_type loss_scale custom_register_path custom_dataset_info
    external_plugins load_args load_data_args use_hf hub_token add_version merge_lora
    create_checkpoint_symlink lazy_tokenize use_rslora lora_bias lorap_lr_ratio init_weights
    truncation_strategy agent_template norm_bbox use_chat_template padding_side enable_thinking
    preserve_thinking response_prefix add_non_thinking_prefix disable_ignore_empty_think tuner_backend
    vit_gradient_checkpointing vit_lr aligner_lr acc_strategy train_dataloader_shuffle check_model
    resume_only_model max_epochs max_new_tokens temperature top_k top_p streaming interleave_prob
    stopping_strategy shuffle_buffer_size download_mode strict disable_auto_column_mapping local_repo_path
    load_from_cache_file problem_type swanlab_token ENV max_pixels adapters packing_num_proc
    packing_strategy safe_serialization max_shard_size early_stop_interval use_flash_ckpt ignore_args_error
    lora_ga_batch_size is_binary_loss_scale bnb_4bit_compute_dtype new_special_tokens_file swanlab_*
    lora_ga_* galore_* lisa_* val_dataset_* vllm_* chord_* fipo_* cosine_* repetition_* rollout_importance_*
    ref_model_* ray_* warmup_* adam_*
    """
)
CONFIG_MAPPINGS = TRAINER_MAPPINGS

# Marks of the files that `megatron sft` takes (megatron/arguments/megatron_args.py).
MEGATRON_MARKS = ("micro_batch_size", "global_batch_size", "tensor_model_parallel_size")
_OF_ADAPTERS = (
    *TUNER_KEYS, "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "target_regex",
    "modules_to_save", "freeze_vit", "freeze_aligner",
)  # fmt: skip
_OF_DATA = (
    "model", "torch_dtype", "max_length", "packing", "packing_length", "rlhf_type", "task_type", "num_labels",
    "num_generations", "max_completion_length",
)  # fmt: skip
_NOT_OF_MEGATRON = (
    "ref_model", "reward_model", "teacher_model", "freeze_llm", "freeze_parameters_ratio",
    "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex",
)  # fmt: skip
MEGATRON_KEYS: Mapping[str, ProgramKey] = {
    **{name: KEYS[name] for name in (*_OF_ADAPTERS, *_OF_DATA)},
    **{
        name: replace(KEYS[name], type=(bool, str, list), treatment="refused", neutral=(0, 0.0))
        for name in _NOT_OF_MEGATRON
    },
    **{
        key.key: key
        for key in (
            ProgramKey("load", str, "the model's weights"),
            ProgramKey("micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size"),
            ProgramKey("global_batch_size", int, "sequences of a step, of all ranks"),
            ProgramKey("num_train_epochs", int, "passes over a data set whose size is said", "cost.epochs"),
            ProgramKey("train_iters", int, "steps of a run"),
            ProgramKey("freeze_parameters", list, "parameters that are not trained", treatment="refused"),
            ProgramKey("lora_bias", str, "biases that are trained", treatment="refused", neutral=("none",)),
            ProgramKey("teacher_model_server", str, "distillation from a teacher", treatment="refused"),
            ProgramKey("enable_dft_loss", bool, "another loss", treatment="noted"),
            ProgramKey("enable_channel_loss", bool, "losses by channel", treatment="noted"),
            ProgramKey("padding_free", bool, "batches without padding", treatment="noted", neutral=(True,)),
            ProgramKey("new_special_tokens", (str, list), "a larger vocabulary", treatment="noted"),
            ProgramKey("megatron_extra_kwargs", (str, dict), "fields of one's own", treatment="noted"),
            ProgramKey("vit_gradient_checkpointing", bool, "checkpoints of the tower", treatment="noted"),
            ProgramKey("router_replay_mode", str, "routes of the rollout", treatment="noted",
                       neutral=("disabled",)),
        )
    },
}  # fmt: skip
MEGATRON_SILENT = SILENT | silent_keys(
    """
    save use_hf seed load_safetensors save_safetensors finetune lr min_lr lr_warmup_fraction lr_warmup_iters
    num_workers no_save_optim no_save_rng no_load_optim no_load_rng output_dir eval_interval save_interval
    log_interval deepspeed dataloader_num_workers async_save bridge_backend mcore_model mcore_adapter
    mcore_ref_model perform_initialization use_vllm use_ray f_divergence_type calculate_KL save_total_limit
    beta loss_type model_type add_bos rollout device_groups offload_model offload_optimizer offload_bridge
    sleep_level steps_per_generation generation_batch_size num_iterations advantage_estimator async_generate
    reference_free center_rewards_coefficient desirable_weight undesirable_weight nccl_comm_warmup
    vit_attn_impl weight_decay lr_* muon_scale*
    """
)
