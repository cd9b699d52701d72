"""The settings that a DeepSpeed JSON says, and the script that is started with it.

# [Note: transformers checkpoints every block]
`activation_checkpointing_kwargs.every_n_layers` is in transformers 5.23 (training_args.py) and not in earlier
releases. A file does not say which release reads it, so the table has no row for every n-th block.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.programs.torch.keys import LIGER, LIGER_SOURCE, SCRIPT_CHECKPOINTS
from zsim.specs.formats.program import ConfigMapping, mappings

_RELEASE, _CONFIG = "DeepSpeed 0.19.8", "runtime/config.py"
EVERY_BLOCK = ConfigMapping(
    "training.checkpoint_every", "file", "every block", "[Note: transformers checkpoints every block]", (1,)
)
JSON_KEYS = ConfigMapping("strategy.config.*", "file", "in the JSON", f"{_RELEASE}, runtime/zero/config.py")
_CHUNKED = "a loss that is one kernel, e.g. deepspeed.runtime.chunked_cross_entropy"

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    *mappings(
        _RELEASE,
        ("training.micro_batch_size", "file", "train_micro_batch_size_per_gpu", _CONFIG),
        ("training.gradient_accumulation_steps", "file", "gradient_accumulation_steps", _CONFIG),
        ("parallelism.context", "file", "sequence_parallel_size", _CONFIG),
        ("parallelism.context_method", "file", "always", "sequence/layer.py", ("all-to-all", None)),
        ("parallelism.pipeline", "script", "deepspeed.pipe.PipelineModule(num_stages=...)",
         "runtime/pipe/module.py"),
        ("parallelism.schedule", "script", "always", "runtime/pipe/schedule.py", ("1f1b", None)),
        ("parallelism.tensor", "script", "a model that splits its layers, with its mpu", "__init__.py"),
        ("training.compile", "script", "block.compile() of every block", "runtime/engine.py"),
        ("training.cross_entropy", "script", _CHUNKED, "runtime/chunked_cross_entropy.py", ("fused",)),
    ),
    *SCRIPT_CHECKPOINTS,
    EVERY_BLOCK,
    ConfigMapping("training.cross_entropy", "script", LIGER, LIGER_SOURCE, ("fused_linear",)),
)  # fmt: skip
