"""The settings that a file of TrainingArguments says, and those of its script."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.specs.formats.program import ConfigMapping

_ACCELERATE = "accelerate 1.15.0, "
_TRANSFORMERS = "transformers 5.23.0, "

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    ConfigMapping(
        "training.micro_batch_size", "file", "per_device_train_batch_size", _TRANSFORMERS + "training_args.py"
    ),
    ConfigMapping(
        "training.gradient_accumulation_steps",
        "file",
        "gradient_accumulation_steps",
        _TRANSFORMERS + "training_args.py",
    ),
    ConfigMapping(
        "training.activation_checkpointing",
        "file",
        "gradient_checkpointing",
        _TRANSFORMERS + "training_args.py",
        ("none", "full"),
    ),
    EVERY_BLOCK,
    ConfigMapping(
        "training.cross_entropy",
        "file",
        "use_liger_kernel: true, of liger_kernel_config only fused_linear_cross_entropy",
        _TRANSFORMERS + "training_args.py, integrations/liger.py",
        ("fused_linear",),
    ),
    ConfigMapping(
        "training.cross_entropy",
        "file",
        "use_liger_kernel: true, of liger_kernel_config only cross_entropy",
        _TRANSFORMERS + "training_args.py, integrations/liger.py",
        ("fused",),
    ),
    ConfigMapping(
        "strategy.reshard_after_forward",
        "file",
        "fsdp_config.reshard_after_forward",
        _TRANSFORMERS + "training_args.py",
        (True, False),
    ),
    ConfigMapping("strategy.replicate", "file", "no replicas", _TRANSFORMERS + "training_args.py", (1, None)),
    # A ParallelismConfig is an object, which YAML cannot hold.
    ConfigMapping(
        "strategy.replicate",
        "script",
        "TrainingArguments(parallelism_config=ParallelismConfig(...))",
        _TRANSFORMERS + "training_args.py",
        kinds=("fsdp2",),
    ),
    ConfigMapping(
        "strategy.replicate",
        "script",
        "a device mesh for FullyShardedDataParallelPlugin",
        _ACCELERATE + "utils/dataclasses.py",
        kinds=("fsdp1",),
    ),
    ConfigMapping("strategy.sharding_strategy", "file", "fsdp", _TRANSFORMERS + "training_args.py"),
    ConfigMapping(
        "strategy.cpu_offload", "file", "fsdp_config.cpu_offload", _TRANSFORMERS + "training_args.py"
    ),
    ConfigMapping(
        "strategy.no_sync",
        "file",
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        _TRANSFORMERS + "trainer_pt_utils.py",
    ),
    ConfigMapping(
        "strategy.backward_prefetch",
        "file",
        "fsdp_config.backward_prefetch",
        _TRANSFORMERS + "training_args.py",
    ),
    ConfigMapping(
        "strategy.forward_prefetch",
        "file",
        "fsdp_config.forward_prefetch",
        _TRANSFORMERS + "training_args.py",
    ),
    ConfigMapping(
        "strategy.limit_all_gathers",
        "file",
        "fsdp_config.limit_all_gathers",
        _TRANSFORMERS + "training_args.py",
    ),
    ConfigMapping("strategy.bucket_cap_mb", "file", "ddp_bucket_cap_mb", _TRANSFORMERS + "training_args.py"),
)
