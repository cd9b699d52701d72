"""Kernels outside forward and backward: optimizer, casts, copies, gradient norm, accumulation.

Sizes are elements of the rank's (sharded) tensors.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

from zsim.cost.kernels.kernel import Kernel
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError, did_you_mean

OptimizerImplementation = Literal["fused", "foreach", "for_loop"]

# One launch of torch's multi_tensor_apply takes at most 320 chunks of 65,536 elements
# (ATen/native/cuda/MultiTensorApply.cuh: depth_to_max_blocks, kChunkSize).
_ELEMENTS_PER_LAUNCH = 320 * 65536

# One launch of torch.cat takes at most 128 tensors (ATen/native/cuda/Shape.cu: CAT_ARRAY_BATCH_SIZE).
_TENSORS_PER_CAT = 128

# Optimizer states per parameter, of the optimizers that keep them in the parameter's type.
OPTIMIZER_STATES: dict[str, int] = {
    "adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1, "adagrad": 1,
}  # fmt: skip

# (passes in the state's type, reads in the gradient's type, launches per 21M elements) of foreach, counted
# in torch 2.13's `_multi_tensor_adamw` and `_multi_tensor_sgd`:
# AdamW: mul p (2), lerp m (2+g), mul v (2), addcmul v (2+2g), sqrt (2), div (2), add (2), addcdiv (4).
_FOREACH = {"adamw": (18, 3, 8), "adam": (16, 3, 7), "sgd": (2, 1, 1), "sgd_momentum": (7, 1, 3)}


def optimizer_state_bytes(optimizer: str, state_dtype: str = "fp32") -> int:
    """Bytes of optimizer states per parameter, the fp32 master weight not included (Adam: two moments).

    Raises NotSimulatedError for an optimizer whose work is not known.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise NotSimulatedError(
            f"optimizer '{optimizer}' is not simulated yet{did_you_mean(optimizer, OPTIMIZER_STATES)}; "
            f"expected one of {', '.join(OPTIMIZER_STATES)}"
        )
    return OPTIMIZER_STATES[optimizer] * DTYPE_BYTES[state_dtype]


def update_bytes(
    numel: int,
    optimizer: str = "adamw",
    implementation: OptimizerImplementation = "fused",
    gradient_dtype: str = "fp32",
    state_dtype: str = "fp32",
    master_dtype: str | None = None,
) -> int:
    """Bytes read plus written by the update of `numel` parameters. States are in `state_dtype`, and so are
    masters without a `master_dtype`.

    Fused AdamW reads and writes the parameter and both moments and reads the gradient once: 2 * 4 + 4 * 4 + 4
    = 28 bytes per parameter in fp32, on a CPU as well (DeepSpeed's `Step_1` in csrc/adam/cpu_adam_impl.cpp).
    The other implementations make a pass per operation: 84 bytes. Raises NotSimulatedError for an optimizer
    whose states are not known.
    """
    moments = optimizer_state_bytes(optimizer, state_dtype)
    master, gradient = DTYPE_BYTES[master_dtype or state_dtype], DTYPE_BYTES[gradient_dtype]
    if implementation == "fused":
        return numel * (2 * master + 2 * moments + gradient)
    passes, readings, _ = _FOREACH[optimizer]
    return numel * (passes * master + readings * gradient)


def optimizer_kernels(
    numel: int,
    optimizer: str = "adamw",
    implementation: OptimizerImplementation = "fused",
    *,
    num_tensors: int = 1,
    gradient_dtype: str = "fp32",
    state_dtype: str = "fp32",
    low_precision_copy: bool = False,
) -> tuple[Kernel, ...]:
    """Kernels of the update of `numel` parameters, with master weights and states in `state_dtype`.

    They move `update_bytes`. `for_loop` makes the passes of `foreach` tensor by tensor. With
    `low_precision_copy` a cast writes the model's 2-byte weights afterwards. Raises NotSimulatedError for an
    optimizer whose work is not known.
    """
    moved_bytes = update_bytes(numel, optimizer, implementation, gradient_dtype, state_dtype)
    if numel == 0:
        return ()
    rounds = ceil(numel / _ELEMENTS_PER_LAUNCH)
    operations = 1 if implementation == "fused" else _FOREACH[optimizer][2]
    launches = operations * (num_tensors if implementation == "for_loop" else rounds)
    update = Kernel("optimizer", 0.0, float(moved_bytes), "fp32", (), launches)
    return (update, *cast_kernels(numel, state_dtype, "bf16")) if low_precision_copy else (update,)


def cast_kernels(numel: int, from_dtype: str, to_dtype: str) -> tuple[Kernel, ...]:
    """Kernel that reads `numel` elements of one type and writes them as another."""
    return _copy_kernel(numel * (DTYPE_BYTES[from_dtype] + DTYPE_BYTES[to_dtype]))


def copy_kernels(num_bytes: int, launches: int = 1, read_factor: float = 1.0) -> tuple[Kernel, ...]:
    """Device-to-device copy that writes `num_bytes` and reads `read_factor` times as many.

    0.5 is a cast up from bf16 to fp32, 2 an addition in place (reads both, writes one).
    """
    return _copy_kernel(num_bytes * (1 + read_factor), launches)


def fill_kernels(num_bytes: int) -> tuple[Kernel, ...]:
    """Kernel that writes `num_bytes` of zeros."""
    return _copy_kernel(num_bytes)


def accumulate_kernels(numel: int, into_dtype: str, from_dtype: str) -> tuple[Kernel, ...]:
    """Kernel of `into += from` (gradient accumulation): reads both, writes `into`."""
    if numel == 0:
        return ()
    num_bytes = numel * (2 * DTYPE_BYTES[into_dtype] + DTYPE_BYTES[from_dtype])
    return (Kernel("elementwise", 0.0, float(num_bytes), "fp32"),)


def cat_launches(num_tensors: int) -> int:
    """Launches of one torch.cat of `num_tensors` contiguous tensors."""
    return ceil(num_tensors / _TENSORS_PER_CAT)


def norm_kernels(numel: int, dtype: str = "fp32", num_tensors: int = 1) -> tuple[Kernel, ...]:
    """Kernels of the gradient norm: every gradient read once, then the norm of the tensors' norms.

    Launches: `_foreach_norm` runs two per round of multi_tensor_apply (read, clean up), then `stack` and
    `norm`.
    """
    if numel == 0:
        return ()
    rounds = max(ceil(numel / _ELEMENTS_PER_LAUNCH), 1)
    num_bytes = numel * DTYPE_BYTES[dtype] + 8 * num_tensors
    return (Kernel("elementwise", 0.0, float(num_bytes), "fp32", (), 2 * rounds + 2),)


def scale_kernels(numel: int, dtype: str = "fp32", num_tensors: int = 1) -> tuple[Kernel, ...]:
    """Kernels of clipping: every gradient read, multiplied and written (`_foreach_mul_`)."""
    if numel == 0:
        return ()
    rounds = max(ceil(numel / _ELEMENTS_PER_LAUNCH), 1)
    num_bytes = 2 * numel * DTYPE_BYTES[dtype]
    return (Kernel("elementwise", 0.0, float(num_bytes), "fp32", (), rounds),)


def _copy_kernel(num_bytes: float, launches: int = 1) -> tuple[Kernel, ...]:
    return (Kernel("copy", 0.0, float(num_bytes), launches=max(launches, 1)),) if num_bytes else ()
