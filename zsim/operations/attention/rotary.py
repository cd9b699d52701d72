"""Kernels in front of attention's core: rotary positions of queries and keys, and copies."""

from __future__ import annotations

from zsim.cost.kernels.elementwise import (
    LATENT_HEADS,
    PARTLY_ROTATED,
    ROTARY_EAGER,
    ROTARY_FUSED,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention.core import AttentionCore


def rotary_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the rotary embedding of queries and keys only."""
    return _rotary(spec, shape, options, 0)


def rotary_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the gradient of the rotary embedding."""
    return _rotary(spec, shape, options, 1)


def _rotary(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, direction: int
) -> tuple[Kernel, ...]:
    if not spec.rotary:
        return ()
    scaled_rotary = options.layers.scaled_rotary
    if spec.scales_rotary and scaled_rotary is not None:
        e, dtype = options.activation_bytes, options.kernel_dtype
        kernels_per_tensor = [
            scaled_rotary[direction].kernels(shape.tokens * heads * spec.qk_head_dim, e, dtype)
            for heads in (spec.num_heads, spec.num_kv_heads)
        ]
        return tuple(kernel for kernels in kernels_per_tensor for kernel in kernels)
    passes = (ROTARY_FUSED if options.fuses_kernels else ROTARY_EAGER)[direction]
    groups = 0 if spec.reads_keys else spec.num_kv_heads
    elements = (spec.num_heads + groups) * spec.qk_head_dim
    tensors = 1 if options.fuses_kernels or spec.reads_keys else 2
    launches = tensors * passes.launches
    moved_elements = passes.tensors * elements
    if spec.rotary_width is not None and not options.fuses_kernels:
        keys = 1 if spec.is_latent else groups
        full_head = (LATENT_HEADS if spec.is_latent else PARTLY_ROTATED)[direction]
        moved_elements = (
            passes.tensors * (spec.num_heads + keys) * spec.rotary_width + full_head.tensors * elements
        )
        launches += full_head.launches if spec.is_latent else tensors * full_head.launches
    num_bytes = shape.tokens * moved_elements * options.activation_bytes
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches),)


def layout_kernels(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, direction: int
) -> tuple[Kernel, ...]:
    """nanotron's copies around attention in one direction (0: forward, 1: backward). () of others.

    In elements per token, with i of q, k and v, g of k and v, o of the output: forward makes q, k and v
    contiguous (2 i), concatenates k and v (2 g) and turns them (2 g), and six small kernels count the lengths
    of sequences in q's and k's masks. Backward joins the gradients of k and v (2 g), then those of q, k and v
    (2 i). With several sequences the output, sequence first, is copied by its product forward (2 o), and
    backward for the weight's gradient and on the way back (4 o). Source: nanotron 9055c664, models/llama.py,
    `CausalSelfAttention.forward` and `CoreAttention.forward`.
    """
    if not options.layers.copies_heads:
        return ()
    outputs, inputs, key_value_elements = spec.output_elements, spec.input_elements, spec.key_value_elements
    moved_elements, launches = (
        (2 * inputs + 4 * key_value_elements, 11)
        if direction == 0
        else (2 * inputs + 2 * key_value_elements, 2)
    )
    if shape.sequences > 1:
        moved_elements, launches = moved_elements + (2, 4)[direction] * outputs, launches + 1 + direction
    num_bytes = shape.tokens * moved_elements * options.activation_bytes
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches),)
