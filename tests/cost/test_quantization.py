"""ZeRO++'s groups and kernels."""

from __future__ import annotations

import math

import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.quantization import (
    dequantize_kernels,
    gradient_groups,
    quantize_kernels,
    reduce_kernels,
    sum_kernels,
    swizzle_kernels,
    weight_groups,
)


def deepspeeds_groups(numel: int) -> int | None:
    """CUDAQuantizer.quantize of DeepSpeed 0.19.8, step by step."""
    groups = math.ceil(numel / 8000)
    while groups < numel and numel % (8 * groups):
        groups += 1
    while numel % (16 * groups) == 0 and numel / groups > 8000:
        groups *= 2
    is_allowed = numel % (8 * groups) == 0 and numel / groups < 16000 and numel > groups
    return groups if is_allowed else None


def moved(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.hbm_bytes for kernel in kernels)


@pytest.mark.parametrize(("start", "step"), [(1, 1), (7_990, 1), (63_960, 8), (8 * 3_990, 8)])
def test_groups_of_weights_are_deepspeeds(start: int, step: int) -> None:
    for numel in range(start, start + 60 * step, step):
        assert weight_groups(numel) == deepspeeds_groups(numel)


def test_a_shard_that_is_no_multiple_of_8_has_no_groups() -> None:
    assert weight_groups(4095) is None
    assert weight_groups(4096) == 1


def test_a_shard_of_a_large_prime_is_cut_into_eights() -> None:
    """8 x 100,003: no divisor between 1 and 1,000 eighths."""
    assert weight_groups(8 * 100_003) == 100_003


def test_gradients_have_as_many_groups_as_their_longer_side() -> None:
    """Or as there are GPUs; what goes between nodes has one for each of the node's GPUs fewer."""
    assert gradient_groups((4096, 14336), 32, 8) == (14336, 1792)
    assert gradient_groups((16, 16), 32, 8) == (32, 4)


def test_weights_are_read_in_two_bytes_and_written_in_one() -> None:
    """8,000 elements in one group: 2 + 1 bytes each and a scale of 4. From bf16, a cast of 2 + 2 before."""
    assert moved(quantize_kernels(8000, "fp16", 1)) == 24_004
    assert moved(quantize_kernels(8000, "bf16", 1)) == 24_004 + 32_000
    assert moved(quantize_kernels(8000, "bf16", 1, casts=False)) == 24_004
    assert moved(dequantize_kernels(8000, 1)) == 24_004


def test_gradients_cross_in_half_a_byte() -> None:
    """1,024 elements on 2 nodes of 4 GPUs, 16 groups inside and 4 across. Quantising reads 2,048 bytes and
    writes 512 and 16 scales; the reduction reads 512, writes 128, and 20 scales; the end reads 128 and 4
    scales and writes 512, then adds two pieces of 128 elements (256 + 256, then 3 x 256) and halves them
    (2 x 256)."""
    assert moved(swizzle_kernels(1024, 16)) == 2048 + 512 + 64
    assert moved(reduce_kernels(1024, 4, (16, 4))) == 512 + 128 + 80
    assert moved(sum_kernels(256, 2, 4)) == 128 + 512 + 16 + 5 * 256 + 2 * 256
    assert [kernel.launches for kernel in sum_kernels(256, 2, 4)] == [1, 3]


def test_locos_errors_are_read_and_written_in_fp16() -> None:
    assert moved(swizzle_kernels(1024, 16, has_error=True)) - moved(swizzle_kernels(1024, 16)) == 4096
    plain, with_error = (reduce_kernels(1024, 4, (16, 4), has_error=flag) for flag in (False, True))
    assert moved(with_error) - moved(plain) == 4 * 256
