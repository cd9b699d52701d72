"""Hugging Face's TrainingArguments as a YAML or JSON (transformers 5.23: training_args.py) -> an experiment.

Programs on top of the Trainer whose files have keys of their own have folders of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.programs.huggingface.arguments import SILENT_ARGUMENTS
from zsim.programs.huggingface.job import (
    precision_of,
    read_attention,
    read_batch,
    read_checkpointing,
    read_liger,
    read_synchronisation,
    refuse_other_jobs,
    write_release,
)
from zsim.programs.huggingface.models import read_model, weights_type, write_types
from zsim.programs.huggingface.optimizers import read_optimizer
from zsim.programs.huggingface.strategies import read_strategy
from zsim.programs.trainer.keys import KEYS, LENGTHS
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in TrainingArguments by key, of a file or a command line called `name`."""
    file = TrainingFile(name, program="transformers")
    values = FileValues(file, data, KEYS, SILENT_ARGUMENTS, "the Trainer")
    refuse_other_jobs(values)
    read_model(values, "model_name_or_path", is_quantised=False)
    read_batch(values)
    file.settings["training.precision"] = precision_of(values)
    read_checkpointing(values)
    values.read("activation_checkpointing", "torch_compile")
    read_liger(values)
    if key := next((name for name in LENGTHS if values.has(name)), None):
        file.settings["training.sequence_length"] = values.count(key)
    elif values.has("model_name_or_path"):
        file.note("no key says how long sequences are: training.sequence_length does")
    read_strategy(values)
    read_optimizer(values, "optim")
    read_synchronisation(values)
    read_attention(values, "attn_implementation")
    write_types(
        values.file, precision_of(values), weights_type(values, "dtype", "torch_dtype"), has_adapters=False
    )
    write_release(values, "torch_dtype")
    values.finish("transformers 5.23")
    return file
