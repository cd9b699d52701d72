"""The tensors that the bytes of a module are made of: the sizes that an allocator is asked for.

`zsim.cost.memory.activations` counts bytes. Here its sums are cut into the tensors that they are sums of.
Bytes that no rule covers stay one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.cost.kernels.adapters import product_type
from zsim.cost.kernels.attention import (
    input_elements,
    key_value_elements,
    output_elements,
    query_elements,
    unpads,
)
from zsim.cost.kernels.losses import log_probabilities
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.memory.activations import (
    backward_extra_bytes,
    expands_groups,
    forward_extra_bytes,
    saved_bytes,
)
from zsim.cost.memory.context import backward_tensors, forward_tensors, saved_tensors
from zsim.cost.memory.experts import (
    ExpertWork,
    expert_backward_tensors,
    expert_forward_tensors,
    expert_saved_tensors,
)
from zsim.cost.memory.saved import saved_bytes_per_score, score_bytes
from zsim.cost.memory.traced import traced_backward_tensors, traced_forward_tensors, traced_saved_tensors
from zsim.specs.model.spec import Activation, Attention, Linear, Loss, Module, Norm
from zsim.specs.model.traced import TracedModule

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Bytes of each tensor of a module."""

    saved: Sizes = ()
    """Tensors kept from forward to backward."""
    forward: Sizes = ()
    """Temporaries of forward."""
    backward: Sizes = ()
    """Temporaries of backward."""


def module_tensors(module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
    """The tensors whose bytes `saved_bytes`, `forward_extra_bytes` and `backward_extra_bytes` count."""
    if isinstance(module.op_spec, TracedModule):
        return ModuleTensors(
            traced_saved_tensors(module.op_spec, shape, options),
            traced_forward_tensors(module.op_spec, shape, options),
            traced_backward_tensors(module.op_spec, shape, options),
        )
    saved, forward, backward = _tensor_sizes(module, shape, options)
    return ModuleTensors(
        split_into_tensors(saved_bytes(module, shape, options), saved),
        split_into_tensors(forward_extra_bytes(module, shape, options), forward),
        split_into_tensors(backward_extra_bytes(module, shape, options), backward),
    )


def remove_bytes(sizes: Sizes, count: int) -> Sizes:
    """The tensors that remain of `sizes` after removing `count` bytes: full tensors first, the largest before
    the others, and the remaining bytes from the sum.
    """
    remaining = list(sizes)
    for size in sorted(sizes, reverse=True):
        if size <= count:
            remaining.remove(size)
            count -= size
    return split_into_tensors(max(0, sum(remaining) - count), remaining)


def split_into_tensors(count: int, sizes: Iterable[int]) -> Sizes:
    """`count` bytes cut into tensors of `sizes`, as far as they fit. The remaining bytes are one more
    tensor.
    """
    pieces = []
    for size in sizes:
        if 0 < size <= count:
            pieces.append(size)
            count -= size
    return (*pieces, count) if count else tuple(pieces)


def _tensor_sizes(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Sizes, Sizes, Sizes]:
    work, tokens, e = module.op_spec, shape.tokens, options.activation_bytes
    if isinstance(work, Linear):
        e = product_type(work, options)[0]
        input_bytes, output_bytes = tokens * work.in_features * e, tokens * work.out_features * e
        shards = work.overlapped_collectives.input_shards if work.overlapped_collectives else 1
        weight = work.in_features * work.out_features * e if options.autocast else 0
        gathered = input_bytes if shards > 1 else 0
        gathered_inputs = (input_bytes,) if work.holds_gathered_input else ()
        return (
            (input_bytes // shards, weight),
            (output_bytes, *gathered_inputs),
            (output_bytes, input_bytes, gathered, weight),
        )
    if isinstance(work, Norm):
        low, high = tokens * work.width * options.stream_bytes, tokens * work.width * 4
        if work.kind == "layer" or options.fuses_kernels:
            return (), (), (low, low)
        return (high,), (low,), (low, low, high, high)
    if isinstance(work, Activation):
        tensor_bytes = tokens * work.width * e
        return (tensor_bytes,) * 8, (tensor_bytes,), (tensor_bytes,) * 3
    if isinstance(work, Loss):
        logits = tokens * work.vocab_size
        saved = log_probabilities(logits, options) if options.cross_entropy == "autocast" else ()
        return saved, (4 * logits,), (4 * logits,)
    if isinstance(work, Attention) and work.context is not None:
        saved = saved_tensors(work, shape, options)
        return saved, forward_tensors(work, shape, options), backward_tensors(work, shape, options)
    if isinstance(work, Attention):
        q, k = tokens * query_elements(work) * e, tokens * key_value_elements(work) // 2 * e
        out = tokens * output_elements(work) * e
        if options.attention == "math":
            repeated_sizes = (q, q, tokens * work.num_heads * work.v_head_dim * e)
            scores = tuple(
                score_bytes(work, shape, bytes_per_score)
                for bytes_per_score in saved_bytes_per_score(work, options)
            )
            gradients = (out, q, k, k)
            half = (backward_extra_bytes(module, shape, options) - sum(gradients)) // 2
            rotated = (q, q) if work.rotary and not options.fuses_kernels else ()
            temporaries = (score_bytes(work, shape, e),) * 2
            return (*repeated_sizes, *scores), (out, *rotated, *temporaries), (*gradients, half, half)
        if unpads(work, options):
            inputs, summed = tokens * input_elements(work) * e, tokens * output_elements(work) * max(e, 4)
            return (inputs, out), (inputs, summed), (out, inputs)
        expanded = (q, q) if expands_groups(work, options) else ()
        return (q, k, k, q, k), (out, q, q), (out, q, k, k, *expanded)
    if isinstance(work, ExpertWork):
        saved = expert_saved_tensors(module, shape, options)
        return (
            saved,
            expert_forward_tensors(work, shape, options),
            expert_backward_tensors(work, shape, options),
        )
    return (), (), ()
