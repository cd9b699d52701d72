"""Scales of weights that FSDP2 gathers in fp8: maxima of sharded tensors, over all ranks that shard.

Read in torchao 0.15 float8/fsdp_utils.py: `WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather` and
`precompute_float8_dynamic_scale_for_fsdp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import norm_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.fsdp2.param_groups import ParamGroup
from zsim.specs.strategy.frameworks import Fsdp2Config


def gathers_fp8(strategy: Fsdp2Config) -> bool:
    """Whether the weights of fp8 products are gathered in fp8."""
    return strategy.param_dtype == "fp8"


def reduce_scales(builder: PlanBuilder, strategy: Fsdp2Config, group: ParamGroup, stream: str) -> int:
    """Sum up each weight's maximum before it is cast, unless scales are computed beforehand. Returns the
    bytes of fp32 shards that are read for the maxima.
    """
    if strategy.precomputes_scales or not gathers_fp8(strategy):
        return 0
    for _ in range(group.num_in_fp8):
        builder.collective(
            "all_reduce", 4, "fp32", group.mesh.shard.name, stream=stream,
            name=f"all_reduce maximum of {group.name}", module=group.name,
        )  # fmt: skip
    return 4 * group.fp8_numel // group.shard_size


def precompute_scales(builder: PlanBuilder, strategy: Fsdp2Config, groups: Sequence[ParamGroup]) -> None:
    """After the update: the maxima of all weights, then one all-reduce of all of them."""
    count = sum(group.num_in_fp8 for group in groups)
    if not (strategy.precomputes_scales and gathers_fp8(strategy) and count):
        return
    numel = sum(group.fp8_numel // group.shard_size for group in groups)
    builder.kernels("maxima of fp8 weights", norm_kernels(numel, "fp32", count))
    shard = groups[0].mesh.shard
    if shard.size > 1:
        builder.collective(
            "all_reduce",
            4 * count,
            "fp32",
            shard.name,
            stream=COMPUTE,
            name="all_reduce maxima of fp8 weights",
        )
