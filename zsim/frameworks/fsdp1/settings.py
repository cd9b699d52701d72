"""The settings of torch's FullyShardedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from zsim.frameworks.torch.fsdp_table import FsdpTable
from zsim.specs.messages import TypedTable
from zsim.specs.strategy.registry import MODEL_PARALLEL_KEYS, PIPELINE_KEYS, Framework
from zsim.specs.strategy.table import StrategyConfig


class Fsdp1Table(FsdpTable):
    """`kind = "fsdp1"`: torch FullyShardedDataParallel."""

    kind: Literal["fsdp1"] = Field(description="whose data parallelism")
    wrapping: str | None = Field(
        default=None,
        description='units: "huggingface" (each block, and the rest), "peft" (and each adapter), or "size:N" '
        'elements; left out: "peft" with adapters, else "huggingface"',
    )
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ] = Field(
        default="FULL_SHARD",
        description="torch's name of what is sharded, and whether it is gathered again for backward",
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = Field(
        default="BACKWARD_PRE",
        description="when backward gathers the next unit: before or after computing the current one, "
        "or when needed",
    )
    forward_prefetch: bool = Field(
        default=False, description="the next unit is gathered before the current one is computed"
    )
    limit_all_gathers: bool = Field(
        default=True, description="the host waits so that at most two gathered units exist"
    )
    use_orig_params: bool = Field(
        default=True, description="frozen and trained parameters may share a flat one, as Accelerate has it"
    )
    before_torch_2: bool = Field(
        default=False, description="as in torch 1.12 and 1.13: pads and splits every flat gradient"
    )


class Fsdp1(TypedTable, Fsdp1Table):
    """Torch's FullyShardedDataParallel: `zsim.Fsdp1(sharding_strategy="SHARD_GRAD_OP")`."""

    kind: Literal["fsdp1"] = Field(default="fsdp1", description="whose data parallelism")


@dataclass(frozen=True, slots=True)
class Fsdp1Config(StrategyConfig):
    """torch FullyShardedDataParallel."""

    kind: ClassVar[str] = "fsdp1"

    sharding_strategy: str
    replicate: int
    """Replicas of the sharded group. More than 1 for the hybrid strategies."""
    wrapping: str
    """The wrapping policy. It may be `size:N`, with N in elements."""
    backward_prefetch: str
    forward_prefetch: bool
    limit_all_gathers: bool
    param_dtype: str
    reduce_dtype: str
    no_sync: bool
    cpu_offload: bool = False
    before_torch_2: bool = False
    """As torch 1.12 and 1.13, which pad every sharded flat gradient even if not needed, set its shard to
    zero, split flat parameters on the compute stream, and copy shards even to the type that they already
    have.
    """
    use_orig_params: bool = True
    """A flat parameter may have frozen parts."""

    def label(self, world_size: int, ranks: int) -> str:
        return f"FSDP1 {self.sharding_strategy}"


class Fsdp1Framework(Framework[Fsdp1Table, Fsdp1Config]):
    table = Fsdp1Table
    title = "FSDP"
    order = 2
    other_names = dict.fromkeys(
        ("fsdp", "fullyshardeddataparallel"), 'kind = "fsdp1" for FullyShardedDataParallel'
    )
    unread_keys = (MODEL_PARALLEL_KEYS | PIPELINE_KEYS | {"training.lora.preparation"}) - {
        "parallelism.context"
    }


FRAMEWORK = Fsdp1Framework()
