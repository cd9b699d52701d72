"""The start of the step of every DeepSpeed optimizer: overflow check and gradient norm, both read by the
host."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import norm_kernels, scale_kernels
from zsim.plan.builder import PlanBuilder
from zsim.plan.parts.host_reads import read_scalar
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig


def check_overflow(builder: PlanBuilder, config: DeepSpeedConfig, shards: Sequence[int], group: str) -> None:
    """Check all gradients for infinities, reduce the flag over the ranks that shard, and make the host wait
    for it. FP16_Optimizer is not sharded: the flag needs no reduction."""
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
    """Compute the global norm as a Python number (kernels, reductions, `.item()`); then unscale and clip.

    Stage 3 reduces one sum of squares per sub-group, in fp64 unless the optimizer is offloaded
    (`get_grad_norm_direct`). BF16_Optimizer and FP16_Optimizer have all gradients on every rank and reduce
    nothing; the engine itself (fp32, stage 0) takes a norm only to clip, and averages it over the ranks.
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
