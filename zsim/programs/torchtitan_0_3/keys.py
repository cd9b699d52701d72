"""The settings that torchtitan's command line says from 0.3 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.programs.torchtitan.keys import DEGREES
from zsim.specs.formats.program import ConfigMapping

_TITAN_3 = "torchtitan 0.3.0, "

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    ConfigMapping(
        "training.micro_batch_size", "file", "--training.local_batch_size", _TITAN_3 + "config/configs.py"
    ),
    ConfigMapping(
        "training.gradient_accumulation_steps",
        "file",
        "--training.global_batch_size",
        _TITAN_3 + "config/configs.py",
    ),
    ConfigMapping(
        "training.activation_checkpointing",
        "file",
        "activation-checkpoint:",
        _TITAN_3 + "distributed/activation_checkpoint.py",
        ("none", "full", "selective-op"),
    ),
    ConfigMapping(
        "training.checkpoint_every",
        "file",
        "every block",
        _TITAN_3 + "distributed/activation_checkpoint.py",
        (1,),
    ),
    ConfigMapping(
        "training.cross_entropy",
        "file",
        "--compile.enable --compile.components loss",
        _TITAN_3 + "components/loss.py",
        ("torchtitan-chunked-fused",),
    ),
    ConfigMapping(
        "strategy.reshard_after_forward",
        "file",
        "--parallelism.fsdp_reshard_after_forward",
        _TITAN_3 + "config/configs.py",
        (True, False),
    ),
    ConfigMapping(
        "strategy.replicate",
        "file",
        "--parallelism.data_parallel_replicate_degree",
        _TITAN_3 + "config/configs.py",
    ),
    ConfigMapping(
        "strategy.cpu_offload", "file", "--training.enable_cpu_offload", _TITAN_3 + "config/configs.py"
    ),
    ConfigMapping("training.stored_dtype", "file", "--training.dtype", _TITAN_3 + "config/configs.py"),
    ConfigMapping("strategy.no_sync", "file", "every micro-batch", _TITAN_3 + "trainer.py", (False,)),
    *(replace(row, source=_TITAN_3 + "config/configs.py") for row in DEGREES),
    ConfigMapping(
        "parallelism.context_method", "file", "always", _TITAN_3 + "config/configs.py", ("all-gather", None)
    ),
    ConfigMapping(
        "parallelism.sequence_parallel", "file", "enable_sequence_parallel", _TITAN_3 + "config/configs.py"
    ),
)
