"""The core of attention as kernels: fused (flash) or written out (math).

Letters: b sequences, s tokens of a sequence, a heads, g key/value heads, d_k and d_v widths of a head's
queries and values, e bytes per element.

Flash: 2 b a s^2 (d_k + d_v) FLOPs on all pairs, of which the causal mask leaves half (a window w leaves w s -
w^2/2 of s^2 pairs). Backward takes 2.5 times the forward, because it recomputes the scores and makes four
products of them (Dao 2023, "FlashAttention-2", section 4.1: the convention of its benchmarks). HBM sees q, k,
v, the output and 4 bytes of log-sum-exp per head and token, and no scores.

Math: two products over all s^2 pairs, the mask ignored. Every step between them reads and writes b a s^2
scores. Keys and values are first copied out to a heads (`repeat_kv`). The operators are those that
transformers' `eager_attention_forward` dispatches: scale, mask, softmax (to fp32 and back in all families but
GPT-2), dropout.

Variants, as operators over b a s^2 scores in bytes each (counted with a dispatch mode over transformers
5.23's `eager_attention_forward` of Gemma 2, gpt-oss and T5 under torch 2.13). A softcap divides, takes tanh
and multiplies: 6e and 3 launches, backward 7e and 3, and it keeps e. A sink column is joined, its maximum
taken and subtracted: 5e and 3, backward 11e and 6. A bias by distance is added: 2e and 1, backward summed
over the batch, e and 1. In the fused kernel softcap and sinks are free. There a bias is read from memory (b a
s^2 e; torch's memory-efficient kernel, which T5's `_supports_flash_attn = False` leaves) and its gradient
written and summed up. The layer that makes the bias also sorts s^2 distances into buckets (15 operators of 8
bytes).

A padding mask (b s^2 e, for all heads) is read by torch's memory-efficient kernel or cuDNN's, which compute
all pairs and take keys and values of all heads: transformers leaves causality to the mask and repeats them
(`repeat_kv`; 5.x integrations/sdpa_attention.py `use_gqa_in_sdpa`, always before). A mask of booleans is
written out as scores by every layer, e + 1 bytes each (torch ATen/native/transformers/attention.cpp
`convert_boolean_attn_mask`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.kernels.score_blocks import ScoreBlock, causal_pairs, total_size, window_of
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention.core import AttentionCore
from zsim.operations.attention.rotary import layout_kernels, rotary_backward, rotary_forward

LOGSUMEXP_BYTES = 4
SCORE_BYTES = 2  # of the gradient of a score that cuDNN writes


def core_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of attention's forward: rotary embedding, then the core."""
    core = _flash_forward if options.attention == "flash" else _math_forward
    return (
        *layout_kernels(spec, shape, options, 0),
        *rotary_forward(spec, shape, options),
        *_bias_kernels(spec, shape, options, 0),
        *core(spec, shape, options),
        *_unpad_kernels(spec, shape, options, 0),
    )


def core_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of attention's backward: gradients of the core, then of the rotary embedding."""
    core = _flash_backward if options.attention == "flash" else _math_backward
    return (
        *_unpad_kernels(spec, shape, options, 1),
        *core(spec, shape, options),
        *_bias_kernels(spec, shape, options, 1),
        *rotary_backward(spec, shape, options),
        *layout_kernels(spec, shape, options, 1),
    )


def _pairs(spec: AttentionCore, shape: BatchShape) -> float:
    """Query-key pairs of a sequence: of all documents in it, s^2/2 each, where it has several. With documents
    of s tokens the sum is L/2 sum(s^2)/sum(s), L: the sequence's tokens."""
    if spec.sample_keys:
        return float(shape.sequence_length * spec.num_keys(shape))
    if shape.span is None:
        return attended_pairs(spec, shape.sequence_length)
    return shape.sequence_length / shape.span * attended_pairs(spec, shape.span)


def _split_by_document(kernel: Kernel, shape: BatchShape) -> Kernel:
    """The kernel as of sequences that are one mean document long (FlashAttention's `varlen`)."""
    if shape.span is None:
        return kernel
    heads, length, _, width = kernel.shape
    span = max(1, min(length, round(shape.span)))
    return replace(kernel, shape=(max(1, round(heads * length / span)), span, span, width))


