"""Bytes of parameters in the type they are kept in."""

from __future__ import annotations

from zsim.cost.kernels import int8
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.operation import Parameter

_BLOCK, _SCALE_BLOCK = 64, 256
_MAP_BYTES, _SCALE_MAP_BYTES, _OFFSET_BYTES = 16 * 4, 256 * 4, 4


def stored_bytes(parameter: Parameter, dtype: str, numel: int | None = None) -> int:
    """Bytes of a parameter, or of `numel` elements of it, in its own type, or else in `dtype`. 4-bit weights
    are two to a byte (bitsandbytes 0.50.2 functional.py `quantize_4bit`)."""
    count = parameter.numel if numel is None else numel
    return -(-count // 2) if parameter.is_packed else count * DTYPE_BYTES[parameter.stored_dtype or dtype]


def flat_numel(parameter: Parameter) -> int:
    """Elements of a parameter as a framework flattens or partitions it: 4-bit weights are kept as 16-bit
    numbers (`bnb_4bit_quant_storage`)."""
    return -(-parameter.numel // 4) if parameter.is_packed else parameter.numel


def quantisation_bytes(parameter: Parameter) -> int:
    """Bytes that come with a quantised weight and are no parameter, so that every rank has all of them.

    In 4 bits they are a scale for 64 elements, and the map of the 16 values. The scale is fp32. If it is
    quantised again, it is a byte, with an fp32 scale for 256 of them, their map and their mean. An 8-bit
    weight has a scale for a row. Source: bitsandbytes 0.50.2 functional.py `quantize_4bit`, `QuantState`.
    """
    if parameter.stored_dtype == int8.TYPE:
        return int8.scale_bytes(parameter.shape[0])
    if not parameter.is_packed:
        return 0
    scales = -(-parameter.numel // _BLOCK)
    if parameter.stored_dtype != "nf4":
        return 4 * scales + _MAP_BYTES
    return scales + 4 * -(-scales // _SCALE_BLOCK) + _MAP_BYTES + _SCALE_MAP_BYTES + _OFFSET_BYTES
