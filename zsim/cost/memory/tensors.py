"""The tensors that the bytes of a module are made of: the sizes that an allocator is asked for.

`zsim.cost.memory.activations` counts bytes. Here its sums are cut into the tensors that they are sums of.
Bytes that no rule covers stay one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from zsim.cost.memory.context import backward_tensors, forward_tensors, kept_tensors
from zsim.cost.memory.experts import ExpertWork, kept_by_experts, made_by_experts, passing_by_experts
from zsim.cost.memory.saved import kept_per_score, score_bytes
from zsim.cost.memory.traced import kept_by_traced, made_by_traced, passing_by_traced
from zsim.dataclass import dataclass
from zsim.specs.model.spec import Activation, Attention, Linear, Loss, Module, Norm
from zsim.specs.model.traced import Traced

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
    if isinstance(module.work, Traced):
        return ModuleTensors(
            kept_by_traced(module.work, shape, options),
            made_by_traced(module.work, shape, options),
            passing_by_traced(module.work, shape, options),
        )
    saved, forward, backward = _rules(module, shape, options)
    return ModuleTensors(
        cut(saved_bytes(module, shape, options), saved),
        cut(forward_extra_bytes(module, shape, options), forward),
        cut(backward_extra_bytes(module, shape, options), backward),
    )


def without(sizes: Sizes, count: int) -> Sizes:
    """The tensors that remain of `sizes` after removing `count` bytes: full tensors first, the largest before
    the others, and the remaining bytes from the sum.
    """
    left = list(sizes)
    for size in sorted(sizes, reverse=True):
        if size <= count:
            left.remove(size)
            count -= size
    return cut(max(0, sum(left) - count), left)


def cut(count: int, sizes: Iterable[int]) -> Sizes:
    """`count` bytes cut into tensors of `sizes`, as far as they fit. The remaining bytes are one more
    tensor.
    """
    pieces = []
    for size in sizes:
        if 0 < size <= count:
            pieces.append(size)
            count -= size
    return (*pieces, count) if count else tuple(pieces)


def _rules(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Sizes, Sizes, Sizes]:
    work, tokens, e = module.work, shape.tokens, options.activation_bytes
    if isinstance(work, Linear):
        e = product_type(work, options)[0]
        given, made = tokens * work.in_features * e, tokens * work.out_features * e
        shards = work.beneath.input_shards if work.beneath else 1
        weight = work.in_features * work.out_features * e if options.autocast else 0
        gathered = given if shards > 1 else 0
        held = (given,) if work.holds_gathered else ()
        return (given // shards, weight), (made, *held), (made, given, gathered, weight)
    if isinstance(work, Norm):
        low, high = tokens * work.width * options.stream_bytes, tokens * work.width * 4
        if work.kind == "layer" or options.fuses_kernels:
            return (), (), (low, low)
        return (high,), (low,), (low, low, high, high)
    if isinstance(work, Activation):
        one = tokens * work.width * e
        return (one,) * 8, (one,), (one,) * 3
    if isinstance(work, Loss):
        logits = tokens * work.vocab_size
        kept = log_probabilities(logits, options) if options.cross_entropy == "autocast" else ()
        return kept, (4 * logits,), (4 * logits,)
    if isinstance(work, Attention) and work.context is not None:
        kept = kept_tensors(work, shape, options)
        return kept, forward_tensors(work, shape, options), backward_tensors(work, shape, options)
    if isinstance(work, Attention):
        q, k = tokens * query_elements(work) * e, tokens * key_value_elements(work) // 2 * e
        out = tokens * output_elements(work) * e
        if options.attention == "math":
            repeated = (q, q, tokens * work.num_heads * work.v_head_dim * e)
            scores = tuple(score_bytes(work, shape, each) for each in kept_per_score(work, options))
            gradients = (out, q, k, k)
            half = (backward_extra_bytes(module, shape, options) - sum(gradients)) // 2
            rotated = (q, q) if work.rotary and not options.fuses_kernels else ()
            passing = (score_bytes(work, shape, e),) * 2
            return (*repeated, *scores), (out, *rotated, *passing), (*gradients, half, half)
        if unpads(work, options):
            inputs, summed = tokens * input_elements(work) * e, tokens * output_elements(work) * max(e, 4)
            return (inputs, out), (inputs, summed), (out, inputs)
        expanded = (q, q) if expands_groups(work, options) else ()
        return (q, k, k, q, k), (out, q, q), (out, q, k, k, *expanded)
    if isinstance(work, ExpertWork):
        kept = kept_by_experts(module, shape, options)
        return kept, made_by_experts(work, shape, options), passing_by_experts(work, shape, options)
    return (), (), ()
