"""ms-swift, whose `swift sft` takes its arguments from one YAML."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

_MARKS = (
    "tuner_type",
    "train_type",
    "sft_type",
    "rlhf_type",
    "tuner_backend",
    "split_dataset_ratio",
    "quant_bits",
)
_TRAINING_MARKS = (
    "per_device_train_batch_size", "micro_batch_size", "dataset", "max_length", "learning_rate", "deepspeed",
    "lora_rank", "global_batch_size",
)  # fmt: skip


class MsSwift(ValuesProgram):
    name = "ms-swift"
    title = "ms-swift"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 13
    suffixes = (*YAML_SUFFIXES, ".json")
    file_nouns = ("ms-swift YAML",)
    reads = "an ms-swift YAML"
    yaml_marks = ("tuner_type", "train_type")
    release = "ms-swift 4.6.0.dev0 (3602360a)"
    recognised_by = (
        "`tuner_type` (older: train_type, sft_type) or another key of its own, with `model`; one with "
        "`micro_batch_size` or `global_batch_size` is Megatron-SWIFT's, which has the fields of "
        "Megatron-Core's configurations and the keys of adapters"
    )

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a file has the name of a model at `model` and a key that ms-swift alone has."""
        data = source.content if source.suffix in self.suffixes else None
        if not isinstance(data, Mapping) or "model_name_or_path" in data or "base_model" in data:
            return False
        is_named = isinstance(data.get("model"), str) and any(mark in data for mark in _TRAINING_MARKS)
        return is_named or any(mark in data for mark in _MARKS)


PROGRAM = MsSwift()
