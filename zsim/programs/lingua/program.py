"""Meta's lingua, which pre-trains from one YAML."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class Lingua(MarkedProgram):
    name = "lingua"
    title = "lingua"
    kinds = ("fsdp2",)
    file_nouns = ("lingua YAML",)
    reads = "a lingua YAML"
    release = "lingua of June 2025 (437d680e)"
    recognised_by = "`distributed` with fsdp_type or dp_shard, or `model.dim` with `data` and `dump_dir`"


PROGRAM = Lingua()