def num_buffers(heads: int, sm_count: int) -> int:
    """The dq buffers, ceil(S / (b a)), of `heads` heads of all sequences."""
    return ceil(sm_count / heads)


def attended_pairs(spec: AttentionCore, sequence_length: float) -> float:
    """Query-key pairs of one sequence under the layer's mask.

    A causal mask leaves s^2/2, or w s - w^2/2 with a window w. In chunks it leaves c^2/2 each, and the last
    chunk's. Both ways there are s^2, or (2 w + 1) s - w (w + 1) with a window of w on each side.
    """
    if not spec.is_causal:
        side = min(spec.window or sequence_length, sequence_length - 1)
        return float((2 * side + 1) * sequence_length - side * (side + 1))
    if spec.chunk is not None:
        count, last_chunk = divmod(sequence_length, spec.chunk)
        return count * spec.chunk**2 / 2 + last_chunk**2 / 2
    return causal_pairs(sequence_length, spec.window)


def _bias_kernels(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, direction: int
) -> tuple[Kernel, ...]:
    """A bias by distance: buckets, a gathered row per pair, its transpose. Backward adds up by row."""
    if spec.bias != "made":
        return ()
    pairs, e = shape.sequence_length**2, options.activation_bytes
    bucket_bytes, launches = (15 * 16, 17) if direction == 0 else (0, 3)
    num_bytes = pairs * (bucket_bytes + 4 * spec.num_heads * e)
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches),)


def unpads(spec: AttentionCore, options: WorkOptions) -> bool:
    """Whether rows are gathered before the fused core, and scattered after it."""
    return spec.unpads and options.attention == "flash"


def _unpad_kernels(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, direction: int
) -> tuple[Kernel, ...]:
    """Gathers and scatters around the core when a padding mask is given, whether tokens are padded or not.

    With i elements of q, k, v and o of the output per token, forward gathers the input (2 i), fills the
    padded output with zeros and writes the rows into it (o + 2 o). Backward gathers the output's gradient (2
    o), fills the input's gradient with zeros and scatters (i + 2 i). The input goes through torch.gather and
    scatter, element by element (not vectorised before torch 2.8: pytorch pull request 151490). The output
    goes through indexing, whose kernel was not timed on rows and is assumed to cost a copy. The host's two
    waits for the counts of the mask are neglected. Source: HazyResearch/flash-attention 0.2, bert_padding.py
    `unpad_input`, `pad_input`.
    """
    if not unpads(spec, options):
        return ()
    inputs, outputs = spec.input_elements, spec.output_elements
    copied_elements, launches = (3 * outputs, 6) if direction == 0 else (inputs + 2 * outputs, 2)
    size, dtype = shape.tokens * options.activation_bytes, options.kernel_dtype
    indexed_bytes = float(2 * inputs * size)
    return (
        Kernel("elementwise", 0.0, float(copied_elements * size), dtype, (), launches),
        Kernel("elementwise", 0.0, indexed_bytes, dtype, indexed_elements=shape.tokens * inputs),
    )


def is_masked(spec: AttentionCore, options: WorkOptions) -> bool:
    """Whether fused attention is given a padding mask, with causality in it. Attention with a cap or sinks is
    written out by transformers.
    """
    is_plain = spec.is_causal and spec.bias == "none" and not spec.softcaps and not spec.has_sinks
    return options.padding_mask is not None and options.attention == "flash" and is_plain


def mask_bytes(shape: BatchShape, options: WorkOptions) -> int:
    """Bytes of the mask of all sequences, in the type of the scores. Heads share it."""
    return shape.sequences * shape.sequence_length**2 * options.activation_bytes


def _read_mask(kernel: Kernel, shape: BatchShape, options: WorkOptions) -> Kernel:
    return replace(kernel, hbm_bytes=kernel.hbm_bytes + mask_bytes(shape, options))


def expand_heads(spec: AttentionCore) -> AttentionCore:
    """The core under a padding mask: keys and values of all heads, and all pairs."""
    return replace(spec, num_kv_heads=spec.num_heads, is_causal=False, window=None, chunk=None)


