"""LLM.int8's kernels, byte by byte, and the rate of products in 8 bits."""

from __future__ import annotations

import pytest

from zsim.cost.kernels.int8 import forward_kernels, scale_bytes, temporary_bytes, weight_kernels
from zsim.cost.rates.gpu import peak_flops_per_second
from zsim.errors import InputError
from zsim.specs.cluster.files import load_gpu

M, N, K = 1000, 300, 200


def test_forward_quantises_multiplies_and_scales() -> None:
    """Of bf16, 200,000 elements are read and written as fp16 (800,000 bytes), compared (9 bytes each, in four
    kernels), quantised (3 each), multiplied (1 each, 60,000 of the weight, 4 for 300,000 sums), scaled (6),
    cast (4), and passed once more for the outliers (4).
    """
    sizes = [kernel.hbm_bytes for kernel in forward_kernels(M, N, K, "bf16")]
    assert sizes == [800_000, 1_800_000, 600_000, 1_460_000, 1_800_000, 1_200_000, 1_200_000]
    (product,) = [kernel for kernel in forward_kernels(M, N, K, "bf16") if kernel.kind == "gemm"]
    assert (product.flops, product.dtype) == (120e6, "int8")


def test_fp16_needs_no_casts() -> None:
    assert len(forward_kernels(M, N, K, "fp16")) == len(forward_kernels(M, N, K, "bf16")) - 2


def test_backward_makes_the_weight_again() -> None:
    """A byte is read and two written, and then two read and written, of 60,000 elements."""
    (kernel,) = weight_kernels(N, K, 2)
    assert (kernel.hbm_bytes, kernel.launches) == (7 * 60_000, 2)
    assert scale_bytes(N) == 1200
    assert temporary_bytes(M, N, K) == 1000 * (200 * 3 + 300 * 6)


def test_a_gpu_has_int8_of_its_own_or_as_fast_as_fp8() -> None:
    rates = {name: peak_flops_per_second(load_gpu(name), "int8") for name in ("a100-sxm-80gb", "t4-16gb")}
    assert rates == {"a100-sxm-80gb": 624e12, "t4-16gb": 130e12}
    assert peak_flops_per_second(load_gpu("h100-sxm-80gb"), "int8") == 1978.9e12
    with pytest.raises(InputError, match="'v100-sxm2-32gb' has no int8 arithmetic"):
        peak_flops_per_second(load_gpu("v100-sxm2-32gb"), "int8")
