"""The settings of torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from zsim.specs.messages import TypedTable
from zsim.specs.strategy.registry import MODEL_PARALLEL_KEYS, Framework
from zsim.specs.strategy.table import StrategyConfig, StrategyTable


class DdpTable(StrategyTable):
    """`kind = "ddp"`: torch DistributedDataParallel."""

    kind: Literal["ddp"] = Field(
        description="whose data parallelism: torch's DDP, FSDP1 or FSDP2, DeepSpeed's ZeRO, "
        "Megatron's, or ZeRO as in its paper"
    )
    bucket_cap_mb: float = Field(default=25.0, gt=0, le=1e9, description="MiB of gradients in a bucket")
    gradient_as_bucket_view: bool = Field(default=False, description="gradients are views of the buckets")
    no_sync: bool = Field(default=True, description="gradients are reduced after the last micro-batch only")
    optimizer_in_backward: bool = Field(
        default=False, description="on one GPU, each tensor is updated once its gradient is ready, then freed"
    )


class Ddp(TypedTable, DdpTable):
    """Torch's DistributedDataParallel: `zsim.Ddp(bucket_cap_mb=50)`."""

    kind: Literal["ddp"] = Field(default="ddp", description="whose data parallelism")


@dataclass(frozen=True, slots=True)
class DdpConfig(StrategyConfig):
    """torch DistributedDataParallel. Caps are in bytes."""

    kind: ClassVar[str] = "ddp"

    bucket_cap_bytes: int = 25 * 2**20
    first_bucket_cap_bytes: int = 2**20
    gradient_as_bucket_view: bool = False
    no_sync: bool = True
    optimizer_in_backward: bool = False

    def label(self, world_size: int, ranks: int) -> str:
        return "DDP"


class DdpFramework(Framework[DdpTable, DdpConfig]):
    table = DdpTable
    title = "DDP"
    order = 1
    other_names = dict.fromkeys(("dp", "dataparallel", "distributeddataparallel"), 'kind = "ddp"')
    unread_keys = (MODEL_PARALLEL_KEYS | {"training.autocast"}) - {"parallelism.context"}


FRAMEWORK = DdpFramework()
