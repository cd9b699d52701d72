"""What every DeepSpeed optimizer does before it updates: look for infinities, take the norm, wait."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.update_work import norm_kernels, scale_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.specs.importers.deepspeed import DeepSpeedConfig


def check_overflow(builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int]) -> None:
    """Every gradient is read, the flag reduced over all ranks, and the host waits for it."""
    if not config.check_grad_overflow:
        return
    builder.kernels("look for infinities", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    _reduce_scalar(builder, "all_reduce overflow")


def norm_and_sync(builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int]) -> None:
    """The global norm as a Python number: kernels, a reduction, `.item()`; then unscale and clip."""
    builder.kernels("gradient norm", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    _reduce_scalar(builder, "all_reduce gradient norm")
    if config.gradient_clipping > 0 or config.precision == "fp16":
        builder.kernels("clip gradients", scale_kernels(sum(shards), config.master_weights_dtype, 1))


def _reduce_scalar(builder: PlanBuilder, name: str) -> None:
    if builder.groups["world"].size > 1:
        builder.collective("all_reduce", 4, "fp32", "world", stream=COMPUTE, name=name)
    builder.host_wait(builder.record(COMPUTE))
    builder.host(f"read {name}")
