"""The start of the step of every DeepSpeed optimizer: overflow check and gradient norm, both read by the
host.

# [Note: sums over a model's ranks]
Where ranks share a model (an mpu: Megatron's groups, the pipeline's grid, AutoTP's), every sum runs on over
its ranks: after the data-parallel ranks in stages 1 to 3 (`_model_parallel_all_reduce`, DeepSpeed 0.19.8
`runtime/zero/stage_1_and_2.py`, `stage3.py`), alone where no rank has a part of the gradients
(`get_global_norm_of_tensors`, `CheckOverflow.has_overflow` of `runtime/utils.py`), and before them in the
engine's own `clip_grad_norm_`. A parameter that several of them have whole is counted by the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import norm_kernels, scale_kernels
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import read_scalar
from zsim.plan.stage import Stage


def check_overflow(
    stage: Stage,
    config: DeepSpeedConfig,
    shards: Sequence[int],
    group: str,
    *,
    later_groups: Sequence[str] = (),
) -> None:
    """Check all gradients for infinities, reduce the flag over the ranks that shard, and make the host wait
    for it. FP16_Optimizer is not sharded: its flag is that of all data-parallel ranks, except for experts
    that other ranks hold. Their groups are `later_groups`.
    """
    if not config.check_grad_overflow:
        return
    builder = stage.builder
    builder.kernels("look for infinities", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    is_sharded = config.optimizer_wrapper != "fp16_optimizer"
    groups = stage.norm_groups(group) if is_sharded else stage.norm_groups()
    read_scalar(builder, "overflow", "uint8", groups, later_groups=later_groups)


def compute_norm_and_clip(
    stage: Stage,
    config: DeepSpeedConfig,
    shards: Sequence[int],
    group: str,
    *,
    num_groups: int = 1,
    later_groups: Sequence[str] = (),
) -> None:
    """Compute the global norm as a Python number (kernels, reductions, `.item()`). Then unscale and clip.

    Stage 3 reduces one sum of squares per sub-group, in fp64 unless the optimizer is offloaded
    (`get_grad_norm_direct`). BF16_Optimizer and FP16_Optimizer have all gradients of their part of the model
    on every rank. The engine itself (fp32, stage 0) takes a norm only to clip, and averages it over the
    ranks. See [Note: sums over a model's ranks]. `num_groups` sums are reduced one by one. Each of
    `later_groups` is the group of a further reduction (`_average_expert_grad_norms`).
    """
    builder, wrapper = stage.builder, config.optimizer_wrapper
    if not config.zero.compute_grad_norm or (wrapper == "none" and not config.gradient_clipping):
        return
    builder.kernels("gradient norm", norm_kernels(sum(shards), config.grad_accum_dtype, len(shards)))
    groups = stage.norm_groups(group)
    if wrapper in ("bf16_optimizer", "fp16_optimizer"):
        groups = stage.norm_groups()
    elif wrapper == "none":
        groups = [*stage.norm_groups(), group]
    dtype = "fp64" if wrapper == "zero3" and config.zero.offload_optimizer is None else "fp32"
    read_scalar(builder, "gradient norm", dtype, groups, count=num_groups, later_groups=later_groups)
    if config.gradient_clipping > 0 or config.precision == "fp16":
        builder.kernels("clip gradients", scale_kernels(sum(shards), config.master_weights_dtype, 1))
