"""Bytes of weights in the type they are kept in, and of the tensors that adapters keep for backward."""

from __future__ import annotations

from zsim.cost.kernels.adapters import adapter_bytes
from zsim.cost.kernels.elementwise import freeze_norm_weight, norm_cost
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.model.spec import AdapterInput, AdapterSum, Linear, Module, Norm, Parameter

_BLOCK, _SCALE_BLOCK = 64, 256
_MAP_BYTES, _SCALE_MAP_BYTES, _OFFSET_BYTES = 16 * 4, 256 * 4, 4


def is_packed(parameter: Parameter) -> bool:
    """Whether it is kept in 4 bits."""
    return parameter.stored_dtype.startswith("nf4")


def stored_bytes(parameter: Parameter, dtype: str, numel: int | None = None) -> int:
    """Bytes of a parameter, or of `numel` elements of it, in its own type, or else in `dtype`. 4-bit weights
    are two to a byte (bitsandbytes 0.50.2 functional.py `quantize_4bit`)."""
    count = parameter.numel if numel is None else numel
    return -(-count // 2) if is_packed(parameter) else count * DTYPE_BYTES[parameter.stored_dtype or dtype]


def flat_numel(parameter: Parameter) -> int:
    """Elements of a parameter as a framework flattens or partitions it: 4-bit weights are kept as 16-bit
    numbers (`bnb_4bit_quant_storage`)."""
    return -(-parameter.numel // 4) if is_packed(parameter) else parameter.numel


def quantisation_bytes(parameter: Parameter) -> int:
    """Bytes that come with a 4-bit weight and are no parameter, so that every rank has all of them: a scale
    for 64 elements, and the map of the 16 values. The scale is fp32. If it is quantised again, it is a byte,
    with an fp32 scale for 256 of them, their map and their mean. Source: bitsandbytes 0.50.2 functional.py
    `quantize_4bit`, `QuantState`.
    """
    if not is_packed(parameter):
        return 0
    scales = -(-parameter.numel // _BLOCK)
    if parameter.stored_dtype != "nf4":
        return 4 * scales + _MAP_BYTES
    return scales + 4 * -(-scales // _SCALE_BLOCK) + _MAP_BYTES + _SCALE_MAP_BYTES + _OFFSET_BYTES


def is_dequantised(module: Module) -> bool:
    """Whether its product makes 16-bit weights of 4-bit ones."""
    return any(is_packed(parameter) for parameter in module.parameters)


def cast_bytes(module: Module, shape: BatchShape, *, is_backward: bool) -> int:
    """Bytes of tensors that the casts around a product make, where it is `in_fp32`: its input in 16 bits and
    its output in fp32. In backward they are the gradients of both in fp32, in addition to those in 16 bits.
    """
    spec = module.op_spec
    if not module.in_fp32 or not isinstance(spec, Linear):
        return 0
    input_element = DTYPE_BYTES["fp32"] if is_backward else DTYPE_BYTES["bf16"]
    return shape.tokens * (spec.in_features * input_element + spec.out_features * DTYPE_BYTES["fp32"])


def frozen_saved_bytes(module: Module, shape: BatchShape, options: WorkOptions) -> int | None:
    """Bytes that a module with a frozen weight, or without a backward, keeps. None if it is neither. A
    product keeps its input for the gradient of its weight alone.
    """
    if not module.has_backward:
        return 0
    if module.trains_weight:
        return None
    spec = module.op_spec
    if isinstance(spec, Linear):
        return 0
    if isinstance(spec, Norm):
        cost = norm_cost(spec.kind, options.stream_bytes, is_fused=options.fuses_kernels)
        return shape.tokens * spec.width * freeze_norm_weight(cost, spec.kind, options).saved_bytes
    return None


def adapter_saved_bytes(spec: AdapterInput | AdapterSum, shape: BatchShape, options: WorkOptions) -> int:
    """The mask of dropout, a byte an element. The sum keeps nothing."""
    has_mask = isinstance(spec, AdapterInput) and spec.dropout > 0
    return shape.tokens * spec.width if has_mask else 0


def adapter_temporary_bytes(spec: AdapterInput | AdapterSum, shape: BatchShape, options: WorkOptions) -> int:
    """The input of an adapter as it is cast, with dropout its output too. The sum makes the scaled output and
    the sum, in the wider type, and one more where the sum is cast.
    """
    e = options.activation_bytes
    if isinstance(spec, AdapterInput):
        adapter_element = adapter_bytes(spec, options)
        return (
            shape.tokens
            * spec.width
            * ((adapter_element if adapter_element != e else 0) + (adapter_element if spec.dropout else 0))
        )
    adapter_element = 4 if spec.dtype == "fp32" else e
    return shape.tokens * spec.width * (2 * adapter_element + (e if adapter_element != e else 0))
