"""Bytes that forward keeps for backward, by the kind of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.cost.kernels.adapters import product_type
from zsim.cost.kernels.attention import (
    LOGSUMEXP_BYTES,
    input_elements,
    output_elements,
    query_elements,
    unpads,
)
from zsim.cost.kernels.elementwise import activation_cost_of, norm_cost
from zsim.cost.kernels.losses import saved_bytes_per_logit
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.memory.adapters import adapter_saved_bytes
from zsim.cost.memory.context import saved_tensors
from zsim.specs.model.spec import (
    Activation,
    AdapterInput,
    AdapterSum,
    Attention,
    Embedding,
    Exchange,
    Linear,
    Loss,
    Norm,
    Residual,
)

INDEX_BYTES = 8


def _linear_saved(spec: Linear, shape: BatchShape, options: WorkOptions) -> int:
    """The input, and under autocast (fp32 weights) also the cast copy of the weight."""
    weight = spec.in_features * spec.out_features if options.autocast else 0
    local_tokens = shape.tokens // (
        spec.overlapped_collectives.input_shards if spec.overlapped_collectives else 1
    )
    return (local_tokens * spec.in_features + weight) * product_type(spec, options)[0]


def _norm_saved(spec: Norm, shape: BatchShape, options: WorkOptions) -> int:
    cost = norm_cost(spec.kind, options.stream_bytes, is_fused=options.fuses_kernels)
    return shape.tokens * spec.width * cost.saved_bytes


def keeps_fused_projection(spec: Attention, options: WorkOptions) -> bool:
    """Whether the full fused projection stays alive for the sake of v, its slice, next to the new q and k
    that the rotary embedding makes.
    """
    return spec.rotary and spec.splits_fused_qkv and not options.fuses_kernels


def _attention_saved(spec: Attention, shape: BatchShape, options: WorkOptions) -> int:
    """Flash keeps q, k, v and log-sum-exp. Where it unpads it also keeps its output, which is scattered into
    the next layer's input, and the indices. Math keeps q, k and v of all heads and the softmax's output, and
    with dropout its mask and its output. Eager code with an fp32 softmax also keeps the probabilities cast
    back.
    """
    if spec.context is not None:
        return sum(saved_tensors(spec, shape, options))
    e, inputs = options.activation_bytes, input_elements(spec)
    if options.attention == "flash":
        is_doubled = keeps_fused_projection(spec, options)
        rotated = (spec.num_heads + spec.num_kv_heads) * spec.qk_head_dim if is_doubled else 0
        if spec.is_latent and spec.rotary_width is not None and not options.fuses_kernels:
            rotated += spec.num_kv_heads * (spec.qk_head_dim - spec.rotary_width)  # the keys beside v
        unpadded = output_elements(spec) * e + INDEX_BYTES if unpads(spec, options) else 0
        bias = bias_bytes(spec, shape, options) if spec.bias in ("made", "zeros") else 0
        return shape.tokens * ((inputs + rotated) * e + spec.num_heads * LOGSUMEXP_BYTES + unpadded) + bias
    repeated_elements = query_elements(spec) + spec.num_heads * (spec.qk_head_dim + spec.v_head_dim)
    return shape.tokens * repeated_elements * e + score_bytes(
        spec, shape, sum(saved_bytes_per_score(spec, options))
    )


def bias_bytes(spec: Attention, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes of a bias that is added to the scores of every sequence. The layers that read it keep nothing of
    their own.
    """
    return spec.num_heads * shape.sequence_length**2 * options.activation_bytes


def score_bytes(spec: Attention, shape: BatchShape, bytes_each: int) -> int:
    """Bytes of all scores of written-out attention, at `bytes_each` per score."""
    return shape.sequences * spec.num_heads * shape.sequence_length**2 * bytes_each


def saved_bytes_per_score(spec: Attention, options: WorkOptions) -> tuple[int, ...]:
    """Bytes per score of each tensor of scores that written-out attention keeps: the softmax's output. With
    dropout it also keeps its mask and its output, and otherwise after an fp32 softmax the output cast back. A
    cap keeps its tanh.
    """
    e = options.activation_bytes
    if spec.softcaps:
        return (e, *saved_bytes_per_score(replace(spec, softcaps=False), options))
    upcasts = spec.upcasts_softmax and not options.compile and e < 4
    softmax = 4 if upcasts else e
    if spec.dropout:
        return softmax, 1, e
    return (softmax, e) if upcasts else (softmax,)


def _activation_saved(spec: Activation, shape: BatchShape, options: WorkOptions) -> int:
    cost = activation_cost_of(spec.name, is_gated=spec.gated, options=options)
    return int(shape.tokens * spec.width * cost.saved * options.activation_bytes)


def _residual_saved(spec: Residual, shape: BatchShape, options: WorkOptions) -> int:
    """The dropout mask. An add keeps nothing."""
    return shape.tokens * spec.width if spec.dropout else 0


def _embedding_saved(spec: Embedding, shape: BatchShape, options: WorkOptions) -> int:
    """The token indices."""
    return shape.tokens * INDEX_BYTES


def _loss_saved(spec: Loss, shape: BatchShape, options: WorkOptions) -> int:
    """`saved_bytes_per_logit` of every logit. Logits that the trainer holds anyway are not counted."""
    holds_logits = spec.holds_logits == "as they are"
    return shape.tokens * spec.vocab_size * saved_bytes_per_logit(options, holds_logits=holds_logits)


def _exchange_saved(spec: Exchange, shape: BatchShape, options: WorkOptions) -> int:
    return 0


SAVED: dict[type[Any], Callable[[Any, BatchShape, WorkOptions], int]] = {
    Linear: _linear_saved,
    Norm: _norm_saved,
    Attention: _attention_saved,
    Activation: _activation_saved,
    Residual: _residual_saved,
    Embedding: _embedding_saved,
    Loss: _loss_saved,
    Exchange: _exchange_saved,
    AdapterInput: adapter_saved_bytes,
    AdapterSum: adapter_saved_bytes,
}
