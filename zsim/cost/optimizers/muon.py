"""Muon's Newton-Schulz products, and the work of one matrix's update.

torch 2.13 optim/_muon.py `_single_tensor_muon` and `_zeropower_via_newtonschulz`: momentum, its Nesterov sum,
a cast to bf16, a norm and a division, then five rounds of

    A = X X^T
    B = b A + c A A
    X = a X + B X

of an m x n matrix with m <= n (a tall one is transposed before), so 5 (4 m^2 n + 2 m^3) FLOPs in bf16.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.dtypes import DTYPE_BYTES

STEPS = 5  # DEFAULT_NS_STEPS


def orthogonalisation_kernels(rows: int, columns: int) -> tuple[Kernel, ...]:
    """The five rounds on a whole matrix."""
    short, long = sorted((rows, columns))
    return iteration_kernels(short, long) * STEPS


def iteration_kernels(short: int, long: int) -> tuple[Kernel, Kernel, Kernel]:
    """The three products of a round on X, `short x long`."""
    gram = product(short, short, long, 0)
    update = product(short, short, short, short * short)
    return gram, update, product(short, long, short, short * long)


def elementwise_kernels(numel: int, stored_dtype: str, gradient_dtype: str) -> tuple[Kernel, ...]:
    """Everything around the products, for `numel` elements: `buf.lerp_(grad)`, `grad.lerp(buf)`, the cast to
    bf16, the norm, the division, decay of the weights, the scaled add."""
    p, g, low = DTYPE_BYTES[stored_dtype], DTYPE_BYTES[gradient_dtype], 2
    momentum = 2 * p + g + (2 * g + p)
    bytes_per_element = momentum + (g + low) + low + 2 * low + 2 * p + (2 * p + low)
    return (Kernel("optimizer", 0.0, float(numel * bytes_per_element), "fp32", (), 8),)


def product(m: int, n: int, k: int, added: int) -> Kernel:
    """m x k by k x n in bf16, plus a tensor of `added` elements read for `addmm`."""
    m, n, k = max(m, 1), max(n, 1), max(k, 1)
    return Kernel("gemm", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n + added), "bf16", (m, n, k), 1)
