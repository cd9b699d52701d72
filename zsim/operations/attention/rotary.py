"""Kernels in front of attention's core: rotary positions of queries and keys, and copies.

# [Note: rotation by document]
Megatron-Core rotates packed documents without Transformer Engine's kernel one after the other, as each counts
its positions from 0 (core 0.19.0 core/models/common/embeddings/rope_utils.py `_apply_rotary_pos_emb_thd`).
Per tensor and document, counted with a dispatch mode: forward the kernels of a whole sequence, three each for
cosines and sines, and a copy into the output. Backward the copy's gradient copies the gradient of the whole
tensor, then reads the document's part and fills it with zeros (four kernels), before the seven of a whole
sequence. At the end the parts are concatenated.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.elementwise import (
    LATENT_HEADS,
    PARTLY_ROTATED,
    ROTARY_EAGER,
    ROTARY_FUSED,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.layer_kernels import Passes
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention.core import AttentionCore

_DOCUMENT_LAUNCHES = (7, 4)  # beyond those of a whole sequence, forward and backward
_DOCUMENT_TENSORS = (2, 7)


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
    if scaled_rotary is not None and (spec.scales_rotary or options.layers.has_eager_rotary):
        return _eager_rotary(spec, shape, options, scaled_rotary[direction], direction)
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


def _eager_rotary(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, passes: Passes, direction: int
) -> tuple[Kernel, ...]:
    """The kernels of `passes` over queries and over keys, of each document where they are packed. Latent
    attention has one head of keys to rotate, and joins it with the others. Keys of an earlier layer are
    rotated there."""
    e, dtype, documents = options.activation_bytes, options.kernel_dtype, round(shape.documents)
    if options.layers.rotates_by_document and documents and passes.strided is not None:
        passes = Passes(
            passes.tensors + _DOCUMENT_TENSORS[direction] + 2 * direction * documents,
            (passes.launches + _DOCUMENT_LAUNCHES[direction]) * documents,
            replace(passes.strided, launches=passes.strided.launches * documents),
        )
    width, keys = spec.qk_head_dim, spec.num_kv_heads
    if is_latent := spec.is_latent and spec.rotary_width is not None:
        width, keys = spec.rotary_width, 1
    kernels = [
        kernel
        for heads in ((spec.num_heads,) if spec.reads_keys else (spec.num_heads, keys))
        for kernel in passes.kernels(shape.tokens * heads * width, e, dtype)
    ]
    if is_latent:
        elements = shape.tokens * (spec.num_heads + spec.num_kv_heads) * spec.qk_head_dim
        kernels += LATENT_HEADS[direction].kernels(elements, e, dtype)
    return tuple(kernels)


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
