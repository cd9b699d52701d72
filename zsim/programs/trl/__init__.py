"""TRL, whose scripts take TrainingArguments, a ModelConfig and a trainer's own keys in one YAML.

The alignment handbook's recipes are such files.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

# Keys that no other program on top of the Trainer has.
_MARKS = (
    "use_peft", "max_length", "max_seq_length", "max_prompt_length", "max_completion_length", "packing",
    "dataset_text_field", "dataset_mixture", "dataset_mixer", "num_generations", "loss_type", "beta",
    "lora_target_modules", "bnb_4bit_quant_type", "use_bnb_nested_quant", "assistant_only_loss",
    "completion_only_loss", "desirable_weight", "center_rewards_coefficient", "reward_funcs",
)  # fmt: skip
_TRAINER_MARKS = (
    "model_name_or_path", "per_device_train_batch_size", "gradient_checkpointing", "learning_rate",
    "gradient_accumulation_steps", "dataset_name", "output_dir",
)  # fmt: skip


class Trl(ValuesProgram):
    name = "trl"
    title = "TRL"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 18
    suffixes = YAML_SUFFIXES
    file_nouns = ("TRL YAML",)
    reads = "a TRL YAML"
    yaml_marks = ("use_peft", "per_device_train_batch_size")
    release = "TRL 1.10.0.dev0 (f2cd5771)"
    recognised_by = "a key of its trainers or of its ModelConfig (use_peft, max_length, packing, beta, ...)"

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a YAML has keys of TRL's own beside TrainingArguments."""
        data = source.content if source.suffix in YAML_SUFFIXES else None
        if not isinstance(data, Mapping) or "distributed_type" in data:
            return False
        has_data = "model_name_or_path" in data and "dataset_name" in data
        return has_data or (
            any(mark in data for mark in _MARKS) and any(mark in data for mark in _TRAINER_MARKS)
        )


PROGRAM = Trl()
