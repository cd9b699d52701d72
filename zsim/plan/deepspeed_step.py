"""What every DeepSpeed optimizer does before it updates: look for infinities, take the norm, wait."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.update_work import norm_kernels, scale_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.specs.importers.deepspeed import DeepSpeedConfig


def check_overflow(
    builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int], group: str = "world"
) -> None:
    """Every gradient is read, the flag reduced over the ranks that shard, and the host waits for it;
    FP16_Optimizer holds all gradients on every rank and asks nobody."""
    if not config.check_grad_overflow:
        return
    builder.kernels("look for infinities", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    is_sharded = config.optimizer_wrapper != "fp16_optimizer"
    _read_scalar(builder, "overflow", group if is_sharded else None)


def norm_and_sync(
    builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int], group: str = "world"
) -> None:
    """The global norm as a Python number: kernels, a reduction, `.item()`; then unscale and clip."""
    if not config.zero.compute_grad_norm:
        return
    builder.kernels("gradient norm", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    is_sharded = config.optimizer_wrapper not in ("none", "fp16_optimizer")
    _read_scalar(builder, "gradient norm", group if is_sharded else None)
    if config.gradient_clipping > 0 or config.precision == "fp16":
        builder.kernels("clip gradients", scale_kernels(sum(shards), config.master_weights_dtype, 1))


def _read_scalar(builder: PlanBuilder, name: str, group: str | None) -> None:
    if group is not None and builder.groups[group].size > 1:
        builder.collective("all_reduce", 4, "fp32", group, stream=COMPUTE, name=f"all_reduce {name}")
    builder.host_wait(builder.record(COMPUTE))
    builder.host(f"read {name}")
