"""Megatron's optimizer on the elements that a rank owns: fp32 gradients, unscale, norm, update, cast back.

Transcribed from Megatron-Core 0.12 `core/optimizer/optimizer.py` (MixedPrecisionOptimizer.step) and
`clip_grads.py`. Megatron-LM 2.5's `megatron/optimizer/optimizer.py` does the same in the same order.

Of the precision-aware optimizer the bytes of its states and the traffic of its update are transcribed from
Transformer Engine 2.20.0.dev0 pytorch/optimizers/fused_adam.py (`step`, `get_unscaled_state`,
`_apply_scale`). Its states are in zsim/frameworks/megatron/settings/precision_aware.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import cast_kernels, norm_kernels, scale_kernels
from zsim.cost.optimizers import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.precision_aware import PrecisionAware
from zsim.plan.builder import PlanBuilder, read_scalar
from zsim.plan.shared.optimizer import UPDATE, update
from zsim.specs.strategy.training import TrainingConfig


def update_parameters(
    builder: PlanBuilder,
    strategy: MegatronConfig,
    training: TrainingConfig,
    numels: Sequence[int],
    groups: Sequence[str],
    *,
    copies_back: bool = True,
) -> None:
    """Issue the update of this rank's elements of each tensor.

    Norm and overflow are reduced over `groups`, [] if every rank has all gradients. If `copies_back`, the
    updated weights are cast to the model's in one pass. fp32 copies of 16-bit gradients live until the end of
    the update. Megatron scales the gradients only if their norm is above the limit (`clip_coeff < 1.0`),
    which stops early in a training: no scaling is issued.
    """
    numel, is_low, states = sum(numels), strategy.param_dtype != "fp32", strategy.precision_aware
    is_decoupled = states is not None and states.has_masters  # it reads gradients in their own type
    copies = prepare_gradients(builder, strategy, training, [numels], groups)
    if strategy.skips_update:
        builder.free("gradients", copies)
        return
    if states is not None and is_low:
        gradient_dtype = strategy.grad_dtype if is_decoupled else "fp32"
        update_low_precision(builder, states, strategy.param_dtype, gradient_dtype, numels)
        if not is_decoupled and copies_back:
            builder.kernels("copy main weights", cast_kernels(numel, "fp32", strategy.param_dtype))
        builder.free("gradients", copies)
        return
    if training.optimizer == "lion":
        kernels = lion_kernels(numel, len(numels))
        casts = cast_kernels(numel, "fp32", strategy.param_dtype) if is_low and copies_back else ()
        builder.kernels(UPDATE, (*kernels, *casts), overhead="optimizer_step")
        builder.free("gradients", copies)
        return
    update(
        builder,
        training,
        UpdatedTensor.flat(numels),
        gradient_dtype="fp32",
        state_dtype="fp32",
        low_precision_copy=is_low and copies_back,
    )
    builder.free("gradients", copies)


def prepare_gradients(
    builder: PlanBuilder,
    strategy: MegatronConfig,
    training: TrainingConfig,
    numel_lists: Sequence[Sequence[int]],
    groups: Sequence[str],
) -> int:
    """Issue fp32 copies of gradients, their scale and their norm. There is one norm for each of `numel_lists`
    of tensors' elements (optimizers in a chain that do not share a group). Returns the bytes of the copies,
    which the caller frees.
    """
    numels = [numel for tensor_numels in numel_lists for numel in tensor_numels]
    numel, states = sum(numels), strategy.precision_aware
    is_decoupled = states is not None and states.has_masters
    copies = numel * 4 if strategy.grad_dtype != "fp32" and not is_decoupled else 0
    builder.allocate("gradients", copies)
    if copies:
        builder.kernels("copy gradients to fp32", cast_kernels(numel, strategy.grad_dtype, "fp32"))
    if training.precision == "fp16":
        builder.kernels("unscale gradients", scale_kernels(numel, "fp32", len(numels)))
        read_scalar(builder, "overflow", "fp32", groups)
    if training.gradient_clipping > 0 and not strategy.skips_update:
        dtype = strategy.grad_dtype if is_decoupled else "fp32"
        for tensor_numels in numel_lists:
            builder.kernels("gradient norm", norm_kernels(sum(tensor_numels), dtype, len(tensor_numels)))
            read_scalar(builder, "gradient norm", "fp32", groups)
    return copies


def lion_kernels(numel: int, num_tensors: int) -> tuple[Kernel, ...]:
    """Megatron's Lion on fp32 weights, moments and gradients, tensor by tensor: the decay (reads and writes
    the weight), a compiled kernel (reads gradient and momentum, writes momentum and sign), the scaled sum
    (reads weight and sign, writes the weight): nine times 4 bytes.

    Source: NVIDIA's emerging_optimizers scalar_optimizers/lion.py, as Megatron-Core 0.17 imports it.
    """
    return (Kernel("optimizer", 0.0, 36.0 * numel, "fp32", (), 3 * num_tensors),) if numel else ()


_FP32 = 4
# Kernels per tensor: `float` (fp16: and `mul_`); then aminmax, neg, maximum, div, and for fp16 reciprocal,
# where, `mul_` and copy, for fp8 reciprocal, copy and the cast; bf16's cast and copy.
_LOADS = {"fp16": 2, "bf16": 1, "fp8": 1}
_STORES = {"fp16": 8, "bf16": 2, "fp8": 7}


def state_sizes(states: PrecisionAware, numels: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the states of tensors of `numels`, in order: both moments, and masters if it has them."""
    bytes_per_state = [DTYPE_BYTES[dtype] for dtype in states.moment_dtypes]
    bytes_per_state += [states.master_bytes] if states.has_masters else []
    return tuple(numel * size for numel in numels for size in bytes_per_state if numel)


