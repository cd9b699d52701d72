"""The settings that a DeepSpeed JSON says, and the script that is started with it.

# [Note: transformers checkpoints every block]
`activation_checkpointing_kwargs.every_n_layers` is in transformers 5.23 (training_args.py) and not in earlier
releases. A file does not say which release reads it, so the table has no row for every n-th block.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.programs.torch.keys import LIGER, LIGER_SOURCE, SCRIPT_CHECKPOINTS
from zsim.specs.formats.program import ConfigMapping

_DEEPSPEED = "DeepSpeed 0.19.8, "
EVERY_BLOCK = ConfigMapping(
    "training.checkpoint_every", "file", "every block", "[Note: transformers checkpoints every block]", (1,)
)
JSON_KEYS = ConfigMapping("strategy.config.*", "file", "in the JSON", _DEEPSPEED + "runtime/zero/config.py")

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    ConfigMapping(
        "training.micro_batch_size",
        "file",
        "train_micro_batch_size_per_gpu",
        _DEEPSPEED + "runtime/config.py",
    ),
    ConfigMapping(
        "training.gradient_accumulation_steps",
        "file",
        "gradient_accumulation_steps",
        _DEEPSPEED + "runtime/config.py",
    ),
    ConfigMapping("parallelism.context", "file", "sequence_parallel_size", _DEEPSPEED + "runtime/config.py"),
    ConfigMapping(
        "parallelism.context_method", "file", "always", _DEEPSPEED + "sequence/layer.py", ("all-to-all", None)
    ),
    ConfigMapping(
        "parallelism.pipeline",
        "script",
        "deepspeed.pipe.PipelineModule(num_stages=...)",
        _DEEPSPEED + "runtime/pipe/module.py",
    ),
    ConfigMapping(
        "parallelism.schedule", "script", "always", _DEEPSPEED + "runtime/pipe/schedule.py", ("1f1b", None)
    ),
    ConfigMapping(
        "parallelism.tensor",
        "script",
        "a model that splits its layers, with its mpu",
        _DEEPSPEED + "__init__.py",
    ),
    *SCRIPT_CHECKPOINTS,
    EVERY_BLOCK,
    ConfigMapping(
        "training.compile", "script", "block.compile() of every block", _DEEPSPEED + "runtime/engine.py"
    ),
    ConfigMapping("training.cross_entropy", "script", LIGER, LIGER_SOURCE, ("fused_linear",)),
    ConfigMapping(
        "training.cross_entropy",
        "script",
        "a loss that is one kernel, e.g. deepspeed.runtime.chunked_cross_entropy",
        _DEEPSPEED + "runtime/chunked_cross_entropy.py",
        ("fused",),
    ),
)
