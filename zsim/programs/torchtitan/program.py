"""torchtitan up to 0.2, which has a TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.specs.formats.program import ProgramSource, TrainingProgram
from zsim.specs.formats.training_file import TrainingFile


class Torchtitan(TrainingProgram):
    name = "torchtitan"
    title = "torchtitan"
    kinds = ("fsdp2", "ddp")
    order = 50
    file_nouns = ("torchtitan TOML",)
    reads = "a torchtitan TOML"
    writes = "a torchtitan TOML"
    example = "train.toml --training.seq_len=4096"
    takes_options = True
    takes_any_options = True
    script_settings = ("training.precision", "training.stored_dtype")

    def is_default_reader(self, source: ProgramSource) -> bool:
        return source.suffix == ".toml" and len(source.words) == 1

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        return isinstance(tables.get("model"), Mapping) or "parallelism" in tables

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.torchtitan.read import read_torchtitan

        return read_torchtitan(source.text)


PROGRAM = Torchtitan()
