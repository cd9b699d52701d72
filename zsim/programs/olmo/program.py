"""OLMo's YAML, up to OLMo 2."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram
from zsim.specs.formats.program import ProgramSource
from zsim.specs.formats.training_file import TrainingFile


class Olmo(MarkedProgram):
    name = "olmo"
    title = "OLMo"
    kinds = ("fsdp1", "ddp")
    file_nouns = ("OLMo YAML",)
    reads = "an OLMo YAML"
    release = "OLMo 0.6 (59a53e3f)"
    recognised_by = (
        "`device_train_microbatch_size` beside `fsdp` or a key of its model (block_type, mlp_ratio, ...)"
    )

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.olmo.read import read_olmo

        return read_olmo(source)


PROGRAM = Olmo()
