"""The keys of verl's YAML that the update of the actor depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_VERL = "verl b178a3cd, verl/trainer/config/"
_ACTOR_SOURCE, _ENGINE_SOURCE = _VERL + "actor/", _VERL + "engine/"
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
FSDP, MEGATRON, OPTIM = f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", f"{ACTOR}.optim"
REFERENCE = "actor_rollout_ref.ref"
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}

# Of actor/megatron_actor.yaml and engine/megatron.yaml.
MEGATRON_DEFAULTS = {
    "sequence_parallel": True, "use_distributed_optimizer": True,
    "attention_backend": "flash", "accumulate_allreduce_grads_in_fp32": True,
}  # fmt: skip
# Estimator of advantages (trainer/ppo/core_algos.py) -> the algorithm whose passes it has.
ALGORITHMS = {
    "gae": "ppo", "grpo": "grpo", "grpo_passk": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo",
    "rloo_vectorized": "rloo", "reinforce_plus_plus": "rloo", "reinforce_plus_plus_baseline": "rloo",
    "opo": "rloo", "gpg": "rloo",
}  # fmt: skip
OFFLOADS = ("param_offload", "optimizer_offload", "grad_offload")
IDLE_FIELDS = (
    "use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix", "use_remove_padding",
    "dtype", "_target_", "seed", "use_mbridge", "vanilla_mbridge",
)  # fmt: skip
DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip
# Of config/engine/megatron.yaml and not of fsdp.yaml.
MEGATRON_KEYS = (
    *DEGREES, "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
    "use_distributed_optimizer", "override_ddp_config", "override_transformer_config",
    "override_mcore_model_config", "use_mbridge", "use_megatron_fsdp",
)  # fmt: skip
# Keys of an actor -> those of a file of fine-tuning, whose engine and optimizer stand at the top.
ENGINE_NAMES = {
    FSDP: "engine", MEGATRON: "engine", OPTIM: "optim", MODEL: "model",
    f"{ACTOR}.ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
}  # fmt: skip
SFT_NAMES = {
    FSDP: "model.fsdp_config", OPTIM: "optim", f"{MODEL}.path": "model.partial_pretrain", MODEL: "model",
    f"{ACTOR}.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
}  # fmt: skip
# EasyR1's sections (b44b311 verl/trainer/config.py, verl/workers/) and verl's of the same meaning, with the
# names of keys in both. Then its defaults where they are not verl's, what makes another job of it, and what
# no step depends on.
_EASY_R1_SECTIONS = (
    ("data", "data", "rollout_batch_size:train_batch_size mini_rollout_batch_size:gen_batch_size"),
    ("data", "data", "max_prompt_length max_response_length"),
    ("worker.actor.model", MODEL, "model_path:path enable_gradient_checkpointing"),
    ("worker.actor.model.lora", MODEL, "rank:lora_rank alpha:lora_alpha target_modules"),
    ("worker.actor", MODEL, "padding_free:use_remove_padding"),
    ("worker.actor", ACTOR, "global_batch_size:ppo_mini_batch_size max_grad_norm:grad_clip ppo_epochs"),
    ("worker.actor", ACTOR, "micro_batch_size_per_device_for_update:ppo_micro_batch_size_per_gpu"),
    ("worker.actor", ACTOR, "ulysses_size:ulysses_sequence_parallel_size"),
    ("worker.actor", ROLLOUT, "micro_batch_size_per_device_for_experience:log_prob_micro_batch_size_per_gpu"),
    ("worker.actor.fsdp", FSDP, "enable_full_shard:reshard_after_forward torch_dtype:model_dtype fsdp_size"),
    ("worker.actor.fsdp", f"{FSDP}.mixed_precision", "mp_param_dtype:param_dtype"),
    ("worker.actor.fsdp", f"{FSDP}.mixed_precision", "mp_reduce_dtype:reduce_dtype"),
    ("worker.actor.offload", FSDP, "offload_params:param_offload offload_optimizer:optimizer_offload"),
    ("worker.ref.fsdp", f"{REFERENCE}.fsdp_config", "enable_cpu_offload:param_offload"),
    ("worker.rollout", ROLLOUT, "n name tensor_parallel_size:tensor_model_parallel_size enforce_eager"),
    ("worker.rollout", ROLLOUT, "gpu_memory_utilization max_num_batched_tokens"),
    ("algorithm", "algorithm.filter_groups", "online_filtering:enable"),
)  # fmt: skip
EASY_R1 = {
    f"{section}.{name}": f"{target}.{target_name or name}"
    for section, target, names in _EASY_R1_SECTIONS
    for name, _, target_name in (pair.partition(":") for pair in names.split())
}
EASY_R1_DEFAULTS = {
    "data.train_batch_size": 512, "data.max_prompt_length": 512, "data.max_response_length": 512,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
    f"{ROLLOUT}.gpu_memory_utilization": 0.6, f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{MODEL}.lora_alpha": 64, "algorithm.adv_estimator": "grpo",
}  # fmt: skip
EASY_R1_SIZES = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "data.max_prompt_length", "data.max_response_length", f"{ACTOR}.ulysses_sequence_parallel_size",
)  # fmt: skip
EASY_R1_REFUSED = {
    "worker.actor.optim.strategy": "an optimizer of EasyR1's besides adamw",
    "worker.actor.strategy": "another engine of EasyR1's than fsdp",
    "worker.actor.model.freeze_vision_tower": "a frozen tower of EasyR1's; expected training.frozen",
}
EASY_R1_IDLE = silent_keys(
    """
    worker.reward* worker.ref* worker.critic* worker.rollout* worker.actor.optim.* worker.actor.clip_ratio*
    worker.actor.tau_* worker.actor.loss_* worker.actor.use_torch_compile worker.actor.model.trust_remote_code
    worker.actor.model.tokenizer_path worker.actor.fsdp.enable_rank0_init worker.actor.fsdp.use_orig_params
    worker.actor.fsdp.mp_buffer_dtype
    """
)
HOST_UPDATE = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")

_KEYS = (
    ProgramKey("data.train_batch_size", int, "prompts of a step"),
    ProgramKey("data.gen_batch_size", int, "prompts that are drawn at once", "rl.sampling_rounds"),
    ProgramKey("data.max_prompt_length", int, "tokens of a prompt at most", "training.sequence_length"),
    ProgramKey("data.max_response_length", int, "tokens of a response at most", "training.sequence_length"),
    ProgramKey(f"{MODEL}.path", str, "the model", "model"),
    ProgramKey(
        f"{MODEL}.enable_gradient_checkpointing", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: "none"},
        default=True, tuned=("none", "full"), source=_VERL + "model/hf_model.yaml",
    ),
    ProgramKey(
        f"{MODEL}.enable_activation_offload", bool, "checkpoints on the host", "training.checkpoint_offload"
    ),
    ProgramKey(
        f"{MODEL}.use_liger", bool, "Liger's kernels", "training.liger", is_plain=True,
        values={True: True, False: None},
    ),
    ProgramKey(f"{MODEL}.lora_rank", int, "rank of the adapters, 0 for none", "training.lora.rank"),
    ProgramKey(f"{MODEL}.lora_alpha", (int, float), "their scale", "training.lora.alpha"),
    ProgramKey(f"{MODEL}.target_modules", (str, list), "the modules that get one", "training.lora.targets"),
    ProgramKey(f"{ACTOR}.strategy", str, "the engine that trains", "strategy.kind"),
    ProgramKey(f"{ACTOR}.ppo_mini_batch_size", int, "prompts of an update", tuned=None),
    ProgramKey(f"{ACTOR}.ppo_epochs", int, "passes over the responses of a step"),
    ProgramKey(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu", int, "sequences of a micro-batch",
        "training.micro_batch_size", tuned=(), source=_ACTOR_SOURCE + "actor.yaml",
    ),
    ProgramKey(f"{ACTOR}.ppo_micro_batch_size", int, "the same, of all ranks"),
    ProgramKey(f"{ACTOR}.use_dynamic_bsz", bool, "micro-batches by tokens instead of sequences"),
    ProgramKey(f"{ACTOR}.ppo_max_token_len_per_gpu", int, "tokens of such a micro-batch"),
    ProgramKey(f"{MODEL}.use_remove_padding", bool, "samples without padding", "rl.batching"),
    ProgramKey(
        f"{ACTOR}.entropy_coeff", (int, float), "the entropy's part of the loss", "training.cross_entropy",
    ),
    ProgramKey(f"{ACTOR}.calculate_entropy", bool, "entropy in updates, to be printed"),
    ProgramKey(f"{MODEL}.use_fused_kernels", bool, "the same, of actor and reference"),
    ProgramKey(f"{ACTOR}.use_fused_kernels", bool, "the head and the log-probabilities in one kernel"),
    ProgramKey(
        f"{ACTOR}.ulysses_sequence_parallel_size", int, "ranks that share a sequence", "parallelism.context",
        tuned=(), source=_ACTOR_SOURCE + "dp_actor.yaml",
    ),
    ProgramKey(
        f"{ACTOR}.grad_clip", float, "norm that gradients are clipped to", "training.gradient_clipping",
        is_plain=True, default=1.0, is_default_stated=True,
    ),
    ProgramKey(f"{OPTIM}.optimizer", str, "AdamW; others are refused", "training.optimizer"),
    ProgramKey(f"{OPTIM}.optimizer_impl", str, "whose it is: torch.optim; others are refused"),
    ProgramKey(f"{FSDP}.fsdp_size", int, "ranks that shard the model, -1 for all", "strategy.replicate"),
    ProgramKey(
        f"{FSDP}.model_dtype", str, "the type that parameters are kept in", "training.stored_dtype",
        is_plain=True,
        values=_DTYPES, default="fp32",
    ),
    ProgramKey(f"{FSDP}.dtype", str, "the type of products"),
    ProgramKey(
        f"{FSDP}.mixed_precision.param_dtype", str, "the type that FSDP gathers in", "strategy.param_dtype",
        is_plain=True, values=_DTYPES,
    ),
    ProgramKey(
        f"{FSDP}.mixed_precision.reduce_dtype", str, "the type that it reduces in", "strategy.reduce_dtype",
        is_plain=True, values=_DTYPES,
    ),
    ProgramKey(
        f"{FSDP}.reshard_after_forward", bool, "whether a unit is freed between forward and backward",
        tuned=None,
    ),
    *declare(
        (f"{FSDP}.ulysses_sequence_parallel_size", int, "ranks that share a sequence", "parallelism.context"),
        (f"{FSDP}.forward_prefetch", bool, "whether the next unit is gathered early"),
        (f"{FSDP}.param_offload", bool, "parameters on the host outside the update"),
        (f"{FSDP}.optimizer_offload", bool, "optimizer states on the host outside the update"),
        (f"{FSDP}.offload_policy", bool, "states on the host between uses", "strategy.cpu_offload"),
        (f"{FSDP}.wrap_policy.min_num_params", int, "elements of a unit, 0 for blocks"),
        (f"{ROLLOUT}.n", int, "responses to a prompt", "rl.samples_per_prompt"),
        (f"{ROLLOUT}.name", str, "the engine of the rollout", "rl.rollout.engine"),
        (f"{ROLLOUT}.tensor_model_parallel_size", int, "ranks of a replica", "rl.rollout.tensor"),
        (f"{ROLLOUT}.pipeline_model_parallel_size", int, "stages of a replica"),
        (f"{ROLLOUT}.data_parallel_size", int, "groups of a replica with requests of their own"),
        (f"{ROLLOUT}.expert_parallel_size", int, "ranks that share experts", "rl.rollout.expert"),
        (f"{ROLLOUT}.gpu_memory_utilization", float, "part of the memory that the engine takes",
         "rl.rollout.gpu_memory_utilization"),
        (f"{ROLLOUT}.max_num_seqs", int, "sequences that run at once", "rl.rollout.max_num_seqs"),
        (f"{ROLLOUT}.max_num_batched_tokens", int, "tokens of an iteration",
         "rl.rollout.max_num_batched_tokens"),
        (f"{ROLLOUT}.quantization", str, "type of the engine's weights", "rl.rollout.precision"),
        (f"{ROLLOUT}.enforce_eager", bool, "no CUDA graphs", "rl.rollout.enforce_eager"),
        (f"{ROLLOUT}.enable_prefix_caching", bool, "prompts are computed once", "rl.rollout.prefix_caching"),
        (f"{ROLLOUT}.free_cache_engine", bool, "the engine sleeps", "rl.offload.sleep_level"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", int,
         "samples of a micro-batch of old log-probabilities", "rl.logprob_micro_batch_size"),
        (f"{ROLLOUT}.log_prob_micro_batch_size", int, "the same, of all ranks"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", bool, "whether they are by tokens"),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", int, "their tokens with use_dynamic_bsz",
         "rl.logprob_micro_batch_tokens"),
        (f"{ROLLOUT}.calculate_log_probs", bool, "log-probabilities of the engine"),
        ("algorithm.adv_estimator", str, "advantages: gae has a critic", "rl.algorithm"),
        ("algorithm.use_kl_in_reward", bool, "a reference model", "rl.reference"),
        ("algorithm.rollout_correction.bypass_mode", bool, "no pass of its own", "rl.old_logprobs"),
        (f"{ACTOR}.use_kl_loss", bool, "a reference model", "rl.reference"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", bool, "which is in host memory"),
        ("critic.model.path", str, "the critic", "rl.critic.model"),
        ("rollout.nnodes", int, "nodes of engines apart", "rl.rollout.gpus"),
        ("rollout.n_gpus_per_node", int, "their GPUs of a node", "rl.rollout.gpus"),
        ("async_training.staleness_threshold", (int, float), "stale prompts", "rl.max_staleness"),
        ("async_training.trigger_parameter_sync_step", int, "batches between syncs"),
        ("async_training.require_batches", int, "mini-batches of a batch", "rl.stream_prompts"),
        ("async_training.partial_rollout", bool, "responses go on over syncs", "rl.partial_rollout"),
        ("distillation.enabled", bool, "a teacher whose probabilities are learned"),
        ("trainer.v1.trainer_mode", str, "how rollouts and updates take turns"),
        ("model_engine", str, "the engine that trains, as Hydra's group of files", "strategy.kind"),
        ("trainer.nnodes", int, "nodes", "nodes"),
        ("trainer.n_gpus_per_node", int, "GPUs of a node", "gpus"),
    ),
)  # fmt: skip
_SHARED_NAMES = (
    "enable_gradient_checkpointing", "use_liger", "lora_rank", "lora_alpha", "target_modules", "model_dtype",
)  # fmt: skip
# Of trainer/config/sft_trainer.yaml, which has a model and data of its own.
_SFT_KEYS = (
    ProgramKey("data.max_length", int, "fine-tuning: tokens of a sequence", "training.sequence_length"),
    ProgramKey(
        "data.micro_batch_size_per_gpu", int, "fine-tuning: sequences of a micro-batch",
        "training.micro_batch_size",
    ),
    *declare(
        ("data.use_dynamic_bsz", bool, "fine-tuning by an engine: micro-batches by tokens (true)"),
        ("data.max_token_len_per_gpu", int, "fine-tuning by an engine: tokens of such a micro-batch (8,192)"),
    ),
    ProgramKey("model.partial_pretrain", str, "fine-tuning: the model", "model"),
    ProgramKey("model.strategy", str, "fine-tuning: fsdp or fsdp2", "strategy.kind"),
    *(
        replace(
            key, key=key.key.replace(FSDP, "model.fsdp_config").replace(MODEL, "model"),
            meaning=f"fine-tuning: {key.meaning}", tuned=None,
        )
        for key in _KEYS
        if key.key.rpartition(".")[2] in _SHARED_NAMES
    ),
    *declare(
        ("model.fsdp_config.cpu_offload", bool, "fine-tuning: states on the host", "strategy.cpu_offload"),
        ("model.fsdp_config.offload_params", bool, "fine-tuning: which is without effect unless true"),
        ("ulysses_sequence_parallel_size", int, "fine-tuning: ranks that share a sequence"),
    ),
    ProgramKey(
        "optim.clip_grad", float, "fine-tuning: norm that gradients are clipped to",
        "training.gradient_clipping", is_plain=True, default=1.0,
    ),
    ProgramKey("trainer.total_epochs", int, "fine-tuning: passes over a data set", "cost.epochs"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in (*_KEYS, *_SFT_KEYS)}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Sections of other phases than the update of the actor, and keys without effect on a step.
PHASES = ("actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic", "reward_model", "reward_manager")
IDLE = silent_keys(
    """
    actor_rollout_ref.rollout actor_rollout_ref.ref critic reward_model reward_manager rollout distillation
    algorithm custom_reward_function reward ray_kwargs ray_init global_profiler trainer transfer_queue data
    hydra defaults actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout
    actor_rollout_ref.actor._target_ actor_rollout_ref.actor.checkpoint actor_rollout_ref.actor.profiler
    actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low
    actor_rollout_ref.actor.clip_ratio_high actor_rollout_ref.actor.clip_ratio_c
    actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.kl_loss_coef
    actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.data_loader_seed
    actor_rollout_ref.actor.shuffle actor_rollout_ref.actor.policy_loss actor_rollout_ref.actor.optim
    actor_rollout_ref.actor.use_torch_compile actor_rollout_ref.actor.rollout_n
    actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.tau_neg actor_rollout_ref.actor.loss_scale_factor
    actor_rollout_ref.actor.router_replay actor_rollout_ref.model._target_ actor_rollout_ref.model.use_shm
    actor_rollout_ref.model.trust_remote_code actor_rollout_ref.model.external_lib
    actor_rollout_ref.model.tokenizer_path actor_rollout_ref.model.custom_chat_template
    actor_rollout_ref.model.hf_config_path actor_rollout_ref.actor.fsdp_config._target_
    actor_rollout_ref.actor.fsdp_config.seed actor_rollout_ref.actor.fsdp_config.full_determinism
    actor_rollout_ref.actor.fsdp_config.use_orig_params actor_rollout_ref.actor.fsdp_config.forward_only
    actor_rollout_ref.actor.megatron._target_ actor_rollout_ref.actor.megatron.seed
    actor_rollout_ref.actor.megatron.use_mbridge actor_rollout_ref.actor.megatron.vanilla_mbridge
    actor_rollout_ref.actor.megatron.forward_only
    """
)
