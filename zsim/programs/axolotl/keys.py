"""The keys of axolotl's YAML (067b021c: utils/schemas/config.py, training.py, peft.py, "
"fsdp.py, integrations)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.programs.huggingface.adapters import AdapterKeys
from zsim.programs.huggingface.arguments import BUCKET, CHECKPOINTING, COMPILE, REENTRANT
from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, index_keys, tuned_mappings

RELEASE = "axolotl 067b021c"
_SCHEMAS = RELEASE + ", utils/schemas/"
ADAPTERS = AdapterKeys(
    "lora_r", 8, "lora_alpha", 8, "lora_dropout", 0.0, "lora_target_modules", "lora_modules_to_save",
    "lora_target_parameters",
)  # fmt: skip

_READ = (
    ProgramKey("base_model", str, "the model, as an id of the Hub or a folder", "model"),
    *declare(
        ("micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size"),
        ("gradient_accumulation_steps", int, "micro-batches of a step",
         "training.gradient_accumulation_steps"),
        is_plain=True, default=1, tuned=(), source=_SCHEMAS + "training.py",
    ),
    ProgramKey(
        "num_epochs", float, "passes over a data set whose size is said (1 where left out)", "cost.epochs"
    ),
    ProgramKey("batch_size", int, "sequences of a rank's step, where no accumulation is said"),
    ProgramKey(
        "sequence_len", int, "tokens of a sequence", "training.sequence_length", is_plain=True, default=512
    ),
    *declare(
        ("sample_packing", bool, "whether documents fill sequences", "training.lengths"),
        ("reward_model", bool, "whether the head has one output", "training.labels"),
        ("rl", str, "dpo, ipo, kto or orpo; others are refused by name", "training.reference"),
        ("precompute_ref_log_probs", bool, "whether the reference has run before", "training.reference"),
        ("pretraining_dataset", (list, str), "a stream of documents, which are packed"),
        ("adapter", str, "lora, qlora, or none for all weights"),
        ("lora_r", int, "rank of the adapters", "training.lora.rank"),
        ("lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("lora_target_linear", bool, "whether all linear layers are adapted", "training.lora.targets"),
        ("lora_target_modules", (str, list), "modules that are adapted", "training.lora.targets"),
        ("lora_target_parameters", (str, list), "stacked weights that are adapted",
         "training.lora.target_parameters"),
        ("lora_modules_to_save", list, "modules that are trained whole", "training.lora.modules_to_save"),
        ("lora_rank_pattern", dict, "ranks of single modules", "training.lora.rank_pattern"),
        ("peft_layers_to_transform", list, "blocks that are adapted", "training.lora.layers"),
        ("load_in_4bit", bool, "whether frozen products are in 4 bits", "training.lora.quantized"),
        ("load_in_8bit", bool, "whether they are in 8 bits (LLM.int8)", "training.lora.quantized"),
        ("quantize_moe_experts", bool, "whether stacked experts are in 4 bits too",
         "training.lora.quantize_experts"),
        ("bnb_config_kwargs", dict, "bitsandbytes' own keys", "training.lora.double_quantization"),
        ("bf16", (str, bool), "whether products are in bf16", "training.precision"),
        ("fp16", bool, "whether products are in fp16", "training.precision"),
        ("bfloat16", bool, "whether the model is in bf16 without autocast", "training.precision"),
        ("float16", bool, "the same of fp16", "training.precision"),
        ("optimizer", str, "the optimizer", "training.optimizer"),
    ),
    ProgramKey(
        "max_grad_norm", float, "norm that gradients are clipped to", "training.gradient_clipping",
        is_plain=True, default=1.0,
    ),
    CHECKPOINTING,
    REENTRANT,
    COMPILE,
    *declare(
        ("attn_implementation", str, "the kernels of attention", "training.attention"),
        ("flash_attention", bool, "FlashAttention, in older files", "training.attention"),
        ("sdp_attention", bool, "torch's attention, in older files", "training.attention"),
        ("eager_attention", bool, "attention that is written out, in older files", "training.attention"),
        ("xformers_attention", bool, "xFormers' attention, in older files", "training.attention"),
        ("plugins", list, "which of Liger's or Cut Cross Entropy's keys count"),
        ("liger_rope", bool, "Liger's rotary embedding", "training.liger"),
        ("liger_rms_norm", bool, "Liger's norm", "training.liger"),
        ("liger_layer_norm", bool, "Liger's norm", "training.liger"),
        ("liger_glu_activation", bool, "Liger's gate", "training.liger"),
        ("liger_swiglu", bool, "the same, in older files", "training.liger"),
        ("liger_cross_entropy", bool, "Liger's loss", "training.cross_entropy"),
        ("liger_fused_linear_cross_entropy", bool, "Liger's loss with the head", "training.cross_entropy"),
        ("cut_cross_entropy", bool, "Apple's loss with the head", "training.cross_entropy"),
        ("chunked_cross_entropy", bool, "the loss in chunks", "training.cross_entropy"),
        ("deepspeed", (str, dict), "DeepSpeed's JSON, or its content", "strategy.config"),
        ("fsdp", list, "what FSDP shards, in words, in older files", "strategy.sharding_strategy"),
        ("fsdp_config", dict, "Accelerate's keys of FSDP", "strategy.kind"),
        ("activation_offloading", str, "what is kept on the host until backward",
         "training.checkpoint_offload"),
        ("freeze_mm_modules", bool, "whether a multimodal model's towers are not trained", "training.frozen"),
        ("unfrozen_parameters", list, "what is trained, if it is all but a tower", "training.frozen"),
        ("use_ray", bool, "whether Ray launches it"),
        ("ray_num_workers", int, "GPUs that Ray launches it on, 1 where left out", "gpus"),
        ("fsdp_version", int, "FSDP1 or FSDP2", "strategy.kind"),
        ("dp_shard_size", int, "ranks that shard the model"),
        ("dp_replicate_size", int, "replicas of the sharded model", "strategy.replicate"),
        ("tensor_parallel_size", int, "ranks that share a layer's products", "parallelism.tensor"),
        ("context_parallel_size", int, "ranks that share a sequence", "parallelism.context"),
        ("sequence_parallel_degree", int, "the same, in older files", "parallelism.context"),
        ("ring_attn_func", str, "how they see the keys and values of others", "parallelism.context_method"),
    ),
    BUCKET,
)  # fmt: skip

_REFUSED = (
    ("process_reward_model", "process reward models, whose head has two outputs"),
    ("gptq", "weights that GPTQ quantised"),
    ("model_quantization_config", "weights that stay quantised"),
    ("peft_use_dora", "DoRA, which norms every adapted weight"),
    ("peft_layer_replication", "layers that are replicated"),
    ("relora", "ReLoRA, which merges adapters and resets the optimizer every so many steps"),
    ("lisa_n_layers", "LISA, which trains a few layers at a time"),
    ("fp8", 'products in fp8 of axolotl; expected training.precision = "fp8"'),
    ("qat", "quantisation-aware training"),
    ("use_onebitllms", "1-bit weights"),
    ("layer_offloading", "frozen layers that are kept on the host"),
    ("selective_checkpointing", "axolotl's selective checkpointing"),
    (
        "expert_parallel_size",
        "expert parallelism of axolotl; expected parallelism.expert with a framework that has it",
    ),
    ("ebft", "EBFT"),
    ("diffusion", "training of diffusion language models"),
    ("llmcompressor", "sparse training"),
    ("lora_on_cpu", "adapters on the host"),
    ("max_memory", "a model that is spread over GPUs and the host"),
    ("batch_flattening", "batches that are flattened to one sequence without padding"),
)
_NOTED = (
    ("lora_mlp_kernel", "axolotl's fused adapters"),
    ("lora_qkv_kernel", "axolotl's fused adapters"),
    ("lora_o_kernel", "axolotl's fused adapters"),
    ("lora_embedding_kernel", "axolotl's fused adapters"),
    ("use_kernels", "kernels from the Hub"),
    ("use_scattermoe", "ScatterMoE's kernels of experts"),
    ("use_sonicmoe", "SonicMoE's kernels of experts"),
    ("experts_implementation", "kernels of experts"),
    ("fused_attn_kernel", "axolotl's fused attention"),
    ("flash_attn_fuse_mlp", "a fused MLP"),
    ("flash_attn_rms_norm", "a fused norm"),
    ("flash_attn_cross_entropy", "a fused loss"),
    ("flash_optimum", "BetterTransformer"),
    ("flex_attn_compile_kwargs", "how FlexAttention is compiled"),
    ("gemma4_hybrid_attn_impl", "two kernels of attention"),
    ("large_head_attention", "kernels of wide heads"),
    ("tiled_mlp", "MLPs in tiles"),
    ("torch_compile_mode", "a mode of torch.compile"),
    ("torch_compile_backend", "a backend of torch.compile"),
    ("deepcompile", "DeepSpeed's compiler"),
    ("fp32_norms", "norms in fp32"),
    ("embeddings_skip_upcast", "the type of the embedding while it is prepared"),
    ("gc_steps", "Python's collector and torch's cache, emptied every so many steps"),
    ("torch_empty_cache_steps", "torch's cache, emptied every so many steps"),
    ("neftune_noise_alpha", "noise on the embedding"),
    ("liger_rms_norm_gated", "Liger's gated norm"),
    ("use_eaft", "another loss"),
    ("ddp_find_unused_parameters", "a search for unused parameters in every forward"),
    ("group_by_length", "sequences of like length in a batch"),
    ("resize_token_embeddings_to_32x", "a larger vocabulary"),
    ("tokens", "a larger vocabulary"),
    ("optim_args", "arguments of the optimizer"),
    ("use_pose", "positions that are skipped"),
    ("min_sample_len", "documents that are left out"),
    ("device_map", "where the model is placed"),
    ("accelerator_config", "Accelerate's own settings"),
    ("peft_autocast_adapter_dtype", "the type of adapters"),
    ("peft", "PEFT's own settings"),
    ("trainer_cls", "a trainer of one's own"),
    ("model_config", "keys of config.json"),
    ("overrides_of_model_config", "keys of config.json"),
    ("overrides_of_model_kwargs", "arguments of the model"),
)
KEYS: Mapping[str, ProgramKey] = index_keys(
    *_READ, refused=_REFUSED, noted=_NOTED, neutral=("auto", "default", "inductor")
)
SILENT = silent_keys(
    """
    output_dir datasets test_datasets val_set_size learning_rate lr_scheduler lr_scheduler_kwargs max_steps
    warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2
    adam_eps lr_div_factor lr_groups cosine_min_lr_ratio cosine_constant_lr_ratio lr_quadratic_warmup
    embedding_lr embedding_lr_scale tf32 seed strict special_tokens chat_template chat_template_jinja
    tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
    processor_type processor_kwargs model_type cls_model_config base_model_config revision_of_model
    base_model_ignore_patterns trust_remote_code train_on_inputs evals_per_epoch saves_per_epoch
    early_stopping_patience load_best_model_at_end metric_for_best_model greater_is_better
    resume_from_checkpoint auto_resume_from_checkpoints local_rank debug eot_tokens remove_unused_columns
    skip_prepare_dataset pad_to_sequence_len eval_sample_packing eval_batch_size eval_sequence_len
    is_llama_derived_model is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model
    lora_model_dir lora_fan_in_fan_out peft_use_rslora peft_init_lora_weights loraplus_lr_ratio
    loraplus_lr_embedding loss_watchdog_threshold loss_watchdog_patience push_dataset_to_hub torchdistx_path
    max_packed_sequence_len gptq_groupsize gptq_model_v1 gptq_disable_exllama profiler_steps
    profiler_steps_start include_tkps include_tokens_per_second do_causal_lm_eval do_bench_eval
    low_cpu_mem_usage experimental_skip_move_to_device num_labels use_tensorboard use_mlflow use_comet
    use_trackio use_wandb use_swanlab use_otel_metrics shuffle_merged_datasets curriculum_sampling
    excess_length_strategy multipack_real_batches ddp ddp_timeout ddp_broadcast_buffers
    llama4_linearized_experts fsdp_final_state_dict_type streaming streaming_multipack_buffer_size
    shrink_embeddings noisy_embedding_alpha heads_k_stride center_rewards_coefficient merge_lora world_size
    rl_beta orpo_alpha hf_use_auth_token dpo_label_smoothing reinit_weights total_num_tokens test_value
    timeout volumes secrets provider branch gpu gpu_count node_count memory memory_preprocess
    timeout_preprocess dockerfile_commands project_name nvfp4_merge_aware device pretrain_multipack_attn
    qlora_sharded_model_loading fsdp_qlora save_safetensors kto_desirable_weight kto_undesirable_weight
    tokenizer_save_jinja_files mean_resizing_embeddings added_tokens_overrides eval_strategy
    evaluation_strategy relora_prune_ratio relora_cpu_offload relora_steps relora_warmup_steps
    relora_anneal_steps full_finetune default_system_message roles_to_train eta_min
    model_quantization_config_kwargs wandb_* mlflow_* comet_* swanlab_* trackio_* hub_* eval_* save_*
    logging_* dataset_* dataloader_* sample_packing_* bench_* lisa_step* lisa_layers* jagged_* otel_*
    early_* ray_* tokenizer_* pretrain_*
    """
)
CONFIG_MAPPINGS: Sequence[ConfigMapping] = (JSON_KEYS, *tuned_mappings(KEYS.values()), EVERY_BLOCK)
