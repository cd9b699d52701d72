"""The keys that `[strategy]` of torch's two FSDPs have in common."""

# See [Note: annotations of tables].

from typing import Literal

from pydantic import Field

from zsim.specs.strategy.table import Count, Dtype, StrategyTable


class FsdpTable(StrategyTable):
    """`[strategy]` of either FSDP."""

    param_dtype: Dtype | None = Field(
        default=None,
        description="the type in which parameters are gathered; left out: that of training.precision",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="the type in which gradients are reduced; left out: the framework's own"
    )
    replicate: Count | None = Field(
        default=None,
        description="replicas of the sharded group (hybrid sharding, HSDP); left out: 1; with FSDP1's "
        "hybrid strategies the nodes",
    )
    no_sync: bool = Field(
        default=False, description="gradients are kept whole until the last micro-batch, and reduced then"
    )
    cpu_offload: bool = Field(
        default=False, description="shards live in host memory, where the optimizer updates them"
    )
