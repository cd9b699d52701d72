"""The keys of TrainingArguments, the settings that they say, and those of its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, tuned_mappings

_TRANSFORMERS = "transformers 5.23.0, "
_ARGUMENTS = _TRANSFORMERS + "training_args.py"
_LIGER = _TRANSFORMERS + "training_args.py, integrations/liger.py"

LENGTH_KEYS = (
    ProgramKey("max_length", int, "tokens of a sequence, of TRL", "training.sequence_length"),
    ProgramKey("max_seq_length", int, "tokens of a sequence, of older TRL", "training.sequence_length"),
    ProgramKey("cutoff_len", int, "tokens of a sequence, of LLaMA-Factory", "training.sequence_length"),
)
# Keys at the top of the file that a step depends on.
_TOP_KEYS = (
    ProgramKey(
        "per_device_train_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
        is_plain=True, default=8, tuned=(), source=_ARGUMENTS,
    ),
    ProgramKey(
        "gradient_accumulation_steps", int, "micro-batches of a step",
        "training.gradient_accumulation_steps", is_plain=True, default=1, tuned=(), source=_ARGUMENTS,
    ),
    ProgramKey(
        "max_grad_norm", float, "norm that gradients are clipped to", "training.gradient_clipping",
        is_plain=True, default=1.0,
    ),
    ProgramKey("bf16", bool, "whether products are in bf16", "training.precision"),
    ProgramKey("fp16", bool, "whether products are in fp16", "training.precision"),
    ProgramKey(
        "optim", str, "the optimizer and its kernels", "training.optimizer_implementation", is_plain=True,
        values={"adamw_torch_fused": "fused", "adamw_torch": "foreach"}, default="adamw_torch_fused",
    ),
    ProgramKey(
        "gradient_checkpointing", bool, "whether backward computes every block again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_ARGUMENTS,
    ),
    ProgramKey(
        "gradient_checkpointing_kwargs", dict,
        "its options, of which offload keeps the inputs of blocks in host memory", source=_ARGUMENTS,
    ),
    ProgramKey(
        "activation_checkpointing", bool, "the same", "training.activation_checkpointing", is_plain=True,
        values={True: "full", False: None},
    ),
    ProgramKey(
        "torch_compile", bool, "whether torch.compile is used", "training.compile", is_plain=True,
        values={True: True, False: None},
    ),
    ProgramKey(
        "use_liger_kernel", bool, "whether Liger's kernels are used", "training.liger", is_plain=True,
        values={True: True, False: None},
    ),
    ProgramKey("deepspeed", (str, dict), "DeepSpeed's JSON, or its content", "strategy.config"),
    ProgramKey(
        "fsdp", (str, list), "what FSDP shards, in words", "strategy.sharding_strategy", tuned=(),
        source=_ARGUMENTS,
    ),
    ProgramKey("fsdp_config", (str, dict), "Accelerate's keys of FSDP, or a file with them"),
    ProgramKey(
        "ddp_bucket_cap_mb", float, "MiB of gradients in a bucket of DDP", "strategy.bucket_cap_mb",
        is_plain=True, tuned=(), source=_ARGUMENTS,
    ),
    *LENGTH_KEYS,
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _TOP_KEYS}

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    *tuned_mappings(KEYS.values()),
    EVERY_BLOCK,
    ConfigMapping(
        "training.cross_entropy", "file",
        "use_liger_kernel: true, of liger_kernel_config only fused_linear_cross_entropy", _LIGER,
        ("fused_linear",),
    ),
    ConfigMapping(
        "training.cross_entropy", "file", "use_liger_kernel: true, of liger_kernel_config only cross_entropy",
        _LIGER, ("fused",),
    ),
    ConfigMapping(
        "strategy.reshard_after_forward", "file", "fsdp_config.reshard_after_forward", _ARGUMENTS,
        (True, False),
    ),
    ConfigMapping("strategy.replicate", "file", "no replicas", _ARGUMENTS, (1, None)),
    # A ParallelismConfig is an object, which YAML cannot hold.
    ConfigMapping(
        "strategy.replicate", "script", "TrainingArguments(parallelism_config=ParallelismConfig(...))",
        _ARGUMENTS, kinds=("fsdp2",),
    ),
    ConfigMapping(
        "strategy.replicate", "script", "a device mesh for FullyShardedDataParallelPlugin",
        "accelerate 1.15.0, utils/dataclasses.py", kinds=("fsdp1",),
    ),
    ConfigMapping(
        "strategy.no_sync", "file", "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        _TRANSFORMERS + "trainer_pt_utils.py",
    ),
    *(
        ConfigMapping(f"strategy.{key}", "file", f"fsdp_config.{key}", _ARGUMENTS)
        for key in ("cpu_offload", "backward_prefetch", "forward_prefetch", "limit_all_gathers")
    ),
)  # fmt: skip
