"""Megatron's precision-aware optimizer: bytes of its states and the traffic of its update.

Transcribed from Transformer Engine 2.20.0.dev0 pytorch/optimizers/fused_adam.py (`step`,
`get_unscaled_state`, `_apply_scale`). Its states are in zsim/frameworks/megatron/settings/precision_aware.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.kernel import Kernel
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.settings.precision_aware import PrecisionAware
from zsim.plan.builder import PlanBuilder
from zsim.plan.shared.optimizer import UPDATE

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
