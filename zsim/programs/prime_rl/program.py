"""prime-rl, of whose RL zsim simulates the trainer's update, and whose SFT it simulates whole."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram
from zsim.specs.formats.program import ProgramSource
from zsim.specs.formats.training_file import TrainingFile


class PrimeRl(MarkedProgram):
    name = "prime-rl"
    title = "prime-rl"
    kinds = ("fsdp2",)
    file_nouns = ("prime-rl TOML",)
    reads = "a prime-rl TOML"
    release = "prime-rl of August 2026 (559b4477)"
    recognised_by = "`orchestrator` beside another table of its own, `model.seq_len`, or `data.batch_size`"

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.prime_rl.read import read_prime_rl

        return read_prime_rl(source)


PROGRAM = PrimeRl()
