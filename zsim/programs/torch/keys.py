"""The settings of a training script of one's own, which no file says."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.formats.program import ConfigMapping

LIGER = "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss for head and loss"
LIGER_SOURCE = "linkedin/Liger-Kernel 0.8, transformers/__init__.py"
_LIGER_LOSS = "a loss that is one kernel, e.g. liger_kernel.transformers.LigerCrossEntropyLoss"
SCRIPT_LOSSES = (
    ConfigMapping("training.cross_entropy", "script", LIGER, LIGER_SOURCE, ("fused_linear",)),
    ConfigMapping("training.cross_entropy", "script", _LIGER_LOSS, LIGER_SOURCE, ("fused",)),
)
# DeepSpeed's activation_checkpointing configures deepspeed.checkpointing, which the model itself must call.
SCRIPT_CHECKPOINTS = tuple(
    ConfigMapping(
        "training.activation_checkpointing",
        "script",
        instruction,
        "DeepSpeed 0.19.8, runtime/activation_checkpointing/checkpointing.py; "
        "accelerate 1.15.0, commands/launch.py",
        (value,),
        ("deepspeed", "ddp"),
    )
    for value, instruction in (
        ("full", "model.gradient_checkpointing_enable()"),
        ("none", "no model.gradient_checkpointing_enable()"),
    )
)

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    ConfigMapping(
        "training.activation_checkpointing",
        "script",
        "recompute the core of attention alone",
        "torch 2.13, utils/checkpoint.py",
        ("selective",),
    ),
    ConfigMapping(
        "training.activation_checkpointing",
        "script",
        "torch.utils.checkpoint.create_selective_checkpoint_contexts",
        "torch 2.13, utils/checkpoint.py",
        ("selective-op",),
    ),
    *SCRIPT_CHECKPOINTS,
    ConfigMapping(
        "training.checkpoint_every", "file", "every block", "torch 2.13, utils/checkpoint.py", (1,)
    ),
    ConfigMapping(
        "training.checkpoint_every",
        "script",
        "torch.utils.checkpoint around every n-th block",
        "torch 2.13, utils/checkpoint.py",
    ),
    *SCRIPT_LOSSES,
)
