"""llm-foundry, MosaicML's YAML for composer."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class LlmFoundry(MarkedProgram):
    name = "llm-foundry"
    title = "llm-foundry"
    kinds = ("fsdp1", "ddp")
    file_nouns = ("llm-foundry YAML",)
    reads = "an llm-foundry YAML"
    release = "llm-foundry 0.22.0.dev0 (8c8dd48f) with composer 0.32.1"
    recognised_by = "`device_train_microbatch_size`, or `max_seq_len` with a batch or `fsdp_config`"


PROGRAM = LlmFoundry()
