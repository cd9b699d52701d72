"""Settings that can be expressed in each program whose files zsim reads. It is one table, and each row has
its source.

For one key of an experiment, or for all keys with the prefix before a star, a row gives the values that a
program accepts, where they are set, and how. A setting without a row cannot be expressed in that program. An
experiment without a program can use every setting. `ZSIM_MAPPINGS` lists those that need more than files.

# [Note: transformers checkpoints every block]
`activation_checkpointing_kwargs.every_n_layers` is in transformers 5.23 (training_args.py) and not in earlier
releases. A file does not say which release reads it, so the table has no row for every n-th block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Program = Literal["accelerate", "deepspeed", "megatron", "torchtitan", "torchtitan-0.3", "transformers"]
ConfigLocation = Literal["file", "script"]

KINDS: Mapping[Program, tuple[str, ...]] = {
    "accelerate": ("deepspeed", "fsdp1", "fsdp2", "ddp"),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron",),
    "torchtitan": ("fsdp2", "ddp"),
    "torchtitan-0.3": ("fsdp2",),
    "transformers": ("deepspeed", "fsdp1", "fsdp2", "ddp"),
}
NAMES: Mapping[Program, str] = {
    "accelerate": "Accelerate", "deepspeed": "DeepSpeed", "megatron": "Megatron", "torchtitan": "torchtitan",
    "torchtitan-0.3": "torchtitan 0.3", "transformers": "the Trainer",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigMapping:
    """How a program is configured with values of one key of an experiment."""

    key: str
    """Dotted key of an experiment. A star at its end stands for all keys with that prefix."""
    location: ConfigLocation
    """The program's file, or a change of the script that it runs."""
    instruction: str
    """The program's own key, option or code."""
    source: str
    """Where this was read, and in which release."""
    values: tuple[Any, ...] = ()
    """The values that can be expressed. Empty: any value."""
    kinds: tuple[str, ...] = ()
    """The strategies under which they can be expressed. Empty: all."""

    def matches(self, kind: str, key: str, value: Any) -> bool:
        is_key = key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key
        is_value = not self.values or any(
            type(choice) is type(value) and choice == value for choice in self.values
        )
        return is_key and is_value and (not self.kinds or kind in self.kinds)


_MICRO, _STEPS = "training.micro_batch_size", "training.gradient_accumulation_steps"
_CHECKPOINTING, _EVERY = "training.activation_checkpointing", "training.checkpoint_every"
_LOSS = "training.cross_entropy"
_RESHARD, _REPLICATE = "strategy.reshard_after_forward", "strategy.replicate"
_NO_SYNC, _CPU = "strategy.no_sync", "strategy.cpu_offload"
_TORCH = ("fsdp1", "fsdp2", "ddp")
_ENABLE, _NOT_ENABLED = "model.gradient_checkpointing_enable()", "no model.gradient_checkpointing_enable()"
_LIGER = "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss for head and loss"
_LIGER_LOSS = "a loss that is one kernel, e.g. liger_kernel.transformers.LigerCrossEntropyLoss"
_LIGER_SOURCE = "linkedin/Liger-Kernel 0.8, transformers/__init__.py"
_DEEPSPEED = "DeepSpeed 0.19.8, "
_ACCELERATE = "accelerate 1.15.0, "
_TRANSFORMERS = "transformers 5.23.0, "
_TITAN = "torchtitan 0.2, config/job_config.py"
_TITAN_3 = "torchtitan 0.3.0, "
_TITAN_DEGREES = "torchtitan 0.2.2, config/job_config.py, distributed/pipeline_parallel.py"


def _torchtitan_degrees(source: str) -> tuple[ConfigMapping, ...]:
    """Rows of `[parallelism]`. torchtitan's mesh has a single order."""
    keys = {
        "tensor": "tensor_parallel_degree",
        "async_tensor": "enable_async_tensor_parallel, with compile.enable",
        "loss_parallel": "disable_loss_parallel",
        "pipeline": "pipeline_parallel_degree",
        "schedule": "pipeline_parallel_schedule",
        "schedule_csv": "pipeline_parallel_schedule_csv",
        "virtual_stages": "module_fqns_per_model_part",
        "first_stage_less_layers": "pipeline_parallel_first_stage_less_layers",
        "last_stage_less_layers": "pipeline_parallel_last_stage_less_layers",
        "layers_per_stage": "module_fqns_per_model_part",
        "passes": "training.global_batch_size",
        "context": "context_parallel_degree",
    }
    return tuple(ConfigMapping(f"parallelism.{key}", "file", how, source) for key, how in keys.items())


