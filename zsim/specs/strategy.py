"""How a model is trained on many GPUs: the values that plans are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Checkpointing = Literal["none", "selective", "full"]
AttentionKind = Literal["flash", "math"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Training:
    """What one rank trains on: `micro_batch_size` sequences of `sequence_length` tokens at a time."""

    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    precision: Precision
    activation_checkpointing: Checkpointing
    attention: AttentionKind
    compile: bool
    optimizer: str
    gradient_clipping: float

    @property
    def micro_batch_tokens(self) -> int:
        return self.sequence_length * self.micro_batch_size
