"""A training script of one's own over torch, of which zsim writes the part that applies the strategy."""

from __future__ import annotations

from zsim.specs.formats.program import TrainingProgram


class TorchScript(TrainingProgram):
    """Python with FSDP2, FSDP1 or DDP."""

    name = "torch"
    title = "torch"
    kinds = ("ddp", "fsdp1", "fsdp2")
    order = 15
    is_read = False
    is_default = True
    writes = "FSDP2 Python"


PROGRAM = TorchScript()