def _masked_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    (kernel,) = _flash_forward(expand_heads(spec), shape, options)
    e = options.activation_bytes
    cast = _scores_kernel(mask_bytes(shape, options) // e, options, e + 1, 1)
    casts = (cast,) if options.padding_mask == "bool" else ()
    return (*_repeat_kv(spec, shape, options), *casts, _read_mask(kernel, shape, options))


def _masked_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    (kernel,) = _flash_backward(expand_heads(spec), shape, options)
    return (_read_mask(kernel, shape, options), *_repeat_kv(spec, shape, options))


def _flash_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    if is_masked(spec, options):
        return _masked_forward(spec, shape, options)
    sizes = shape.sequence_length, spec.num_keys(shape), _pairs(spec, shape)
    kernel = _fused_forward(spec, shape.sequences, *sizes, options)
    kernel = _masked_kernel(spec, kernel, shape)
    if spec.bias == "none":
        return (kernel,)
    bias_read_bytes = _num_scores(spec, shape) * options.activation_bytes
    return (replace(kernel, hbm_bytes=kernel.hbm_bytes + bias_read_bytes),)


def _masked_kernel(spec: AttentionCore, kernel: Kernel, shape: BatchShape) -> Kernel:
    """The kernel with the mask of documents and the layer's: a window, or chunks as sequences, only where
    they are shorter.
    """
    if spec.sample_keys:
        return replace(kernel, is_causal=False)
    kernel = _split_by_document(kernel, shape)
    if spec.chunk is not None and spec.chunk < kernel.shape[2]:
        return _split_by_document(kernel, BatchShape(1, spec.chunk, span=spec.chunk))
    max_window = 0 if spec.window is None else spec.window if spec.is_causal else 2 * spec.window + 1
    window = max_window if max_window < kernel.shape[2] else 0
    return replace(kernel, is_causal=spec.is_causal, window=window)


def fused_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Kernel:
    """The fused kernel of whole sequences."""
    return _flash_forward(spec, shape, options)[0]


def fused_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Kernel:
    """The backward of `fused_forward`."""
    return _flash_backward(spec, shape, options)[0]


def block_forward(spec: AttentionCore, sequences: int, block: ScoreBlock, options: WorkOptions) -> Kernel:
    """The fused kernel of one block of the scores of each of `sequences`."""
    kernel = _fused_forward(spec, sequences, block.queries, block.keys, block.pairs, options)
    return replace(kernel, is_causal=block.is_causal, window=window_of([block]))


def blocks_forward(
    spec: AttentionCore, sequences: int, blocks: Sequence[ScoreBlock], options: WorkOptions
) -> Kernel:
    """The fused kernel of several blocks per sequence. Keys that two of them read are read twice."""
    kernel = _fused_forward(spec, sequences, *total_size(blocks), options)
    return replace(kernel, window=window_of(blocks))


def blocks_backward(
    spec: AttentionCore, sequences: int, blocks: Sequence[ScoreBlock], options: WorkOptions
) -> Kernel:
    """The backward of `blocks_forward`."""
    kernel = _fused_backward(spec, sequences, *total_size(blocks), options)
    return replace(kernel, window=window_of(blocks))


def _fused_forward(
    spec: AttentionCore, sequences: int, queries: int, keys: int, pairs: float, options: WorkOptions
) -> Kernel:
    e, heads = options.activation_bytes, spec.num_heads
    bytes_per_query = (spec.query_elements + spec.output_elements) * e + heads * LOGSUMEXP_BYTES
    num_bytes = sequences * (queries * bytes_per_query + keys * spec.key_value_elements * e)
    flops = 2.0 * (sequences * heads * pairs) * (spec.qk_head_dim + spec.v_head_dim)
    shape = (sequences * heads, queries, keys, spec.qk_head_dim)
    return Kernel("attention_forward", flops, float(num_bytes), options.kernel_dtype, shape)


def _flash_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    if is_masked(spec, options):
        return _masked_backward(spec, shape, options)
    sizes = shape.sequence_length, spec.num_keys(shape), _pairs(spec, shape)
    kernel = _fused_backward(spec, shape.sequences, *sizes, options)
    kernel = _masked_kernel(spec, kernel, shape)
    if spec.bias == "none":
        return (kernel,)
    e, scores = options.activation_bytes, _num_scores(spec, shape)
    has_gradient = spec.bias != "zeros"
    bias_bytes = scores * e * (2 if has_gradient else 1)
    kernel = replace(kernel, hbm_bytes=kernel.hbm_bytes + bias_bytes)
    return (kernel, *_bias_gradient(spec, shape, options)) if has_gradient else (kernel,)


def _bias_gradient(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """The scores' gradient summed over the batch and, but for the first layer's, added to what later layers
    gave."""
    e, scores = options.activation_bytes, _num_scores(spec, shape)
    accumulated_elements = 3 * scores // shape.sequences if spec.bias == "read" else 0
    launches = 2 if spec.bias == "read" else 1
    return (_scores_kernel(scores + accumulated_elements, options, e, launches),)


def block_backward(spec: AttentionCore, sequences: int, block: ScoreBlock, options: WorkOptions) -> Kernel:
    """The backward of `block_forward`."""
    kernel = _fused_backward(spec, sequences, block.queries, block.keys, block.pairs, options)
    return replace(kernel, is_causal=block.is_causal, window=window_of([block]))


def _fused_backward(
    spec: AttentionCore, sequences: int, queries: int, keys: int, pairs: float, options: WorkOptions
) -> Kernel:
    """Three kernels: row sums of the output times its gradient, the products, the cast of the fp32 dq."""
    e, heads = options.activation_bytes, spec.num_heads
    # Reads q, k, v, dout; writes dq, dk, dv; reads out and dout for the row sums; dq is accumulated in fp32.
    q, out = spec.query_elements, spec.output_elements
    bytes_per_query = (2 * q + 3 * out) * e + 2 * heads * LOGSUMEXP_BYTES + 2 * q * 4
    num_bytes = sequences * (queries * bytes_per_query + 2 * keys * spec.key_value_elements * e)
    flops = 2.5 * (2.0 * (sequences * heads * pairs) * (spec.qk_head_dim + spec.v_head_dim))
    shape = (sequences * heads, queries, keys, spec.qk_head_dim)
    return Kernel("attention_backward", flops, float(num_bytes), options.kernel_dtype, shape, 3)


def _product(
    spec: AttentionCore, shape: BatchShape, options: WorkOptions, head_dim: int, inner: str
) -> Kernel:
    """One batched product of the b a s x s scores. `inner` names the dimension summed over.

    Rows of the scores are s long, so an unaligned sequence length slows every such product. Whether scores
    are read as they are (output, gradient of queries) or transposed (gradients of keys and values) makes no
    difference, because they are square, and is neglected in cross-attention.
    """
    length, keys, batch = shape.sequence_length, spec.num_keys(shape), shape.sequences * spec.num_heads
    sums_head_dim = inner == "head"
    mnk = (length, keys, head_dim) if sums_head_dim else (length, head_dim, keys)
    layout: Layout = "nt" if sums_head_dim else "nn"
    elements = batch * (length * keys + (length + keys) * head_dim)
    flops = 2.0 * batch * length * keys * head_dim
    return Kernel(
        "gemm",
        flops,
        float(elements * options.activation_bytes),
        options.kernel_dtype,
        mnk,
        layout=layout,
        is_batched=True,
    )


def _math_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    e, scores = options.activation_bytes, _num_scores(spec, shape)
    kernels = [
        *_repeat_kv(spec, shape, options),
        _product(spec, shape, options, spec.qk_head_dim, "head"),
        _scores_kernel(scores, options, *_softmax_forward(spec, shape, options)),
    ]
    if spec.dropout and not options.joins_norms:
        kernels.append(_scores_kernel(scores, options, 2 * e + 1, 1))
    kernels.append(_product(spec, shape, options, spec.v_head_dim, "keys"))
    kernels.append(_transpose(spec, shape, options))
    return tuple(kernels)


def _softmax_forward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[int, int]:
    """(bytes per score, launches) from the scores to the probabilities: scale, cap, bias, mask, sinks,
    softmax. Megatron's kernel: see [Note: softmax of four heads]."""
    e = options.activation_bytes
    if options.compile and not options.joins_norms:
        if _has_fused_softmax(spec, shape, options):
            return e + _masked_bytes(spec, e), 1
        return (e + 4) + 8 + 9 + 8 + (4 + e), 5
    if options.compile:
        return 2 * e + (1 if spec.dropout else 0) + (e if spec.softcaps else 0), 1
    softmax, launches = (e + 4 + 4 + e, 2) if spec.upcasts_softmax and e < 4 else (2 * e, 1)
    if spec.softcaps:
        softmax, launches = softmax + 6 * e, launches + 3
    if spec.has_sinks:
        softmax, launches = softmax + 5 * e, launches + 3
    if spec.bias != "none" or options.layers.multiplies_by_mask:
        softmax, launches = softmax + 2 * e, launches + 1
    return 2 * e + 2 * e + softmax, 2 + launches


def _has_fused_softmax(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> bool:
    """# [Note: softmax of four heads]
    Megatron's fused softmax of scale, mask and softmax takes only sequences times local heads that are a
    multiple of four since August 2021 (40becfc9, megatron/model/fused_softmax.py `is_kernel_available`).
    Otherwise scores are cast to fp32, scaled, masked, and probabilities cast back, a kernel each."""
    return options.dtype != "fp32" and shape.sequences * spec.num_heads % 4 == 0


def _masked_bytes(spec: AttentionCore, num_bytes: int) -> int:
    """Bytes that Megatron's fused softmax reads of `num_bytes` per score: under a causal mask up to the
    diagonal, while it writes all (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h of
    Megatron-LM 3)."""
    return num_bytes // 2 if spec.is_causal else num_bytes


def _softmax_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[int, int]:
    """(bytes per score, launches) of backward: dropout, cast, softmax backward (reads probabilities and
    gradient, writes one), sinks, cap, scale.
    """
    e = options.activation_bytes
    dropout_mask = 1 if spec.dropout else 0
    if options.compile and not options.joins_norms:
        softmax, launches = (e + _masked_bytes(spec, 2 * e), 1)
        if not _has_fused_softmax(spec, shape, options):
            softmax, launches = (4 + e) + 12 + 9 + 8 + (4 + e), 5
        return softmax + (2 * e + 1) * dropout_mask, launches + dropout_mask
    if options.compile:
        return 3 * e + dropout_mask + (e if spec.softcaps else 0), 1
    upcasts = spec.upcasts_softmax and e < 4
    softmax, launches = ((e + 4) + (4 + 4 + 4) + (4 + e), 3) if upcasts else (3 * e, 1)
    dropout = 2 * e + dropout_mask if dropout_mask else 0
    if spec.softcaps:
        softmax, launches = softmax + 7 * e, launches + 3
    if spec.has_sinks:
        softmax, launches = softmax + 11 * e, launches + 6
    if options.layers.multiplies_by_mask:
        softmax, launches = softmax + 2 * e, launches + 1
    return dropout + softmax + 2 * e, launches + 1 + dropout_mask


def _math_backward(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the gradients of values, probabilities, scores, queries and keys."""
    scores = _num_scores(spec, shape)
    return (
        _transpose(spec, shape, options),
        _product(spec, shape, options, spec.v_head_dim, "keys"),
        _product(spec, shape, options, spec.v_head_dim, "head"),
        _scores_kernel(scores, options, *_softmax_backward(spec, shape, options)),
        *(_bias_gradient(spec, shape, options) if spec.bias in ("made", "read") else ()),
        _product(spec, shape, options, spec.qk_head_dim, "keys"),
        _product(spec, shape, options, spec.qk_head_dim, "keys"),
        *_repeat_kv(spec, shape, options),
    )


def _num_scores(spec: AttentionCore, shape: BatchShape) -> int:
    return shape.sequences * spec.num_heads * shape.sequence_length * spec.num_keys(shape)


def _scores_kernel(scores: int, options: WorkOptions, bytes_per_score: int, launches: int) -> Kernel:
    return Kernel("elementwise", 0.0, float(scores * bytes_per_score), options.kernel_dtype, (), launches)


def _repeat_kv(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Copy keys and values out to all heads (backward: sum their gradients back)."""
    if spec.num_kv_heads == spec.num_heads:
        return ()
    repeated_elements = spec.num_heads * (spec.qk_head_dim + spec.v_head_dim)
    elements = spec.key_rows(shape) * (repeated_elements + spec.key_value_elements)
    num_bytes = elements * options.activation_bytes
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), 2),)


def _transpose(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Kernel:
    """Transpose the heads back into each token's row: one copy of the output."""
    elements = 2 * shape.tokens * spec.output_elements
    return Kernel("elementwise", 0.0, float(elements * options.activation_bytes), options.kernel_dtype)
