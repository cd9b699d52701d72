"""OLMo's YAML, up to OLMo 2."""

from __future__ import annotations

from zsim.programs.marks import MarkedProgram


class Olmo(MarkedProgram):
    name = "olmo"
    title = "OLMo"
    kinds = ("fsdp1", "ddp")
    file_nouns = ("OLMo YAML",)
    reads = "an OLMo YAML"
    release = "OLMo 0.6 (59a53e3f)"
    recognised_by = (
        "`device_train_microbatch_size` with `fsdp` or a key of its model (block_type, mlp_ratio, ...)"
    )


PROGRAM = Olmo()
