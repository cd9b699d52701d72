"""axolotl, which trains from one YAML."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

_MARKS = (
    "micro_batch_size", "sequence_len", "adapter", "sample_packing", "num_epochs", "datasets",
    "pretraining_dataset", "lora_r", "load_in_4bit", "val_set_size",
)  # fmt: skip


class Axolotl(ValuesProgram):
    name = "axolotl"
    title = "axolotl"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 11
    suffixes = YAML_SUFFIXES
    file_nouns = ("axolotl YAML",)
    reads = "an axolotl YAML"
    yaml_marks = ("base_model", "micro_batch_size", "sequence_len")
    release = "axolotl 067b021c (July 2026)"
    recognised_by = (
        "`base_model` with another key of axolotl's (micro_batch_size, sequence_len, datasets, ...)"
    )

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a YAML has `base_model` and another key of axolotl's."""
        data = source.content if source.suffix in YAML_SUFFIXES else None
        if not isinstance(data, Mapping) or "base_model" not in data:
            return False
        return any(mark in data for mark in _MARKS)


PROGRAM = Axolotl()
