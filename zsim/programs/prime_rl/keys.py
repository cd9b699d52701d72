"""The keys of prime-rl's TOML that an update depends on. `trainer`'s stand at the top in a file of SFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_PRIME = "prime-rl 559b4477, packages/prime-rl-configs/src/prime_rl/configs/"
_TRAINER = _PRIME + "trainer.py"

_KEYS = (
    ProgramKey("seq_len", int, "tokens of a sequence, of RL", "training.sequence_length"),
    ProgramKey("orchestrator.seq_len", int, "tokens of a rollout", "rl.lengths.max_response"),
    ProgramKey("data.seq_len", int, "tokens of a sequence, of SFT", "training.sequence_length"),
    ProgramKey("data.batch_size", int, "sequences of a step, of SFT"),
    ProgramKey(
        "data.micro_batch_size", int, "sequences of a micro-batch, of SFT", "training.micro_batch_size",
        is_plain=True, default=1, tuned=(), source=_PRIME + "sft.py",
    ),
    *declare(
        ("orchestrator.batch_size", int, "rollouts of a step, of RL", "rl.prompts_per_step"),
        ("orchestrator.group_size", int, "rollouts of a prompt", "rl.samples_per_prompt"),
        ("orchestrator.algo.type", str, "grpo, or one of its kin; distillation is refused"),
        ("orchestrator.train.sampling.max_completion_tokens", int, "the cap of a response",
         "rl.lengths.max_response"),
        ("orchestrator.max_off_policy_steps", int, "steps that a rollout may be old", "rl.max_staleness"),
        ("deployment.num_infer_gpus", int, "GPUs that generate, on one node", "rl.rollout.gpus"),
        ("deployment.num_infer_nodes", int, "nodes that generate", "rl.rollout.gpus"),
        ("deployment.num_infer_replicas", int, "times that there are these nodes", "rl.rollout.gpus"),
        ("inference.deployment.type", str, "disaggregated: prefill and decode apart"),
        ("inference.deployment.num_nodes", int, "nodes that generate", "rl.rollout.gpus"),
        ("inference.vllm.tensor_parallel_size", int, "ranks of a replica", "rl.rollout.tensor"),
        ("inference.vllm.data_parallel_size", int, "replicas that share experts", "rl.rollout.expert"),
        ("inference.vllm.enable_expert_parallel", bool, "whether replicas share experts", "rl.rollout.expert",
         ),
        ("inference.vllm.gpu_memory_utilization", float, "part of the memory that an engine takes",
         "rl.rollout.gpu_memory_utilization"),
        ("inference.vllm.enforce_eager", bool, "no CUDA graphs", "rl.rollout.enforce_eager"),
        ("inference.vllm.max_num_seqs", int, "responses at once", "rl.rollout.max_num_seqs"),
        ("inference.vllm.quantization", str, "the type of its weights", "rl.rollout.precision"),
        ("inference.parallel.tp", int, "ranks of a replica, in older files", "rl.rollout.tensor"),
        ("inference.parallel.dp", int, "replicas that share experts, in older files", "rl.rollout.expert"),
        ("inference.gpu_memory_utilization", float, "the engine's part of the memory, in older files",
         "rl.rollout.gpu_memory_utilization"),
        ("inference.enforce_eager", bool, "no CUDA graphs, in older files", "rl.rollout.enforce_eager"),
        ("weight_broadcast.type", str, "the way of new weights", "rl.sync.transport"),
        ("orchestrator.token_batch_size", int, "their tokens instead"),
        ("deployment.type", str, "single_node or multi_node"),
        ("deployment.num_train_gpus", int, "GPUs that train, on one node", "gpus"),
        ("deployment.num_train_nodes", int, "nodes that train", "nodes"),
        ("deployment.gpus_per_node", int, "GPUs of a node"),
        ("deployment.nodes_per_fsdp_group", int, "nodes that shard the model", "strategy.replicate"),
        ("model.name", str, "the model", "model"),
        ("trainer.model.seq_len", int, "tokens of a sequence, of the trainer", "training.sequence_length"),
        ("trainer.model.compile", (dict, str, bool), "torch.compile of blocks, on where left out",
         "training.compile"),
        ("trainer.model.ac.mode", str, "full; selective is refused by name"),
        ("trainer.model.ac.freq", int, "every how many blocks are checkpointed", "training.checkpoint_every"),
        ("trainer.model.ac_offloading", (dict, str, bool),
         "checkpoints on the host until backward, on where left out", "training.checkpoint_offload"),
        ("trainer.model.fsdp_cpu_offload", bool, "shards on the host", "strategy.cpu_offload"),
        ("trainer.model.optim_cpu_offload", bool,
         "optimizer states on the host between updates, on where left out", "strategy.offload_states"),
        ("trainer.model.full_offload", (dict, bool), "masters and the update on the host"),
    ),
    ProgramKey(
        "trainer.model.reshard_after_forward", bool, "whether a unit is freed between forward and backward",
        "strategy.reshard_after_forward", is_plain=True, default=True, tuned=(True, False), source=_TRAINER,
    ),
    ProgramKey(
        "trainer.model.dp_replicate", int, "replicas of the sharded model", "strategy.replicate", tuned=(),
        source=_TRAINER,
    ),
    ProgramKey("trainer.model.ep", (int, str), "ranks that share the experts", "parallelism.expert"),
    ProgramKey("trainer.model.ep_comm_backend", str, "what exchanges tokens", "parallelism.dispatcher"),
    ProgramKey(
        "trainer.model.cp", int, "ranks that share a sequence", "parallelism.context", tuned=(),
        source=_TRAINER,
    ),
    ProgramKey("trainer.model.cp_style", str, "ring or ulysses", "parallelism.context_method"),
    ProgramKey("trainer.model.attn", str, "the kernels of attention", "training.attention"),
    ProgramKey("trainer.model.optimization_dtype", str, "the type of parameters", "training.stored_dtype"),
    ProgramKey(
        "trainer.model.reduce_dtype", str, "the type in which gradients are reduced", "strategy.reduce_dtype",
        is_plain=True, values={"float32": "fp32", "bfloat16": "bf16"}, default="float32",
    ),
    *declare(
        ("trainer.model.quantization.type", str, "products in fp8, which are refused"),
        ("trainer.model.lora.rank", int, "rank of the adapters", "training.lora.rank"),
        ("trainer.model.lora.alpha", float, "their scale", "training.lora.alpha"),
        ("trainer.model.lora.dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("trainer.model.lora.target_modules", list, "the modules that get one", "training.lora.targets"),
        ("trainer.model.lora.modules_to_save", list, "modules that are trained whole",
         "training.lora.modules_to_save"),
        ("trainer.model.vlm", dict, "a multimodal model's towers"),
        ("trainer.model.debug.num_layers", int, "blocks of a model that is cut off"),
        ("trainer.model.fused_lm_head_token_chunk_size", (int, str),
         "tokens of a chunk of the head and the loss, of RL", "training.cross_entropy"),
        ("trainer.optim.type", str, "adamw or sgd; others are refused by name", "training.optimizer"),
    ),
    ProgramKey(
        "trainer.optim.max_norm", float, "norm that gradients are clipped to", "training.gradient_clipping",
        is_plain=True, default=1.0,
    ),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Other phases than the update, and what changes none: rollouts, evaluation, saves, logs.
IDLE = silent_keys(
    """
    orchestrator inference eval val ckpt resume log monitors run output_dir clean slurm env_vars max_steps
    max_async_level scheduler tokenizer renderer weight_broadcast rollout_transport heartbeat metrics_server
    dry_run deployment dist_timeout_seconds matmul_precision gc memory_profiler_path trace_path bench data
    trainer.tokenizer trainer.data trainer.loss trainer.scheduler trainer.ckpt trainer.resume
    trainer.weight_broadcast trainer.rollout_transport trainer.log trainer.monitors trainer.output_dir
    trainer.matmul_precision trainer.max_steps trainer.memory_profiler_path trainer.gc trainer.trace_path
    trainer.dist_timeout_seconds trainer.heartbeat trainer.metrics_server trainer.enable_token_export
    trainer.env_vars trainer.enable_router_replay trainer.model.name trainer.model.trust_remote_code
    trainer.model.conversion_dir trainer.model.impl trainer.model.moe_use_grouped_mm
    trainer.model.moe_router_dtype trainer.model.deepep_num_sms trainer.model.deepep_token_chunk_size
    trainer.model.debug trainer.model.freeze_moe_router trainer.model.ac.targets trainer.optim.lr
    trainer.optim.weight_decay trainer.optim.betas1 trainer.optim.betas2 trainer.optim.mu
    trainer.optim.momentum trainer.optim.nesterov
    """
)
