"""The flags of OpenRLHF's trainers that an update depends on, without dashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_SFT = "OpenRLHF 3c3be623, openrlhf/cli/train_sft.py"

_KEYS = (
    ProgramKey(
        "train.micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
        is_plain=True, tuned=(), source=_SFT,
    ),
    ProgramKey("train.batch_size", int, "sequences of an update"),
    ProgramKey("data.max_len", int, "tokens of a sequence at most", "training.sequence_length"),
    ProgramKey("model.model_name_or_path", str, "the model", "model"),
    ProgramKey(
        "model.gradient_checkpointing_enable", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_SFT,
    ),
    ProgramKey(
        "model.gradient_checkpointing_reentrant", bool, "torch's older way to do so",
        "training.checkpoint_is_reentrant", is_plain=True,
    ),
    ProgramKey("ds.zero_stage", int, "ZeRO's stage", "strategy.config"),
    ProgramKey("ds.param_dtype", str, "the type of products", "training.precision"),
    ProgramKey("ds.zpg", int, "ranks of ZeRO++'s second shards"),
    ProgramKey("ds.adam_offload", bool, "optimizer states on the host"),
    ProgramKey("ds.overlap_comm", bool, "reductions concurrently with backward"),
    ProgramKey("ds.grad_accum_dtype", str, "the type of sums of gradients"),
    ProgramKey("ds.attn_implementation", str, "the core of attention", "training.attention"),
    ProgramKey(
        "ds.use_liger_kernel", bool, "Liger's kernels", "training.liger", is_plain=True,
        values={True: True, False: None},
    ),
    *declare(
        ("ds.packing_samples", bool, "several documents in a sequence"),
        ("ds.load_in_4bit", bool, "frozen weights in 4 bits", "training.lora.quantized"),
        ("ds.lora.rank", int, "rank of the adapters, 0 for none", "training.lora.rank"),
        ("ds.lora.alpha", (int, float), "their scale", "training.lora.alpha"),
        ("ds.lora.target_modules", (str, list), "the modules that get one", "training.lora.targets"),
        ("max_norm", float, "norm that gradients are clipped to", "training.gradient_clipping"),
        ("optim", str, "the optimizer"),
        ("actor.num_nodes", int, "nodes of the actor", "nodes"),
        ("actor.num_gpus_per_node", int, "GPUs of a node of the actor", "gpus"),
        ("rollout.batch_size", int, "prompts of a step", "rl.prompts_per_step"),
        ("rollout.n_samples_per_prompt", int, "responses to each", "rl.samples_per_prompt"),
        ("rollout.max_new_tokens", int, "the cap of a response", "rl.lengths.max_response"),
        ("train.max_epochs", int, "passes over the responses", "rl.epochs"),
        ("train.dynamic_batch_enable", bool, "micro-batches by tokens", "rl.batching"),
        ("train.max_tokens_per_gpu", int, "tokens of such a micro-batch", "rl.micro_batch_tokens"),
        ("train.colocate_all", bool, "actor and engines on the same GPUs", "rl.placement"),
        ("train.async_enable", bool, "rollouts beside training", "rl.placement"),
        ("train.async_queue_size", int, "batches that wait for training", "rl.max_staleness"),
        ("train.partial_rollout_enable", bool, "responses go on over updates", "rl.partial_rollout"),
        ("vllm.num_engines", int, "replicas of the engine", "rl.rollout.gpus"),
        ("vllm.tensor_parallel_size", int, "ranks of each", "rl.rollout.tensor"),
        ("vllm.gpu_memory_utilization", float, "part of the memory that one takes",
         "rl.rollout.gpu_memory_utilization"),
        ("vllm.enforce_eager", bool, "no CUDA graphs", "rl.rollout.enforce_eager"),
        ("vllm.enable_sleep", bool, "engines sleep while others work", "rl.offload.sleep_level"),
        ("ds.enable_sleep", bool, "so do the actor's states", "rl.offload.optimizer"),
        ("algo.advantage.estimator", str, "advantages: gae has a critic", "rl.algorithm"),
        ("algo.kl.init_coef", float, "a reference model unless 0", "rl.reference"),
    ),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = (JSON_KEYS, *tuned_mappings(KEYS.values()), EVERY_BLOCK)
# Flags up to 0.8 -> today's.
RENAMED = {
    "micro_train_batch_size": "train.micro_batch_size", "train_batch_size": "train.batch_size",
    "max_len": "data.max_len", "pretrain": "model.model_name_or_path",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "zero_stage": "ds.zero_stage", "zpg": "ds.zpg", "adam_offload": "ds.adam_offload",
    "overlap_comm": "ds.overlap_comm", "grad_accum_dtype": "ds.grad_accum_dtype",
    "use_liger_kernel": "ds.use_liger_kernel", "packing_samples": "ds.packing_samples",
    "load_in_4bit": "ds.load_in_4bit", "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules", "param_dtype": "ds.param_dtype",
    "ring_attn_size": "ds.ring_attn_size", "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "actor_num_nodes": "actor.num_nodes", "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_reentrant": "model.gradient_checkpointing_reentrant",
    "deepcompile": "ds.deepcompile", "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "max_epochs": "train.max_epochs",
    "generate_max_len": "rollout.max_new_tokens", "max_new_tokens": "rollout.max_new_tokens",
    "partial_rollout": "train.partial_rollout_enable", "async_queue_size": "train.async_queue_size",
    "dynamic_filtering": "algo.dynamic_filtering_enable", "colocate_all_models": "train.colocate_all",
    "async_train": "train.async_enable", "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_enable_sleep": "vllm.enable_sleep", "enforce_eager": "vllm.enforce_eager",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "ref_offload": "ref.offload", "ref_pretrain": "ref.model_name_or_path",
    "colocate_actor_ref": "train.colocate_actor_ref", "remote_rm_url": "reward.remote_url",
    "reward_pretrain": "reward.model_name_or_path",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "advantage_estimator": "algo.advantage.estimator", "init_kl_coef": "algo.kl.init_coef",
}  # fmt: skip
# Flags of other phases, or without effect on an update.
IDLE = silent_keys(
    """
    ckpt logger eval adam muon ref model.beta model.label_smoothing model.ipo_enable critic reward vllm
    rollout algo kl data train lr_scheduler lr_warmup_ratio min_lr_ratio learning_rate l2 seed save_path
    ckpt_path save_steps logging_steps eval_steps max_epochs max_samples dataset input_key output_key
    apply_chat_template input_template use_wandb bf16 local_rank use_ms flash_attn load_checkpoint actor
    ref_num_nodes ref_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node reward_num_nodes
    reward_num_gpus_per_node vllm_sync_backend micro_rollout_batch_size prompt_max_len prompt_data gamma
    normalize_reward label_key actor_learning_rate critic_learning_rate num_episodes use_kl_loss kl_estimator
    """
)
