"""The settings that an Accelerate YAML says, and those of the script that it launches."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.programs.torch.keys import SCRIPT_CHECKPOINTS, SCRIPT_LOSSES
from zsim.specs.formats.program import ConfigMapping

_ACCELERATE = "accelerate 1.15.0, "
_ACCELERATE_SIZES = _ACCELERATE + "parallelism_config.py"
_ACCELERATE_DEGREES = (
    ConfigMapping(
        "parallelism.tensor", "file", "parallelism_config_tp_size", _ACCELERATE_SIZES, kinds=("fsdp2",)
    ),
    ConfigMapping(
        "parallelism.sequence_parallel", "file", "never", _ACCELERATE_SIZES, (False, None), ("fsdp2",)
    ),
    ConfigMapping(
        "parallelism.context", "file", "parallelism_config_cp_size", _ACCELERATE_SIZES, kinds=("fsdp2",)
    ),
    ConfigMapping(
        "parallelism.context_method",
        "file",
        "parallelism_config_cp_comm_strategy",
        _ACCELERATE + "utils/dataclasses.py",
        ("all-gather", "p2p", None),
        ("fsdp2",),
    ),
    ConfigMapping(
        "parallelism.context", "file", "parallelism_config_sp_size", _ACCELERATE_SIZES, kinds=("deepspeed",)
    ),
)

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    ConfigMapping(
        "training.micro_batch_size",
        "file",
        "in the JSON, or the script's DataLoader where that says auto",
        _ACCELERATE + "accelerator.py",
        kinds=("deepspeed",),
    ),
    ConfigMapping(
        "training.gradient_accumulation_steps",
        "file",
        "gradient_accumulation_steps",
        _ACCELERATE + "utils/dataclasses.py",
        kinds=("deepspeed",),
    ),
    ConfigMapping(
        "training.micro_batch_size",
        "script",
        "DataLoader(batch_size=...)",
        _ACCELERATE + "accelerator.py",
        kinds=("fsdp1", "fsdp2", "ddp"),
    ),
    ConfigMapping(
        "training.gradient_accumulation_steps",
        "script",
        "Accelerator(gradient_accumulation_steps=...)",
        _ACCELERATE + "accelerator.py",
        kinds=("fsdp1", "fsdp2", "ddp"),
    ),
    ConfigMapping(
        "training.activation_checkpointing",
        "file",
        "fsdp_activation_checkpointing",
        _ACCELERATE + "commands/launch.py",
        ("none", "full"),
        ("fsdp1", "fsdp2"),
    ),
    *SCRIPT_CHECKPOINTS,
    EVERY_BLOCK,
    *SCRIPT_LOSSES,
    ConfigMapping(
        "strategy.reshard_after_forward",
        "file",
        "fsdp_reshard_after_forward",
        _ACCELERATE + "utils/dataclasses.py: not supported with FSDP2, please set to a bool",
        (True, False),
    ),
    ConfigMapping(
        "strategy.replicate",
        "file",
        "parallelism_config_dp_replicate_size",
        _ACCELERATE + "parallelism_config.py",
        kinds=("fsdp2",),
    ),
    *_ACCELERATE_DEGREES,
    ConfigMapping(
        "strategy.replicate", "file", "no replicas", _ACCELERATE + "utils/dataclasses.py", (1, None)
    ),
    ConfigMapping(
        "strategy.replicate",
        "script",
        "a device mesh for FullyShardedDataParallelPlugin",
        _ACCELERATE + "utils/dataclasses.py",
        kinds=("fsdp1",),
    ),
    ConfigMapping(
        "strategy.sharding_strategy", "file", "fsdp_sharding_strategy", _ACCELERATE + "commands/launch.py"
    ),
    ConfigMapping("strategy.cpu_offload", "file", "fsdp_offload_params", _ACCELERATE + "commands/launch.py"),
    ConfigMapping(
        "strategy.no_sync",
        "script",
        "GradientAccumulationPlugin(sync_each_batch=...)",
        _ACCELERATE + "utils/dataclasses.py",
    ),
    ConfigMapping(
        "strategy.backward_prefetch", "file", "fsdp_backward_prefetch", _ACCELERATE + "commands/launch.py"
    ),
    ConfigMapping(
        "strategy.forward_prefetch", "file", "fsdp_forward_prefetch", _ACCELERATE + "commands/launch.py"
    ),
    ConfigMapping(
        "strategy.limit_all_gathers",
        "script",
        "FullyShardedDataParallelPlugin(limit_all_gathers=...)",
        _ACCELERATE + "utils/dataclasses.py",
    ),
    ConfigMapping(
        "strategy.bucket_cap_mb",
        "script",
        "DistributedDataParallelKwargs(bucket_cap_mb=...)",
        _ACCELERATE + "utils/dataclasses.py",
    ),
    ConfigMapping(
        "strategy.gradient_as_bucket_view",
        "script",
        "DistributedDataParallelKwargs(gradient_as_bucket_view=...)",
        _ACCELERATE + "utils/dataclasses.py",
    ),
)
