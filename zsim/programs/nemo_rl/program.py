"""NeMo-RL, of which zsim simulates the update of the policy."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram
from zsim.specs.formats.program import ProgramSource
from zsim.specs.formats.training_file import TrainingFile


class NemoRl(MarkedProgram):
    name = "nemo-rl"
    title = "NeMo-RL"
    kinds = ("fsdp2", "megatron")
    file_nouns = ("NeMo-RL YAML",)
    reads = "a NeMo-RL YAML"
    release = "NeMo-RL of August 2026 (7ea279ab)"
    recognised_by = (
        "a key of its policy (train_global_batch_size, dtensor_cfg, ...), or `policy` beside `grpo`"
    )

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.nemo_rl.read import read_nemo_rl

        return read_nemo_rl(source)


PROGRAM = NemoRl()
