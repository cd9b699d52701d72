"""One question to the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Wrapping = Literal["torchtitan-0.1", "torchtitan", "huggingface", "blocks:4", "none"]
Code = Literal["transformers", "torchtitan"]
Checkpointing = Literal["none", "full"]
Reshard = bool | int
DtypeName = Literal["bf16", "fp16", "fp32"]
OptimizerKind = Literal["fused", "foreach"]


@dataclass(frozen=True)
class Case:
    """A model, its sharding, and the batch of one rank.

    `replicate` > 1 is HSDP: groups of `world_size / replicate` ranks shard, and corresponding shards of all
    groups are kept equal. Parameters are stored in fp32, gathered in `param_dtype`, reduced in
    `reduce_dtype`. `code` is the implementation of Llama that runs (see validation.llama)."""

    model: str
    world_size: int
    reshard_after_forward: Reshard = True
    replicate: int = 1
    code: Code = "transformers"
    wrapping: Wrapping = "torchtitan-0.1"
    activation_checkpointing: Checkpointing = "none"
    micro_batch_size: int = 1
    sequence_length: int = 8192
    gradient_accumulation_steps: int = 1
    param_dtype: DtypeName = "bf16"
    reduce_dtype: DtypeName = "fp32"
    optimizer: OptimizerKind = "fused"
    gradient_clipping: float = 0.0

    def __post_init__(self) -> None:
        if self.replicate < 1 or self.world_size % self.replicate:
            raise ValueError(f"replicate: {self.replicate} does not divide world size {self.world_size}")
        shard = self.world_size // self.replicate
        size = self.reshard_after_forward
        if not isinstance(size, bool) and (size < 2 or shard % size or size == shard):
            raise ValueError(
                f"reshard_after_forward: {size} is neither true nor false nor a divisor of {shard} "
                "greater than 1 and less than it"
            )

    @property
    def name(self) -> str:
        """A file name that describes the question."""
        parts = [self.model, f"w{self.world_size}", f"reshard-{str(self.reshard_after_forward).lower()}"]
        if self.replicate > 1:
            parts.append(f"hsdp{self.replicate}")
        if self.code != "transformers":
            parts.append(f"{self.code}-code")
        if self.wrapping != "torchtitan-0.1":
            parts.append(self.wrapping.replace(":", "-"))
        if self.activation_checkpointing != "none":
            parts.append(f"ac-{self.activation_checkpointing}")
        if self.gradient_accumulation_steps > 1:
            parts.append(f"accumulate{self.gradient_accumulation_steps}")
        if self.gradient_clipping:
            parts.append("clip")
        return "_".join(parts)
