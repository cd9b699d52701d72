"""Rotary positions of queries and keys, as kernels in front of attention's core."""

from __future__ import annotations

from zsim.cost.kernels.elementwise import (
    LATENT_HEADS,
    PARTLY_ROTATED,
    ROTARY_EAGER,
    ROTARY_FUSED,
    ROTARY_MEGATRON,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.spec import Attention


def rotary_forward(spec: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the rotary embedding of queries and keys only."""
    return _rotary(spec, shape, options, 0)


def rotary_backward(spec: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the gradient of the rotary embedding."""
    return _rotary(spec, shape, options, 1)


def _rotary(spec: Attention, shape: BatchShape, options: WorkOptions, direction: int) -> tuple[Kernel, ...]:
    if not spec.rotary:
        return ()
    if spec.scales_rotary and options.layers in ("megatron", "megatron-2"):
        rotated = (spec.num_heads, spec.num_kv_heads)
        kernels_per_tensor = [
            ROTARY_MEGATRON[direction].kernels(shape.tokens * n * spec.qk_head_dim, options) for n in rotated
        ]
        return tuple(kernel for kernels in kernels_per_tensor for kernel in kernels)
    passes = (ROTARY_FUSED if options.fuses_kernels else ROTARY_EAGER)[direction]
    elements = (spec.num_heads + spec.num_kv_heads) * spec.qk_head_dim
    launches = passes.launches if options.fuses_kernels else 2 * passes.launches
    moved_elements = passes.tensors * elements
    if spec.rotary_width is not None and not options.fuses_kernels:
        keys = 1 if spec.is_latent else spec.num_kv_heads
        full_head = (LATENT_HEADS if spec.is_latent else PARTLY_ROTATED)[direction]
        moved_elements = (
            passes.tensors * (spec.num_heads + keys) * spec.rotary_width + full_head.tensors * elements
        )
        launches += full_head.launches if spec.is_latent else 2 * full_head.launches
    num_bytes = shape.tokens * moved_elements * options.activation_bytes
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches),)
