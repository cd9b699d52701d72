"""nanotron and its YAML."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class Nanotron(MarkedProgram):
    name = "nanotron"
    title = "nanotron"
    kinds = ("megatron",)
    file_nouns = ("nanotron YAML",)
    reads = "a nanotron YAML"
    release = "nanotron of April 2026 (2411b022)"
    recognised_by = "`parallelism` with dp, tp and pp, with `tokens`"


PROGRAM = Nanotron()
