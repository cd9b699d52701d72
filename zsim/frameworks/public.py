"""The typed tables of frameworks that `zsim` has by name, in writing for checkers of types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.frameworks.ddp.faces import Ddp
    from zsim.frameworks.deepspeed.faces import DeepSpeed
    from zsim.frameworks.fsdp1.faces import Fsdp1
    from zsim.frameworks.fsdp2.faces import Fsdp2
    from zsim.frameworks.megatron.faces import Megatron
    from zsim.frameworks.reference.faces import ReferenceZero

MODULE_OF = {
    "Ddp": "zsim.frameworks.ddp.faces",
    "DeepSpeed": "zsim.frameworks.deepspeed.faces",
    "Fsdp1": "zsim.frameworks.fsdp1.faces",
    "Fsdp2": "zsim.frameworks.fsdp2.faces",
    "Megatron": "zsim.frameworks.megatron.faces",
    "ReferenceZero": "zsim.frameworks.reference.faces",
}
__all__ = [
    "Ddp",
    "DeepSpeed",
    "Fsdp1",
    "Fsdp2",
    "Megatron",
    "ReferenceZero",
]
