"""The settings of a training script of one's own, which no file says."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.formats.program import ConfigMapping, mappings

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
    *mappings(
        "torch 2.13",
        ("training.activation_checkpointing", "script", "recompute the core of attention alone",
         "utils/checkpoint.py", ("selective",)),
        ("training.activation_checkpointing", "script",
         "torch.utils.checkpoint.create_selective_checkpoint_contexts", "utils/checkpoint.py",
         ("selective-op",)),
        ("training.checkpoint_every", "file", "every block", "utils/checkpoint.py", (1,)),
        ("training.checkpoint_every", "script", "torch.utils.checkpoint around every n-th block",
         "utils/checkpoint.py"),
    ),
    *SCRIPT_CHECKPOINTS,
    *SCRIPT_LOSSES,
)  # fmt: skip
