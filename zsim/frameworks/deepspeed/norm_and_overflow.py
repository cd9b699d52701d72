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

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import norm_kernels, scale_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE, read_scalar
from zsim.plan.stage import Stage


def check_overflow(
    stage: Stage,
    config: DeepSpeedConfig,
    shards: Sequence[int],
    group: str,
    *,
    later_groups: Sequence[str] = (),
) -> None:
    """Check all gradients, of `shards` elements each, for infinities, reduce the flag over the ranks that
    shard, and make the host wait for it. FP16_Optimizer is not sharded: its flag is that of all data-parallel
    ranks, except for experts that other ranks hold. Their groups are `later_groups`. Stage 1 of 0.17.1 to
    0.17.6 keeps the flag to itself.
    """
    if not config.check_grad_overflow:
        return
    builder = stage.builder
    for shard in shards if config.optimizer_wrapper != "zero3" else [sum(shards)]:
        builder.kernels("look for infinities", _overflow_kernels(config, shard))
        if _reads_each_gradient(config):
            builder.host_wait(builder.record(COMPUTE))
            builder.host("read sum of gradient")
    is_local = config.stage == 1 and config.release.keeps_overflow_local
    is_sharded = config.optimizer_wrapper != "fp16_optimizer" and not is_local
    groups = stage.norm_groups(group) if is_sharded else stage.norm_groups()
    read_scalar(builder, "overflow", "uint8", groups, later_groups=later_groups)


def _reads_each_gradient(config: DeepSpeedConfig) -> bool:
    """Whether the host waits for the sum of every gradient. See [Note: a look at every gradient]."""
    is_old = config.optimizer_wrapper == "zero12" and config.release.reads_each_sum
    return config.optimizer_wrapper == "fp16_optimizer" or is_old


def _overflow_kernels(config: DeepSpeedConfig, numel: int) -> tuple[Kernel, ...]:
    """The kernels that look for infinities in one gradient, or in stage 3's buffer of all.

    # [Note: a look at every gradient]
    FP16_Optimizer, and stages 1 and 2 before pull request 5115, take gradient by gradient: a cast to fp32, a
    sum, and `float()` of it, for which the host waits (`CheckOverflow._has_inf_or_nan`). Later stages 1 and 2
    leave the answer on the GPU: a cast, `isnan`, `isinf` (an absolute value and a comparison), `logical_or`,
    a cast and a maximum, which is added up. From 0.19.6 on both take the gradient's greatest and least
    element instead, whether each is finite (four kernels of one element), `logical_and`, `logical_not` and
    the sum: 13 kernels, as recorded in traces/h100-80gb-hbm3. Stage 3 takes `isinf` and `isnan` of its buffer
    of all gradients, and whether any is true.
    """
    e = DTYPE_BYTES[config.grad_accum_dtype]
    if numel == 0:
        return ()
    if config.optimizer_wrapper == "zero3":
        size, launches = (2 * e + e + 1) + 1 + (e + 1) + 1, 7
    elif config.release.looks_at_extremes:
        size, launches = 2 * e, 13
    elif _reads_each_gradient(config):
        size, launches = (e + 4) + 4, 3
    else:
        size, launches = (e + 4) + 5 + (8 + 5) + 3 + 5 + 4, 8
    return (Kernel("elementwise", 0.0, float(numel * size), "fp32", (), launches),)


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
