"""prime-rl, of whose RL zsim simulates the trainer's update, and whose SFT it simulates whole."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class PrimeRl(MarkedProgram):
    name = "prime-rl"
    title = "prime-rl"
    kinds = ("fsdp2",)
    file_nouns = ("prime-rl TOML",)
    reads = "a prime-rl TOML"
    release = "prime-rl of August 2026 (559b4477)"
    recognised_by = "`orchestrator` with another table of its own, `model.seq_len`, or `data.batch_size`"


PROGRAM = PrimeRl()
