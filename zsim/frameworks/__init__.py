"""The engines of training, each in a folder. Their typed tables are names of `zsim` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.frameworks.ddp.studies import Ddp
    from zsim.frameworks.deepspeed.studies import DeepSpeed
    from zsim.frameworks.fsdp1.studies import Fsdp1
    from zsim.frameworks.fsdp2.studies import Fsdp2
    from zsim.frameworks.megatron.studies import Megatron
    from zsim.frameworks.reference.studies import ReferenceZero

NAMES = {
    "zsim.frameworks.ddp.studies": "Ddp",
    "zsim.frameworks.deepspeed.studies": "DeepSpeed",
    "zsim.frameworks.fsdp1.studies": "Fsdp1",
    "zsim.frameworks.fsdp2.studies": "Fsdp2",
    "zsim.frameworks.megatron.studies": "Megatron",
    "zsim.frameworks.reference.studies": "ReferenceZero",
}
__all__ = ["Ddp", "DeepSpeed", "Fsdp1", "Fsdp2", "Megatron", "ReferenceZero"]
