"""Hugging Face's Accelerate, which launches a script under DeepSpeed, FSDP, Megatron or DDP."""

from __future__ import annotations

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, TrainingProgram


class Accelerate(TrainingProgram):
    name = "accelerate"
    title = "Accelerate"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 30
    is_launcher = True
    suffixes = YAML_SUFFIXES
    file_nouns = ("Accelerate YAML",)
    reads = "an Accelerate YAML"
    writes = "an Accelerate YAML"
    yaml_marks = ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config")

    def is_default_reader(self, source: ProgramSource) -> bool:
        return source.suffix in YAML_SUFFIXES

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.accelerate.read import read_accelerate

        return read_accelerate(source.text)


PROGRAM = Accelerate()
