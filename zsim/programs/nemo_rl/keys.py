"""The keys of NeMo-RL's YAML that the update of the policy depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_NEMO_RL = "NeMo-RL 7ea279ab, "
_POLICY, _PARALLELIZE = _NEMO_RL + "models/policy/__init__.py", _NEMO_RL + "models/dtensor/parallelize.py"
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"

_KEYS = (
    ProgramKey("policy.model_name", str, "the model", "model"),
    ProgramKey("policy.train_global_batch_size", int, "sequences of an update"),
    ProgramKey(
        "policy.train_micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
        is_plain=True, tuned=(), source=_POLICY,
    ),
    ProgramKey(
        "policy.max_total_sequence_length", int, "tokens of a sequence at most", "training.sequence_length",
        is_plain=True,
    ),
    ProgramKey(
        "policy.precision", str, "the type of products", "training.precision",
        values={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    ),
    ProgramKey(
        "policy.max_grad_norm", float, "norm that gradients are clipped to", "training.gradient_clipping",
    ),
    ProgramKey("policy.optimizer.name", str, "the optimizer"),
    ProgramKey("policy.optimizer.kwargs.fused", bool, "its kernels", "training.optimizer_implementation"),
    ProgramKey("policy.optimizer.kwargs.foreach", bool, "the same"),
    ProgramKey("policy.dynamic_batching.enabled", bool, "micro-batches by tokens"),
    ProgramKey("policy.sequence_packing.enabled", bool, "several responses in a sequence"),
    *(
        ProgramKey(f"policy.{name}.{phase}_mb_tokens", int, "their tokens", f"rl.{prefix}micro_batch_tokens")
        for name in ("dynamic_batching", "sequence_packing")
        for phase, prefix in (("train", ""), ("logprob", "logprob_"))
    ),
    *declare(
        ("policy.logprob_batch_size", int, "responses of a micro-batch of passes without backward",
         "rl.logprob_micro_batch_size"),
        (f"{GENERATION}.colocated.enabled", bool, "generation on the same GPUs", "rl.placement"),
        (f"{GENERATION}.colocated.resources.num_nodes", int, "nodes of generation alone", "rl.rollout.gpus"),
        (f"{GENERATION}.colocated.resources.gpus_per_node", int, "GPUs of generation alone"),
        (f"{GENERATION}.backend", str, "the engine", "rl.rollout.engine"),
        (f"{GENERATION}.max_new_tokens", int, "the cap of a response", "rl.lengths.max_response"),
        (f"{VLLM}.tensor_parallel_size", int, "ranks of a replica", "rl.rollout.tensor"),
        (f"{VLLM}.pipeline_parallel_size", int, "stages of a replica"),
        (f"{VLLM}.expert_parallel_size", int, "ranks that share experts", "rl.rollout.expert"),
        (f"{VLLM}.gpu_memory_utilization", float, "part of the memory that the engine takes",
         "rl.rollout.gpu_memory_utilization"),
        (f"{VLLM}.enforce_eager", bool, "no CUDA graphs", "rl.rollout.enforce_eager"),
        (f"{VLLM}.precision", str, "type of the engine's weights", "rl.rollout.precision"),
        (f"{VLLM}.kv_cache_dtype", str, "type of keys and values", "rl.rollout.kv_dtype"),
        (f"{GENERATION}.vllm_kwargs.max_num_seqs", int, "sequences that run at once",
         "rl.rollout.max_num_seqs"),
    ),
    *(
        ProgramKey(f"{loop}.{key}", kind, meaning, setting)
        for loop in ("grpo", "ppo")
        for key, kind, meaning, setting in (
            ("num_prompts_per_step", int, "prompts of a step", "rl.prompts_per_step"),
            ("num_generations_per_prompt", int, "responses to each", "rl.samples_per_prompt"),
            ("use_dynamic_sampling", bool, "prompts without variance are drawn again", ""),
            (f"async_{loop}.enabled", bool, "generation beside training", "rl.placement"),
            (
                f"async_{loop}.max_trajectory_age_steps", int, "steps that a response may be old",
                "rl.max_staleness",
            ),
            (
                f"async_{loop}.in_flight_weight_updates", bool, "responses go on over updates",
                "rl.partial_rollout",
            ),
        )
    ),
    ProgramKey("ppo.ppo_epochs", int, "times that a rollout is trained on", "rl.epochs"),
    ProgramKey("ppo.skip_reference_policy_logprobs_calculation", bool, "no reference", "rl.reference"),
    ProgramKey("value.model_name", str, "the critic", "rl.critic.model"),
    ProgramKey("policy.draft.enabled", bool, "a draft model beside, which is left out"),
    ProgramKey("policy.hf_config_overrides", dict, "changes of config.json, which are left out"),
    ProgramKey("policy.quant_cfg", (str, dict), "quantisation-aware training, which is refused"),
    ProgramKey(
        "loss_fn.reference_policy_kl_penalty", (int, float), "a reference model unless 0", "rl.reference",
    ),
    ProgramKey("loss_fn.force_on_policy_ratio", bool, "no pass for the old policy", "rl.old_logprobs"),
    ProgramKey(f"{DTENSOR}.enabled", bool, "FSDP2 with DTensor trains"),
    ProgramKey(
        f"{DTENSOR}.cpu_offload", bool, "states on the host between uses", "strategy.cpu_offload", tuned=(),
        source=_PARALLELIZE,
    ),
    ProgramKey(
        f"{DTENSOR}.activation_checkpointing", bool, "backward computes again",
        "training.activation_checkpointing",
    ),
    *declare(
        (f"{DTENSOR}.tensor_parallel_size", int, "ranks that share a layer's products", "parallelism.tensor"),
        (f"{DTENSOR}.context_parallel_size", int, "ranks that share a sequence", "parallelism.context"),
        tuned=(), source=_PARALLELIZE,
    ),
    ProgramKey(f"{DTENSOR}.sequence_parallel", bool, "norms and residuals have a part of the sequence"),
    ProgramKey(f"{DTENSOR}.dp_replicate_size", int, "replicas of the sharded model", "strategy.replicate"),
    ProgramKey(f"{DTENSOR}.expert_parallel_size", int, "ranks that share the experts"),
    ProgramKey(f"{DTENSOR}.custom_parallel_plan", (str, dict), "a split of layers of one's own"),
    ProgramKey(f"{DTENSOR}.lora_cfg.enabled", bool, "adapters"),
    ProgramKey(f"{DTENSOR}.lora_cfg.dim", int, "their rank", "training.lora.rank"),
    ProgramKey(f"{DTENSOR}.lora_cfg.alpha", (int, float), "their scale", "training.lora.alpha"),
    ProgramKey(f"{DTENSOR}.lora_cfg.match_all_linear", bool, "on all linear layers"),
    ProgramKey(f"{DTENSOR}.lora_cfg.target_modules", list, "the modules that get one"),
    ProgramKey(f"{DTENSOR}.lora_cfg.exclude_modules", list, "and those that get none"),
    ProgramKey(f"{MEGATRON}.enabled", bool, "Megatron-Core trains"),
    ProgramKey(f"{MEGATRON}.activation_checkpointing", bool, "layers are recomputed"),
    ProgramKey("cluster.num_nodes", int, "nodes", "nodes"),
    ProgramKey("cluster.gpus_per_node", int, "GPUs of a node", "gpus"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Other phases, and keys without effect on an update.
IDLE = silent_keys(
    """
    grpo loss_fn checkpointing data env logger sft dpo rm distillation teacher ppo value value_loss_fn
    reward_penalties data_plane cluster policy.tokenizer policy.generation policy.logprob_chunk_size
    policy.generation_batch_size policy.scheduler policy.optimizer policy.dynamic_batching
    policy.sequence_packing policy.make_sequence_length_divisible_by policy.refit_buffer_size_gb
    policy.offload_optimizer_for_logprob policy.draft policy.reward_model_cfg policy.dtensor_cfg._v2
    policy.dtensor_cfg.env_vars policy.dtensor_cfg.lora_cfg policy.dtensor_cfg.automodel_kwargs policy.fp8_cfg
    """
)
