"""The Hugging Face Trainer and its TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

_MARKS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_checkpointing", "num_train_epochs",
    "lr_scheduler_type", "max_grad_norm",
)  # fmt: skip
_ACCELERATE_MARK = "distributed_type"


class TransformersTrainer(ValuesProgram):
    name = "transformers"
    title = "the Trainer"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 20
    suffixes = (*YAML_SUFFIXES, ".json")
    release = "transformers 5.23"
    recognised_by = "TrainingArguments at the top (per_device_train_batch_size, gradient_checkpointing, ...)"

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a file has keys of TrainingArguments at the top level."""
        if source.suffix not in self.suffixes:
            return False
        data = source.content
        if not isinstance(data, Mapping) or _ACCELERATE_MARK in data:
            return False
        return any(mark in data for mark in _MARKS)


PROGRAM = TransformersTrainer()
