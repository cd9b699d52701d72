"""The engines of training, each in a folder. Their typed tables are names of `zsim` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.frameworks.ddp.settings import Ddp
    from zsim.frameworks.deepspeed.settings.table import DeepSpeed
    from zsim.frameworks.fsdp1.settings import Fsdp1
    from zsim.frameworks.fsdp2.settings import Fsdp2
    from zsim.frameworks.megatron.settings.table import Megatron
    from zsim.frameworks.reference.settings import ReferenceZero

NAMES = {
    "zsim.frameworks.ddp.settings": "Ddp",
    "zsim.frameworks.deepspeed.settings.table": "DeepSpeed",
    "zsim.frameworks.fsdp1.settings": "Fsdp1",
    "zsim.frameworks.fsdp2.settings": "Fsdp2",
    "zsim.frameworks.megatron.settings.table": "Megatron",
    "zsim.frameworks.reference.settings": "ReferenceZero",
}
__all__ = ["Ddp", "DeepSpeed", "Fsdp1", "Fsdp2", "Megatron", "ReferenceZero"]
