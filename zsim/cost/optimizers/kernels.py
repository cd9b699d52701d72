"""The kernels of an update, for every optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import OptimizerImplementation, cast_kernels, optimizer_kernels
from zsim.cost.optimizers.muon import elementwise_kernels, orthogonalisation_kernels
from zsim.cost.optimizers.states import EXTRA, state_tensors
from zsim.cost.optimizers.tensors import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.strategy.optimizers import optimizer_of

Kernels = tuple[Kernel, ...]


def update_kernels(
    name: str,
    tensors: Sequence[UpdatedTensor],
    implementation: OptimizerImplementation = "fused",
    *,
    gradient_dtype: str = "fp32",
    stored_dtype: str = "fp32",
    low_precision_copy: bool = False,
) -> Kernels:
    """The update of `tensors`, which are stored in `stored_dtype`. With `low_precision_copy` a cast writes
    16-bit weights afterwards. An unsharded matrix is orthogonalised by Muon here. Matrices in parts are the
    plan's work.

    Raises what `optimizer_of` raises.
    """
    numel = sum(tensor.numel for tensor in tensors)
    if not numel:
        return ()
    optimizer = optimizer_of(name)
    if optimizer.is_torch_list:
        return optimizer_kernels(
            numel, name, implementation, num_tensors=len(tensors), gradient_dtype=gradient_dtype,
            state_dtype=stored_dtype, low_precision_copy=low_precision_copy,
        )  # fmt: skip
    casts = cast_kernels(numel, stored_dtype, "bf16") if low_precision_copy else ()
    if name == "muon":
        return (*_muon(tensors, implementation, gradient_dtype, stored_dtype), *casts)
    master, gradient = DTYPE_BYTES[stored_dtype], DTYPE_BYTES[gradient_dtype]
    passes, readings, kernels = EXTRA.get(name, (0, 0, 0))
    moved_bytes = numel * ((2 + passes) * master + (1 + readings) * gradient)
    moved_bytes += 2 * sum(state_tensors(name, tensors, stored_dtype))
    launches = 1 if optimizer.launches == "per list" else len(tensors) * (1 + kernels)
    return (Kernel("optimizer", 0.0, float(moved_bytes), "fp32", (), launches), *casts)


def _muon(
    tensors: Sequence[UpdatedTensor],
    implementation: OptimizerImplementation,
    gradient_dtype: str,
    stored_dtype: str,
) -> Kernels:
    """Each matrix by itself (torch has no foreach for Muon), the rest by AdamW."""
    kernels: list[Kernel] = []
    for tensor in tensors:
        if tensor.is_matrix:
            kernels += elementwise_kernels(tensor.numel, stored_dtype, gradient_dtype)
            kernels += orthogonalisation_kernels(tensor.shape[0], tensor.shape[1])
    vectors = [tensor for tensor in tensors if not tensor.is_matrix]
    adamw_kernels = optimizer_kernels(
        sum(tensor.numel for tensor in vectors), "adamw", implementation, num_tensors=len(vectors),
        gradient_dtype=gradient_dtype, state_dtype=stored_dtype,
    )  # fmt: skip
    return (*kernels, *adamw_kernels)
