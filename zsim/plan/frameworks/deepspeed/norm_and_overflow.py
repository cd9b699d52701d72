"""What every DeepSpeed optimizer does before it updates: look for infinities, take the norm, wait."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import norm_kernels, scale_kernels
from zsim.plan.builder import PlanBuilder
from zsim.plan.parts.host_reads import read_scalar
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig


def check_overflow(builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int], group: str) -> None:
    """Every gradient is read, the flag reduced over the ranks that shard, and the host waits for it;
    FP16_Optimizer holds all gradients on every rank and asks nobody."""
    if not config.check_grad_overflow:
        return
    builder.kernels("look for infinities", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    is_sharded = config.optimizer_wrapper != "fp16_optimizer"
    read_scalar(builder, "overflow", "uint8", [group] if is_sharded else [])


def norm_and_sync(
    builder: PlanBuilder,
    config: DeepSpeedConfig,
    shards: Sequence[int],
    group: str,
    *,
    num_groups: int = 1,
) -> None:
    """The global norm as a Python number: kernels, reductions, `.item()`; then unscale and clip.

    Stage 3 reduces one sum of squares per sub-group, in fp64 unless the optimizer is offloaded
    (`get_grad_norm_direct`). BF16_Optimizer and FP16_Optimizer have all gradients on every rank; the engine
    itself (fp32, stage 0) takes a norm only to clip, and averages it.
    """
    wrapper = config.optimizer_wrapper
    if not config.zero.compute_grad_norm or (wrapper == "none" and not config.gradient_clipping):
        return
    builder.kernels("gradient norm", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    is_reduced = wrapper not in ("bf16_optimizer", "fp16_optimizer")
    dtype = "fp64" if wrapper == "zero3" and config.zero.offload_optimizer is None else "fp32"
    read_scalar(builder, "gradient norm", dtype, [group] if is_reduced else [], count=num_groups)
    if config.gradient_clipping > 0 or config.precision == "fp16":
        builder.kernels("clip gradients", scale_kernels(sum(shards), config.master_weights_dtype, 1))
