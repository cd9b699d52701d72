"""The settings of ZeRO's reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from zsim.specs.messages import TypedTable
from zsim.specs.strategy.registry import MODEL_PARALLEL_KEYS, PIPELINE_KEYS, Framework
from zsim.specs.strategy.table import Count, StrategyConfig, StrategyTable

# Where the engine keeps optimizer states (with reduced gradients) and stage 3's parameter shards.
MemoryTier = Literal["device", "host", "nvme"]


class ReferenceTable(StrategyTable):
    """`kind = "reference"`: ZeRO as in the paper, as the engine in `validation/zero` runs it.

    It has one flat partition per block and fp32 master weights, and none of a framework's additions. In
    16-bit training the model states are the paper's 2 + 2 + 12 bytes per parameter. Gradients that are
    reduced and kept in fp32 (`reduce_dtype`) make them 18.
    """

    kind: Literal["reference"] = Field(description="whose data parallelism")
    stage: Literal[0, 1, 2, 3] = Field(default=3, description="the ZeRO stage")
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="the type of parameters in forward and backward; left out: that of training.precision",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="the type in which gradients are reduced and kept; left out: that of parameters",
    )
    bucket_bytes: int = Field(
        default=0,
        ge=0,
        description="gradients are reduced once so many bytes are there; 0: a block's at a time",
    )
    prefetch: int = Field(default=1, ge=0, description="how many units are gathered ahead")
    max_reductions_in_flight: Count = Field(
        default=2, description="reductions that have not ended before the host waits"
    )
    keep_gathered: bool = Field(
        default=True, description="stage 3 keeps the root and the last block from forward to backward"
    )
    optimizer_place: Literal["device", "host", "nvme"] = Field(
        default="device", description="where optimizer states and reduced gradients are kept"
    )
    parameter_place: Literal["device", "host", "nvme"] = Field(
        default="device", description="where stage 3 keeps its shards"
    )


class ReferenceZero(TypedTable, ReferenceTable):
    """ZeRO as in its paper, without a framework's additions: `zsim.ReferenceZero(stage=2)`."""

    kind: Literal["reference"] = Field(default="reference", description="whose data parallelism")


@dataclass(frozen=True, slots=True)
class ReferenceConfig(StrategyConfig):
    """ZeRO's reference engine (`validation/zero`), whose ZeroConfig explains the other fields."""

    kind: ClassVar[str] = "reference"

    stage: int
    param_dtype: str
    reduce_dtype: str
    bucket_bytes: int = 0
    prefetch: int = 1
    max_reductions_in_flight: int = 2
    keep_gathered: bool = True
    emulates_reduce_scatter: bool = False
    """The reduce-scatter is an all-to-all and a local sum, as on gloo."""
    optimizer_place: MemoryTier = "device"
    """The memory that holds optimizer states and reduced gradients."""
    parameter_place: MemoryTier = "device"
    """The memory that holds stage 3's parameter shards."""

    def label(self, world_size: int, ranks: int) -> str:
        return f"ZeRO stage {self.stage}, the reference engine"


class ReferenceFramework(Framework[ReferenceTable, ReferenceConfig]):
    table = ReferenceTable
    title = "the reference engine"
    order = 6
    unread_keys = (
        MODEL_PARALLEL_KEYS
        | PIPELINE_KEYS
        | {"training.lora", "training.frozen", "training.frozen_dtype", "training.autocast"}
        | {"training.stored_dtype"}
    )


FRAMEWORK = ReferenceFramework()
