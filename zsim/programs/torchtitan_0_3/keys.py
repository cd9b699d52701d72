"""The settings that torchtitan's command line says from 0.3 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.programs.torchtitan.keys import DEGREES
from zsim.specs.formats.program import ConfigMapping, mappings

_RELEASE, _CONFIGS = "torchtitan 0.3.0", "config/configs.py"
_CHECKPOINTS = "distributed/activation_checkpoint.py"

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    *mappings(
        _RELEASE,
        ("training.micro_batch_size", "file", "--training.local_batch_size", _CONFIGS),
        ("training.gradient_accumulation_steps", "file", "--training.global_batch_size", _CONFIGS),
        ("training.activation_checkpointing", "file", "activation-checkpoint:", _CHECKPOINTS,
         ("none", "full", "selective-op")),
        ("training.checkpoint_every", "file", "every block", _CHECKPOINTS, (1,)),
        ("training.cross_entropy", "file", "--compile.enable --compile.components loss",
         "components/loss.py", ("torchtitan-chunked-fused",)),
        ("strategy.reshard_after_forward", "file", "--parallelism.fsdp_reshard_after_forward", _CONFIGS,
         (True, False)),
        ("strategy.replicate", "file", "--parallelism.data_parallel_replicate_degree", _CONFIGS),
        ("strategy.cpu_offload", "file", "--training.enable_cpu_offload", _CONFIGS),
        ("training.stored_dtype", "file", "--training.dtype", _CONFIGS),
        ("strategy.no_sync", "file", "every micro-batch", "trainer.py", (False,)),
        ("parallelism.context_method", "file", "always", _CONFIGS, ("all-gather", None)),
        ("parallelism.sequence_parallel", "file", "enable_sequence_parallel", _CONFIGS),
    ),
    *(replace(row, source=f"{_RELEASE}, {_CONFIGS}") for row in DEGREES),
)  # fmt: skip
