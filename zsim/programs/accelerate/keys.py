"""The keys of an Accelerate YAML, the settings that they say, and those of the script that it launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.programs.torch.keys import SCRIPT_CHECKPOINTS, SCRIPT_LOSSES
from zsim.programs.torchtitan.keys import ROTATE_METHODS
from zsim.specs.formats.program import ConfigMapping, mappings
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_RELEASE, _CLASSES = "accelerate 1.15.0", "utils/dataclasses.py"
_LAUNCH, _DATACLASSES = f"{_RELEASE}, commands/launch.py", f"{_RELEASE}, {_CLASSES}"
_SIZES = f"{_RELEASE}, parallelism_config.py"
_TORCH = ("fsdp1", "fsdp2", "ddp")
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PARALLELISM = "parallelism_config_"

_TOP_KEYS = (
    ProgramKey("distributed_type", str, "the engine: DeepSpeed, FSDP, Megatron-LM or DDP", "strategy.kind"),
    ProgramKey("mixed_precision", str, "the type of products", "training.precision"),
    ProgramKey("num_machines", int, "nodes", "nodes"),
    ProgramKey("num_processes", int, "GPUs of all nodes", "gpus"),
    ProgramKey("deepspeed_config", dict, "DeepSpeed's JSON, or ZeRO's stage and offloading"),
    ProgramKey("fsdp_config", dict, "FSDP1 or FSDP2"),
    ProgramKey("fp8_config", dict, "the library of fp8"),
    ProgramKey("parallelism_config", dict, "degrees of parallelism, with FSDP2 or Ulysses"),
    ProgramKey(
        "dynamo_config",
        dict,
        "torch.compile",
        "training.compile",
        tuned=(True, False),
        instruction="dynamo_config.dynamo_backend: INDUCTOR, or none",
        source=_DATACLASSES,
    ),
    ProgramKey("dynamo_backend", str, "the same, in older files", "training.compile"),
    ProgramKey("megatron_lm_config", dict, "Megatron-LM"),
    ProgramKey("fp16", bool, "the type of products, in older files", "training.precision"),
)
_FSDP_KEYS = (
    ProgramKey("fsdp_version", (str, int), "FSDP1 or FSDP2", "strategy.kind"),
    ProgramKey(
        "fsdp_sharding_strategy", str, "what FSDP1 shards", "strategy.sharding_strategy", is_plain=True,
        values={word: word.replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2") for word in SHARDING},
        default="FULL_SHARD", is_default_stated=True, tuned=(), source=_LAUNCH,
    ),
    ProgramKey(
        "fsdp_reshard_after_forward", bool, "whether FSDP2 frees a unit between forward and backward",
        "strategy.reshard_after_forward", is_plain=True, default=True, tuned=(True, False),
        source=_DATACLASSES + ": not supported with FSDP2, please set to a bool",
    ),
    ProgramKey(
        "fsdp_backward_prefetch", str, "when FSDP1 gathers the next unit in backward",
        "strategy.backward_prefetch", is_plain=True,
        values={"BACKWARD_PRE": "BACKWARD_PRE", "BACKWARD_POST": "BACKWARD_POST", "NO_PREFETCH": "none"},
        default="NO_PREFETCH", tuned=(), source=_LAUNCH,
    ),
    ProgramKey(
        "fsdp_forward_prefetch", bool, "whether FSDP1 gathers the next unit before it computes this one",
        "strategy.forward_prefetch", is_plain=True, tuned=(), source=_LAUNCH,
    ),
    ProgramKey("fsdp_auto_wrap_policy", str, "what a unit is", "strategy.wrapping"),
    ProgramKey("fsdp_min_num_params", int, "elements of a unit, wrapped by size", "strategy.wrapping"),
    ProgramKey(
        "fsdp_offload_params", bool, "whether states are on the host between uses", "strategy.cpu_offload",
        is_plain=True, values={True: True, False: None}, tuned=(), source=_LAUNCH,
    ),
    ProgramKey(
        "fsdp_activation_checkpointing", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_LAUNCH, kinds=("fsdp1", "fsdp2"),
    ),
    ProgramKey("fsdp_activation_checkpointing_offload", bool, "whether checkpoints are on the host"),
    ProgramKey(
        "fsdp_limit_all_gathers", bool, "whether the host waits so that two gathered units exist at most",
        "strategy.limit_all_gathers", is_plain=True,
    ),
    ProgramKey("fsdp_ignored_modules", str, "modules that are not sharded"),
)  # fmt: skip
_SIZE_KEYS = (
    ProgramKey(
        PARALLELISM + "dp_replicate_size", int, "replicas of the sharded model", "strategy.replicate",
        tuned=(), source=_SIZES, kinds=("fsdp2",),
    ),
    ProgramKey(PARALLELISM + "dp_shard_size", int, "ranks that shard it"),
    *declare(
        (PARALLELISM + "tp_size", int, "ranks that share a layer's products", "parallelism.tensor"),
        (PARALLELISM + "cp_size", int, "ranks that share a sequence", "parallelism.context"),
        tuned=(), source=_SIZES, kinds=("fsdp2",),
    ),
    ProgramKey(
        PARALLELISM + "cp_comm_strategy", str, "how they see the keys and values of others",
        "parallelism.context_method", values=ROTATE_METHODS, tuned=("all-gather", "p2p", None),
        source=_DATACLASSES, kinds=("fsdp2",),
    ),
    ProgramKey(
        PARALLELISM + "sp_size", int, "ranks that share a sequence, with DeepSpeed's Ulysses",
        "parallelism.context", tuned=(), source=_SIZES, kinds=("deepspeed",),
    ),
)  # fmt: skip
TOP_KEYS = tuple(key.key for key in _TOP_KEYS)
FSDP_KEYS = tuple(key.key for key in _FSDP_KEYS)
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in (*_TOP_KEYS, *_FSDP_KEYS, *_SIZE_KEYS)}

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    *tuned_mappings(KEYS.values()),
    *mappings(
        _RELEASE,
        ("training.micro_batch_size", "file", "in the JSON, or the script's DataLoader where that says auto",
         "accelerator.py", (), ("deepspeed",)),
        ("training.gradient_accumulation_steps", "file", "gradient_accumulation_steps", _CLASSES, (),
         ("deepspeed",)),
        ("training.micro_batch_size", "script", "DataLoader(batch_size=...)", "accelerator.py", (), _TORCH),
        ("training.gradient_accumulation_steps", "script", "Accelerator(gradient_accumulation_steps=...)",
         "accelerator.py", (), _TORCH),
    ),
    *SCRIPT_CHECKPOINTS,
    EVERY_BLOCK,
    *SCRIPT_LOSSES,
    *mappings(
        _RELEASE,
        ("parallelism.sequence_parallel", "file", "never", "parallelism_config.py", (False, None),
         ("fsdp2",)),
        ("strategy.replicate", "file", "no replicas", _CLASSES, (1, None)),
        ("strategy.replicate", "script", "a device mesh for FullyShardedDataParallelPlugin", _CLASSES, (),
         ("fsdp1",)),
        ("strategy.no_sync", "script", "GradientAccumulationPlugin(sync_each_batch=...)", _CLASSES),
        ("strategy.limit_all_gathers", "script", "FullyShardedDataParallelPlugin(limit_all_gathers=...)",
         _CLASSES),
        ("strategy.bucket_cap_mb", "script", "DistributedDataParallelKwargs(bucket_cap_mb=...)", _CLASSES),
        ("strategy.gradient_as_bucket_view", "script",
         "DistributedDataParallelKwargs(gradient_as_bucket_view=...)", _CLASSES),
    ),
)  # fmt: skip