_MEGATRON = "Megatron-Core 0.16.1, training/arguments.py"
_MEGATRON_FLAGS: Sequence[tuple[str, str, tuple[Any, ...]]] = (
    (_MICRO, "--micro-batch-size", ()),
    (_STEPS, "--global-batch-size", ()),
    (_CHECKPOINTING, "--recompute-granularity", ("none", "selective", "full")),
    (_EVERY, "every block", (1,)),
    ("training.recompute_method", "--recompute-method", ()),
    ("training.recompute_layers", "--recompute-num-layers", ()),
    ("training.recompute_modules", "--recompute-modules", ()),
    ("training.attention", "--attention-backend", ("flash", "math")),
    (_LOSS, "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ("fused",)),
    (_LOSS, "--cross-entropy-loss-fusion", ("megatron-fused",)),
    (_LOSS, "no --cross-entropy-loss-fusion", ("megatron",)),
    ("strategy.distributed_optimizer", "--use-distributed-optimizer", ()),
    ("strategy.overlap_grad_reduce", "--overlap-grad-reduce", ()),
    ("strategy.overlap_param_gather", "--overlap-param-gather", ()),
    ("strategy.grad_reduce_dtype", "--grad-reduce-in-bf16, --accumulate-allreduce-grads-in-fp32", ()),
    ("strategy.average_in_collective", "--ddp-average-in-collective", ()),
    ("strategy.bucket_size", "--ddp-bucket-size", ()),
    ("strategy.optimizer_instances", "--num-distributed-optimizer-instances", ()),
    ("strategy.gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", ()),
    ("strategy.vocabulary_multiple", "--make-vocab-size-divisible-by", ()),
    ("parallelism.tensor", "--tensor-model-parallel-size", ()),
    ("parallelism.sequence_parallel", "--sequence-parallel", ()),
    ("parallelism.async_tensor", "--tp-comm-overlap", ()),
    ("parallelism.overlap_tensor_reduce", "--no-async-tensor-model-parallel-allreduce", ()),
    ("parallelism.pipeline", "--pipeline-model-parallel-size", ()),
    ("parallelism.schedule", "--num-virtual-stages-per-pipeline-rank", ("1f1b", "interleaved-1f1b", None)),
    ("parallelism.virtual_stages", "--num-virtual-stages-per-pipeline-rank", ()),
    ("parallelism.first_stage_less_layers", "--account-for-embedding-in-pipeline-split", (0, 1, None)),
    ("parallelism.last_stage_less_layers", "--account-for-loss-in-pipeline-split", (0, 1, None)),
    ("parallelism.layers_per_stage", "--pipeline-model-parallel-layout", ()),
    ("parallelism.context", "--context-parallel-size", ()),
    ("parallelism.context_method", "--cp-comm-type", ()),
    ("parallelism.order", "--use-tp-pp-dp-mapping", ("tp-cp-dp-pp", "tp-cp-pp-dp", None)),
)
_ACCELERATE_SIZES = _ACCELERATE + "parallelism_config.py"
_ACCELERATE_DEGREES = (
    ConfigMapping("parallelism.tensor", "file", "parallelism_config_tp_size", _ACCELERATE_SIZES,
            kinds=("fsdp2",)),
    ConfigMapping("parallelism.sequence_parallel", "file", "never", _ACCELERATE_SIZES, (False, None),
            ("fsdp2",)),
    ConfigMapping("parallelism.context", "file", "parallelism_config_cp_size", _ACCELERATE_SIZES,
            kinds=("fsdp2",)),
    ConfigMapping("parallelism.context_method", "file", "parallelism_config_cp_comm_strategy",
            _ACCELERATE + "utils/dataclasses.py", ("all-gather", "p2p", None), ("fsdp2",)),
    ConfigMapping("parallelism.context", "file", "parallelism_config_sp_size", _ACCELERATE_SIZES,
            kinds=("deepspeed",)),
)  # fmt: skip

_ZERO = ConfigMapping("strategy.config.*", "file", "in the JSON", _DEEPSPEED + "runtime/zero/config.py")
_SCRIPT_LOSSES = (
    ConfigMapping(_LOSS, "script", _LIGER, _LIGER_SOURCE, ("fused_linear",)),
    ConfigMapping(_LOSS, "script", _LIGER_LOSS, _LIGER_SOURCE, ("fused",)),
)
# DeepSpeed's activation_checkpointing configures deepspeed.checkpointing, which the model itself must call.
_SCRIPT_CHECKPOINTS = tuple(
    ConfigMapping(
        _CHECKPOINTING,
        "script",
        how,
        _DEEPSPEED
        + "runtime/activation_checkpointing/checkpointing.py; "
        + _ACCELERATE
        + "commands/launch.py",
        (value,),
        ("deepspeed", "ddp"),
    )
    for value, how in (("full", _ENABLE), ("none", _NOT_ENABLED))
)
_EVERY_BLOCK = ConfigMapping(
    _EVERY, "file", "every block", "[Note: transformers checkpoints every block]", (1,)
)

CONFIG_MAPPINGS: Mapping[Program, Sequence[ConfigMapping]] = {
    "deepspeed": (
        _ZERO,
        ConfigMapping(_MICRO, "file", "train_micro_batch_size_per_gpu", _DEEPSPEED + "runtime/config.py"),
        ConfigMapping(_STEPS, "file", "gradient_accumulation_steps", _DEEPSPEED + "runtime/config.py"),
        ConfigMapping("parallelism.context", "file", "sequence_parallel_size",
                _DEEPSPEED + "runtime/config.py"),
        ConfigMapping("parallelism.context_method", "file", "always", _DEEPSPEED + "sequence/layer.py",
                ("all-to-all", None)),
        ConfigMapping("parallelism.pipeline", "script", "deepspeed.pipe.PipelineModule(num_stages=...)",
                _DEEPSPEED + "runtime/pipe/module.py"),
        ConfigMapping("parallelism.schedule", "script", "always", _DEEPSPEED + "runtime/pipe/schedule.py",
                ("1f1b", None)),
        ConfigMapping("parallelism.tensor", "script", "a model that splits its layers, with its mpu",
                _DEEPSPEED + "__init__.py"),
        *_SCRIPT_CHECKPOINTS,
        _EVERY_BLOCK,
        ConfigMapping(_LOSS, "script", _LIGER, _LIGER_SOURCE, ("fused_linear",)),
        ConfigMapping(_LOSS, "script",
                "a loss that is one kernel, e.g. deepspeed.runtime.chunked_cross_entropy",
                _DEEPSPEED + "runtime/chunked_cross_entropy.py", ("fused",)),
    ),
    "transformers": (
        _ZERO,
        ConfigMapping(_MICRO, "file", "per_device_train_batch_size", _TRANSFORMERS + "training_args.py"),
        ConfigMapping(_STEPS, "file", "gradient_accumulation_steps", _TRANSFORMERS + "training_args.py"),
        ConfigMapping(_CHECKPOINTING, "file", "gradient_checkpointing", _TRANSFORMERS + "training_args.py",
                ("none", "full")),
        _EVERY_BLOCK,
        ConfigMapping(_LOSS, "file",
                "use_liger_kernel: true, of liger_kernel_config only fused_linear_cross_entropy",
                _TRANSFORMERS + "training_args.py, integrations/liger.py", ("fused_linear",)),
        ConfigMapping(_LOSS, "file", "use_liger_kernel: true, of liger_kernel_config only cross_entropy",
                _TRANSFORMERS + "training_args.py, integrations/liger.py", ("fused",)),
        ConfigMapping(_RESHARD, "file", "fsdp_config.reshard_after_forward",
                _TRANSFORMERS + "training_args.py",
                (True, False)),
        ConfigMapping(_REPLICATE, "file", "no replicas", _TRANSFORMERS + "training_args.py", (1, None)),
        # A ParallelismConfig is an object, which YAML cannot hold.
        ConfigMapping(_REPLICATE, "script", "TrainingArguments(parallelism_config=ParallelismConfig(...))",
                _TRANSFORMERS + "training_args.py", kinds=("fsdp2",)),
        ConfigMapping(_REPLICATE, "script", "a device mesh for FullyShardedDataParallelPlugin",
                _ACCELERATE + "utils/dataclasses.py", kinds=("fsdp1",)),
        ConfigMapping("strategy.sharding_strategy", "file", "fsdp", _TRANSFORMERS + "training_args.py"),
        ConfigMapping(_CPU, "file", "fsdp_config.cpu_offload", _TRANSFORMERS + "training_args.py"),
        ConfigMapping(_NO_SYNC, "file", "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
                _TRANSFORMERS + "trainer_pt_utils.py"),
        ConfigMapping("strategy.backward_prefetch", "file", "fsdp_config.backward_prefetch",
                _TRANSFORMERS + "training_args.py"),
        ConfigMapping("strategy.forward_prefetch", "file", "fsdp_config.forward_prefetch",
                _TRANSFORMERS + "training_args.py"),
        ConfigMapping("strategy.limit_all_gathers", "file", "fsdp_config.limit_all_gathers",
                _TRANSFORMERS + "training_args.py"),
        ConfigMapping("strategy.bucket_cap_mb", "file", "ddp_bucket_cap_mb",
                _TRANSFORMERS + "training_args.py"),
    ),
    "accelerate": (
        _ZERO,
        ConfigMapping(_MICRO, "file", "in the JSON, or the script's DataLoader where that says auto",
                _ACCELERATE + "accelerator.py", kinds=("deepspeed",)),
        ConfigMapping(_STEPS, "file", "gradient_accumulation_steps", _ACCELERATE + "utils/dataclasses.py",
                kinds=("deepspeed",)),
        ConfigMapping(_MICRO, "script", "DataLoader(batch_size=...)", _ACCELERATE + "accelerator.py",
                kinds=_TORCH),
        ConfigMapping(_STEPS, "script", "Accelerator(gradient_accumulation_steps=...)",
                _ACCELERATE + "accelerator.py", kinds=_TORCH),
        ConfigMapping(_CHECKPOINTING, "file", "fsdp_activation_checkpointing",
                _ACCELERATE + "commands/launch.py",
                ("none", "full"), ("fsdp1", "fsdp2")),
        *_SCRIPT_CHECKPOINTS,
        _EVERY_BLOCK,
        *_SCRIPT_LOSSES,
        ConfigMapping(_RESHARD, "file", "fsdp_reshard_after_forward",
                _ACCELERATE + "utils/dataclasses.py: not supported with FSDP2, please set to a bool",
                (True, False)),
        ConfigMapping(_REPLICATE, "file", "parallelism_config_dp_replicate_size",
                _ACCELERATE + "parallelism_config.py", kinds=("fsdp2",)),
        *_ACCELERATE_DEGREES,
        ConfigMapping(_REPLICATE, "file", "no replicas", _ACCELERATE + "utils/dataclasses.py", (1, None)),
        ConfigMapping(_REPLICATE, "script", "a device mesh for FullyShardedDataParallelPlugin",
                _ACCELERATE + "utils/dataclasses.py", kinds=("fsdp1",)),
        ConfigMapping("strategy.sharding_strategy", "file", "fsdp_sharding_strategy",
                _ACCELERATE + "commands/launch.py"),
        ConfigMapping(_CPU, "file", "fsdp_offload_params", _ACCELERATE + "commands/launch.py"),
        ConfigMapping(_NO_SYNC, "script", "GradientAccumulationPlugin(sync_each_batch=...)",
                _ACCELERATE + "utils/dataclasses.py"),
        ConfigMapping("strategy.backward_prefetch", "file", "fsdp_backward_prefetch",
                _ACCELERATE + "commands/launch.py"),
        ConfigMapping("strategy.forward_prefetch", "file", "fsdp_forward_prefetch",
                _ACCELERATE + "commands/launch.py"),
        ConfigMapping("strategy.limit_all_gathers", "script",
                "FullyShardedDataParallelPlugin(limit_all_gathers=...)",
                _ACCELERATE + "utils/dataclasses.py"),
        ConfigMapping("strategy.bucket_cap_mb", "script", "DistributedDataParallelKwargs(bucket_cap_mb=...)",
                _ACCELERATE + "utils/dataclasses.py"),
        ConfigMapping("strategy.gradient_as_bucket_view", "script",
                "DistributedDataParallelKwargs(gradient_as_bucket_view=...)",
                _ACCELERATE + "utils/dataclasses.py"),
    ),
    "megatron": tuple(
        ConfigMapping(key, "file", how, _MEGATRON, values) for key, how, values in _MEGATRON_FLAGS
    ),
    "torchtitan": (
        ConfigMapping(_MICRO, "file", "training.local_batch_size", _TITAN),
        ConfigMapping(_STEPS, "file", "training.global_batch_size", _TITAN),
        ConfigMapping(_CHECKPOINTING, "file", "activation_checkpoint.mode", _TITAN,
                ("none", "full", "selective-op")),
        ConfigMapping(_EVERY, "file", "activation_checkpoint.selective_ac_option", _TITAN),
        ConfigMapping(_LOSS, "file", 'compile.enable with compile.components = ["loss"]',
                "torchtitan 0.2, components/loss.py", ("fused",)),
        ConfigMapping(_RESHARD, "file", "parallelism.fsdp_reshard_after_forward", _TITAN, (True, False)),
        ConfigMapping(_REPLICATE, "file", "parallelism.data_parallel_replicate_degree", _TITAN),
        ConfigMapping(_CPU, "file", "training.enable_cpu_offload", _TITAN),
        ConfigMapping("training.stored_dtype", "file", "training.dtype", _TITAN),
        ConfigMapping(_NO_SYNC, "file", "every micro-batch", "torchtitan 0.2, train.py", (False,)),
        *_torchtitan_degrees(_TITAN_DEGREES),
        ConfigMapping("parallelism.context_method", "file", "context_parallel_rotate_method", _TITAN_DEGREES),
        ConfigMapping("parallelism.sequence_parallel", "file", "always",
                "torchtitan 0.2.2, models/llama3/infra/parallelize.py", (True, None)),
    ),
    "torchtitan-0.3": (
        ConfigMapping(_MICRO, "file", "--training.local_batch_size", _TITAN_3 + "config/configs.py"),
        ConfigMapping(_STEPS, "file", "--training.global_batch_size", _TITAN_3 + "config/configs.py"),
        ConfigMapping(_CHECKPOINTING, "file", "activation-checkpoint:",
                _TITAN_3 + "distributed/activation_checkpoint.py", ("none", "full", "selective-op")),
        ConfigMapping(_EVERY, "file", "every block", _TITAN_3 + "distributed/activation_checkpoint.py", (1,)),
        ConfigMapping(_LOSS, "file", "--compile.enable --compile.components loss",
                _TITAN_3 + "components/loss.py", ("fused",)),
        ConfigMapping(_RESHARD, "file", "--parallelism.fsdp_reshard_after_forward",
                _TITAN_3 + "config/configs.py", (True, False)),
        ConfigMapping(_REPLICATE, "file", "--parallelism.data_parallel_replicate_degree",
                _TITAN_3 + "config/configs.py"),
        ConfigMapping(_CPU, "file", "--training.enable_cpu_offload", _TITAN_3 + "config/configs.py"),
        ConfigMapping("training.stored_dtype", "file", "--training.dtype", _TITAN_3 + "config/configs.py"),
        ConfigMapping(_NO_SYNC, "file", "every micro-batch", _TITAN_3 + "trainer.py", (False,)),
        *_torchtitan_degrees(_TITAN_3 + "config/configs.py"),
        ConfigMapping("parallelism.context_method", "file", "always", _TITAN_3 + "config/configs.py",
                ("all-gather", None)),
        ConfigMapping("parallelism.sequence_parallel", "file", "enable_sequence_parallel",
                _TITAN_3 + "config/configs.py"),
    ),
}  # fmt: skip

# Experiments without a program: settings that no file written by zsim holds. All others are in a file.
ZSIM_MAPPINGS: Sequence[ConfigMapping] = (
    ConfigMapping(_CHECKPOINTING, "script", "recompute the core of attention alone",
            "torch 2.13, utils/checkpoint.py", ("selective",)),
    ConfigMapping(_CHECKPOINTING, "script", "torch.utils.checkpoint.create_selective_checkpoint_contexts",
            "torch 2.13, utils/checkpoint.py", ("selective-op",)),
    *_SCRIPT_CHECKPOINTS,
    ConfigMapping(_EVERY, "file", "every block", "torch 2.13, utils/checkpoint.py", (1,)),
    ConfigMapping(_EVERY, "script", "torch.utils.checkpoint around every n-th block",
            "torch 2.13, utils/checkpoint.py"),
    *_SCRIPT_LOSSES,
)  # fmt: skip
_ZSIM_FILE = ConfigMapping("*", "file", "", "zsim export")


def program_of(program: Program | None, kind: str) -> Program | None:
    """`program` if it supports the strategy. Megatron's own strategy always has Megatron, since nothing else
    runs it. Else None.
    """
    if program is None and kind == "megatron":
        return "megatron"
    return program if program is not None and kind in KINDS[program] else None


def find_config_mapping(program: Program | None, kind: str, key: str, value: Any) -> ConfigMapping | None:
    """How a program is configured with a value of a dotted key. None if it cannot be. An empty table sets
    nothing.
    """
    if isinstance(value, Mapping) and not value:
        return _ZSIM_FILE
    program = program_of(program, kind)
    rows = ZSIM_MAPPINGS if program is None else CONFIG_MAPPINGS[program]
    mapping = next((row for row in rows if row.matches(kind, key, value)), None)
    return _ZSIM_FILE if mapping is None and program is None else mapping
