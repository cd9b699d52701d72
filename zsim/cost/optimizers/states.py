"""Bytes of the state tensors that an optimizer makes for one tensor.

All rules are functions of the tensor's part on the rank (`Updated`) and of the type it is stored in. Scalars
(the step's number, 4 bytes a tensor) are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from zsim.cost.optimizers.tensors import Updated
from zsim.dtypes import DTYPE_BYTES

StateRule = Callable[[Updated, str], tuple[int, ...]]

_SMALLEST_QUANTISED = 4096  # elements; bitsandbytes `min_8bit_size`, torchao `_new_buffer`
_FP32 = 4


def in_stored_type(count: int) -> StateRule:
    """`count` tensors like the parameter, in its type: torch.optim's moments."""

    def rule(tensor: Updated, dtype: str) -> tuple[int, ...]:
        return (tensor.numel * DTYPE_BYTES[dtype],) * count

    return rule


def in_type(count: int, state_dtype: str) -> StateRule:
    """`count` tensors like the parameter, in a type of their own."""

    def rule(tensor: Updated, dtype: str) -> tuple[int, ...]:
        return (tensor.numel * DTYPE_BYTES[state_dtype],) * count

    return rule


def bitsandbytes_8bit(count: int) -> StateRule:
    """`count` moments of a byte an element and, per block of 256 elements, an fp32 maximum; below 4,096
    elements in fp32. The two quantisation maps are one for all tensors (1 KiB each, left out).

    Source: bitsandbytes 0.50.2 optim/optimizer.py, `Optimizer2State.init_state`, `Optimizer1State.init_state`
    (Dettmers et al. 2022, arXiv 2110.02861).
    """

    def rule(tensor: Updated, dtype: str) -> tuple[int, ...]:
        numel = tensor.numel
        if numel < _SMALLEST_QUANTISED:
            return (numel * _FP32,) * count
        return (numel, ceil(numel / 256) * _FP32) * count

    return rule


def torchao(bits: int, block: int, map_bytes: int) -> StateRule:
    """Two moments of `bits` bits an element, each with an fp32 scale per `block` elements and a quantisation
    map of its own; a part of fewer than 4,096 elements, or one that the block does not divide, stays in the
    parameter's type.

    Source: torchao 0.18.0 optim/adam.py `_AdamBase._new_buffer`, subclass_8bit.py, subclass_4bit.py,
    subclass_fp8.py.
    """

    def rule(tensor: Updated, dtype: str) -> tuple[int, ...]:
        numel = tensor.numel
        if numel < _SMALLEST_QUANTISED or numel % block:
            return (numel * DTYPE_BYTES[dtype],) * 2
        one = (numel * bits // 8, numel // block * _FP32, map_bytes)
        return tuple(size for size in one if size) * 2

    return rule


def factored(state_dtype: str | None = None) -> StateRule:
    """A row and a column of the second moment (Shazeer and Stern 2018, arXiv 1804.04235, section 3), over the
    last two dimensions; of a vector the whole second moment. In the gradient's type, or in `state_dtype`.

    Source: torch 2.13 optim/_adafactor.py `_init_group` (the gradient's type); transformers 5.23
    optimization.py `Adafactor.step` (fp32).
    """

    def rule(tensor: Updated, dtype: str) -> tuple[int, ...]:
        element, shape = DTYPE_BYTES[state_dtype or dtype], tensor.shape
        if len(shape) < 2:
            return (tensor.numel * element,)
        return prod(shape[:-1]) * element, prod((*shape[:-2], shape[-1])) * element

    return rule


def momentum_of_matrices(tensor: Updated, dtype: str) -> tuple[int, ...]:
    """Muon: a momentum for a matrix, AdamW's two moments for every other tensor.

    Source: torch 2.13 optim/_muon.py `_init_group`; its documentation leaves vectors, embeddings and the head
    to AdamW.
    """
    return (tensor.numel * DTYPE_BYTES[dtype],) * (1 if tensor.is_matrix else 2)
