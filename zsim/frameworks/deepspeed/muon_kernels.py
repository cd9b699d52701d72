"""The work of DeepSpeed's own Muon on one matrix.

DeepSpeed 0.19.8 runtime/zero/muon/original_muon.py `muon_update`, compiled. For an m x n matrix with m < n
its default ("gram") iterates on R = X X^T, in fp16, five rounds with one restart:

    rounds 1 and 3 take 3 products m x m x m, round 2 takes 2, round 4 takes 4, round 5 takes 2
    X X^T twice, Q X before the restart and at the end: 4 products of 2 m^2 n FLOPs

so 8 m^2 n + 28 m^3 FLOPs. Square matrices, and "standard" in bf16, take torch's five rounds.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.optimizers import orthogonalisation_kernels, product
from zsim.dtypes import DTYPE_BYTES

Orthogonalisation = Literal["gram", "standard"]
_SQUARES = 14  # products m x m x m of the five rounds


def uses_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether DeepSpeed gives a parameter to Muon (`set_optimizer_flags` of deepspeed/__init__.py)."""
    return len(shape) > 1 and not any(word in name.lower() for word in ("embed", "lm_head"))


def matrix_kernels(
    shape: tuple[int, ...], gradient_dtype: str, method: Orthogonalisation = "gram"
) -> tuple[Kernel, ...]:
    """Momentum, its Nesterov sum and the products of one tensor. For a tensor of more than two dimensions
    they are batched products of its matrices. Momentum has the gradient's type.

    Around the products there are kernels of the compiler's. The check for infinities reads the gradient g.
    Momentum and update have 2 g read, 2 written. The norm reads 1. The division and cast read g and write 2
    bytes. The result is scaled and chosen: this reads 2 bytes and g, and writes g.
    """
    batch, (rows, columns) = prod(shape[:-2]), shape[-2:]
    element, numel = DTYPE_BYTES[gradient_dtype], prod(shape)
    elementwise = Kernel("optimizer", 0.0, float(numel * (8 * element + 4)), "fp32", (), 5)
    products = orthogonalisation_kernels(rows, columns)
    if method == "gram" and rows != columns:
        short, long = sorted((rows, columns))
        gram = product(short, short, long, 0)
        square = product(short, short, short, short * short)
        products = (*(gram,) * 2, *(square,) * _SQUARES, *(product(short, long, short, 0),) * 2)
    dtype = "fp16" if method == "gram" else "bf16"
    return (elementwise, *[_batch_product(replace(kernel, dtype=dtype), batch) for kernel in products])


def _batch_product(kernel: Kernel, batch: int) -> Kernel:
    if batch == 1:
        return kernel
    return replace(kernel, flops=kernel.flops * batch, hbm_bytes=kernel.hbm_bytes * batch, is_batched=True)


def products_flops(shape: tuple[int, ...], method: Orthogonalisation) -> float:
    """FLOPs of a tensor's products."""
    return sum(kernel.flops for kernel in matrix_kernels(shape, "fp32", method))


def step_kernels(numel: int, gradient_dtype: str, stored_dtype: str) -> tuple[Kernel, ...]:
    """The step of a flat partition whose gradients are updates already: decay (reads and writes the weights),
    and a scaled sum (reads both, writes the weights)."""
    weight, gradient = DTYPE_BYTES[stored_dtype], DTYPE_BYTES[gradient_dtype]
    return (Kernel("optimizer", 0.0, float(numel * (4 * weight + gradient)), "fp32", (), 2),)
