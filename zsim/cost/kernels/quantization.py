"""ZeRO++'s quantisation: the number of groups with a scale, and the bytes that the kernels move.

Read in DeepSpeed 0.19.8: CUDAQuantizer (`runtime/zero/partition_parameters.py`), all_to_all_quant_reduce
(`runtime/comm/coalesced_collectives.py`) and the kernels in `csrc/quantization`. All of them work on fp16 and
keep one fp32 scale per group. They read and write each element once, so they are bound by HBM.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import cast_kernels

SCALE_BYTES = 4
_TARGET_GROUP = 8000  # CUDAQuantizer.target_group_size
_LONGEST_GROUP = _TARGET_GROUP // 8  # in multiples of 8 elements


def weight_groups(numel: int) -> int | None:
    """Number of groups of an int8 all-gather's input of `numel` elements. None where DeepSpeed asserts.

    The minimum number of equal groups whose length is a multiple of 8 and at most 8,000 elements. `numel`
    must be a multiple of 8.
    """
    if numel <= 0 or numel % 8:
        return None
    eighths = numel // 8
    longest = min(eighths // -(-numel // _TARGET_GROUP), _LONGEST_GROUP)
    length = next(length for length in range(longest, 0, -1) if eighths % length == 0)
    return eighths // length


def gradient_groups(shape: tuple[int, ...], world_size: int, gpus_per_node: int) -> tuple[int, int]:
    """Groups of the gradient sent to the node's GPUs, and groups of the reduced gradient sent to the other
    nodes."""
    inside = max(shape[0], shape[1], world_size)
    return inside, inside // gpus_per_node


def quantize_kernels(numel: int, dtype: str, groups: int, *, casts: bool = True) -> tuple[Kernel, ...]:
    """Quantise `numel` elements to int8, by way of fp16. `casts` is true of DeepSpeed since 0.19.6. Before,
    it read the bits of other types as fp16.
    """
    cast = cast_kernels(numel, dtype, "fp16") if casts and dtype != "fp16" else ()
    return (*cast, _kernel(numel * (2 + 1) + groups * SCALE_BYTES))


def dequantize_kernels(numel: int, groups: int) -> tuple[Kernel, ...]:
    """Dequantise `numel` int8 elements to fp16."""
    return (_kernel(numel * (1 + 2) + groups * SCALE_BYTES),)


def swizzle_kernels(numel: int, groups: int, *, has_error: bool = False) -> tuple[Kernel, ...]:
    """Quantise `numel` fp16 elements to int4, in the order in which the GPUs of the node get them. With
    `has_error` LoCo's error is added, and the remaining error written back.
    """
    errors = 2 * 2 * numel if has_error else 0
    return (_kernel(numel * 2 + numel // 2 + groups * SCALE_BYTES + errors),)


def reduce_kernels(
    numel: int, gpus_per_node: int, groups: tuple[int, int], *, has_error: bool = False
) -> tuple[Kernel, ...]:
    """Dequantise the node's `gpus_per_node` int4 pieces (`numel` elements in all), add them up and quantise
    the sum."""
    pieces, reduced = numel // 2, numel // gpus_per_node
    errors = 2 * 2 * reduced if has_error else 0
    return (_kernel(pieces + reduced // 2 + sum(groups) * SCALE_BYTES + errors),)


def sum_kernels(numel: int, num_nodes: int, groups: int) -> tuple[Kernel, ...]:
    """Dequantise the nodes' int4 pieces (`numel` elements in all) to fp16, add them up, one kernel per piece,
    and take the mean."""
    shard = numel // num_nodes
    additions = 2 * (2 + 3 * (num_nodes - 1)) * shard
    return (
        _kernel(numel // 2 + numel * 2 + groups * SCALE_BYTES),
        Kernel("elementwise", 0.0, float(additions + 2 * 2 * shard), "fp16", (), num_nodes + 1),
    )


def _kernel(num_bytes: int) -> Kernel:
    return Kernel("elementwise", 0.0, float(num_bytes), "fp16")
