"""The typed tables of frameworks that `zsim` has by name, in writing for checkers of types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.frameworks.ddp.typed import Ddp
    from zsim.frameworks.deepspeed.typed import DeepSpeed
    from zsim.frameworks.fsdp1.typed import Fsdp1
    from zsim.frameworks.fsdp2.typed import Fsdp2
    from zsim.frameworks.megatron.typed import Megatron
    from zsim.frameworks.reference.typed import ReferenceZero

MODULE_OF = {
    "Ddp": "zsim.frameworks.ddp.typed",
    "DeepSpeed": "zsim.frameworks.deepspeed.typed",
    "Fsdp1": "zsim.frameworks.fsdp1.typed",
    "Fsdp2": "zsim.frameworks.fsdp2.typed",
    "Megatron": "zsim.frameworks.megatron.typed",
    "ReferenceZero": "zsim.frameworks.reference.typed",
}
__all__ = [
    "Ddp",
    "DeepSpeed",
    "Fsdp1",
    "Fsdp2",
    "Megatron",
    "ReferenceZero",
]