def update_low_precision(
    builder: PlanBuilder, states: PrecisionAware, param_dtype: str, gradient_dtype: str, numels: Sequence[int]
) -> None:
    """Issue the update of tensors of `numels` elements. States that are cast live in fp32 until its end."""
    numel, casts = sum(numels), states.cast_dtypes
    copies = _FP32 * numel * len(casts)
    builder.allocate("buffers", copies, owner=UPDATE)
    for dtype in casts:
        builder.kernels(f"{UPDATE}: load {dtype} states", _load(dtype, numels))
    builder.kernels(UPDATE, (_update(states, param_dtype, gradient_dtype, numel),), overhead="optimizer_step")
    for dtype in casts:
        builder.kernels(f"{UPDATE}: store {dtype} states", _store(dtype, numels))
    builder.free("buffers", copies, owner=UPDATE)


def _update(states: PrecisionAware, param_dtype: str, gradient_dtype: str, numel: int) -> Kernel:
    """One pass: reads the gradient, reads and writes the moments, in fp32 unless both are bf16, and the
    master, and writes the model's weight. It also reads the weight where the master is its remainder.
    """
    param_bytes, gradient = DTYPE_BYTES[param_dtype], DTYPE_BYTES[gradient_dtype]
    moments = 2 * (2 + 2) if states.fuses_casts else 2 * (_FP32 + _FP32)
    master = 2 * (states.master_bytes if states.keeps_remainders else _FP32)
    weight = 2 * param_bytes if states.keeps_remainders else param_bytes
    traffic_bytes = numel * (gradient + moments + master + (weight if states.has_masters else 0))
    return Kernel("optimizer", 0.0, float(traffic_bytes), "fp32")


def _load(dtype: str, numels: Sequence[int]) -> tuple[Kernel, ...]:
    """Kernels that cast states to fp32. fp16's are multiplied by their scale in place."""
    element_bytes = DTYPE_BYTES[dtype] + _FP32 + (2 * _FP32 if dtype == "fp16" else 0)
    return (
        Kernel(
            "elementwise", 0.0, float(sum(numels) * element_bytes), "fp32", (), len(numels) * _LOADS[dtype]
        ),
    )


def _store(dtype: str, numels: Sequence[int]) -> tuple[Kernel, ...]:
    """Kernels that cast states back. The extremes are read for a new scale, and fp16's are multiplied by its
    inverse in place. bf16's are cast into a new tensor, which is copied.
    """
    size = DTYPE_BYTES[dtype]
    element_bytes = {"bf16": _FP32 + 3 * size, "fp8": 2 * _FP32 + size, "fp16": 4 * _FP32 + size}[dtype]
    return (
        Kernel(
            "elementwise", 0.0, float(sum(numels) * element_bytes), "fp32", (), len(numels) * _STORES[dtype]
        ),
    )
