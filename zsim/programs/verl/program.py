"""verl, of which zsim simulates the update of the actor."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class Verl(MarkedProgram):
    name = "verl"
    title = "verl"
    kinds = ("fsdp1", "fsdp2", "megatron")
    file_nouns = ("verl YAML",)
    reads = "a verl YAML"
    release = "verl of January 2026 (b178a3cd)"
    recognised_by = "`actor_rollout_ref`, or EasyR1's `worker` with actor and rollout"


PROGRAM = Verl()
