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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.cost.kernels import elementwise
from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.kernels.rotary import rotary_backward, rotary_forward
from zsim.cost.kernels.score_blocks import ScoreBlock, causal_pairs, total_size, window_of
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.spec import Attention, Module

LOGSUMEXP_BYTES = 4


def attention_forward(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of attention's forward: rotary embedding, then the core."""
    assert isinstance(module.op_spec, Attention)
    work = module.op_spec
    assert work.context is None, "zsim.plan.workload.context issues it in parts"
    core = _flash_forward if options.attention == "flash" else _math_forward
    return (
        *elementwise.layout_kernels(work, shape, options, 0),
        *rotary_forward(work, shape, options),
        *_bias_kernels(work, shape, options, 0),
        *core(work, shape, options),
        *_unpad_kernels(work, shape, options, 0),
    )


def attention_backward(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of attention's backward: gradients of the core, then of the rotary embedding."""
    assert isinstance(module.op_spec, Attention)
    work = module.op_spec
    assert work.context is None, "zsim.plan.workload.context issues it in parts"
    core = _flash_backward if options.attention == "flash" else _math_backward
    return (
        *_unpad_kernels(work, shape, options, 1),
        *core(work, shape, options),
        *_bias_kernels(work, shape, options, 1),
        *rotary_backward(work, shape, options),
        *elementwise.layout_kernels(work, shape, options, 1),
    )


def query_elements(work: Attention) -> int:
    """Elements of q per token."""
    return work.num_heads * work.qk_head_dim


def key_value_elements(work: Attention) -> int:
    """Elements of k and v per token."""
    return work.num_kv_heads * (work.qk_head_dim + work.v_head_dim)


def input_elements(work: Attention) -> int:
    """Elements of q, k and v per token."""
    return query_elements(work) + key_value_elements(work)


def output_elements(work: Attention) -> int:
    """Elements of the output per token."""
    return work.num_heads * work.v_head_dim


def _pairs(work: Attention, shape: BatchShape) -> float:
    """Query-key pairs of a sequence: of all documents in it, s^2/2 each, where it has several. With documents
    of s tokens the sum is L/2 sum(s^2)/sum(s), L: the sequence's tokens."""
    if shape.span is None:
        return attended_pairs(work, shape.sequence_length)
    return shape.sequence_length / shape.span * attended_pairs(work, shape.span)


def _split_by_document(kernel: Kernel, shape: BatchShape) -> Kernel:
    """The kernel as of sequences that are one mean document long (FlashAttention's `varlen`)."""
    if shape.span is None:
        return kernel
    heads, length, _, width = kernel.shape
    span = max(1, min(length, round(shape.span)))
    return replace(kernel, shape=(max(1, round(heads * length / span)), span, span, width))


def attended_pairs(work: Attention, sequence_length: float) -> float:
    """Query-key pairs of one sequence under the layer's mask.

    A causal mask leaves s^2/2, or w s - w^2/2 with a window w. In chunks it leaves c^2/2 each, and the last
    chunk's. Both ways there are s^2, or (2 w + 1) s - w (w + 1) with a window of w on each side.
    """
    if not work.is_causal:
        side = min(work.window or sequence_length, sequence_length - 1)
        return float((2 * side + 1) * sequence_length - side * (side + 1))
    if work.chunk is not None:
        count, last_chunk = divmod(sequence_length, work.chunk)
        return count * work.chunk**2 / 2 + last_chunk**2 / 2
    return causal_pairs(sequence_length, work.window)


def _bias_kernels(
    work: Attention, shape: BatchShape, options: WorkOptions, direction: int
) -> tuple[Kernel, ...]:
    """A bias by distance: buckets, a gathered row per pair, its transpose. Backward adds up by row."""
    if work.bias != "made":
        return ()
    pairs, e = shape.sequence_length**2, options.activation_bytes
    buckets, launches = (15 * 16, 17) if direction == 0 else (0, 3)
    num_bytes = pairs * (buckets + 4 * work.num_heads * e)
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches),)


def unpads(work: Attention, options: WorkOptions) -> bool:
    """Whether rows are gathered before the fused core, and scattered after it."""
    return work.unpads and options.attention == "flash"


def _unpad_kernels(
    work: Attention, shape: BatchShape, options: WorkOptions, direction: int
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
    if not unpads(work, options):
        return ()
    inputs, outputs = input_elements(work), output_elements(work)
    copied_elements, launches = (3 * outputs, 6) if direction == 0 else (inputs + 2 * outputs, 2)
    size, dtype = shape.tokens * options.activation_bytes, options.kernel_dtype
    indexed_bytes = float(2 * inputs * size)
    return (
        Kernel("elementwise", 0.0, float(copied_elements * size), dtype, (), launches),
        Kernel("elementwise", 0.0, indexed_bytes, dtype, indexed_elements=shape.tokens * inputs),
    )


def _flash_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    length, pairs = shape.sequence_length, _pairs(work, shape)
    kernel = _fused_forward(work, shape.sequences, length, length, pairs, options)
    kernel = _masked_kernel(work, _split_by_document(kernel, shape))
    if work.bias == "none":
        return (kernel,)
    bias_read_bytes = _num_scores(work, shape) * options.activation_bytes
    return (replace(kernel, hbm_bytes=kernel.hbm_bytes + bias_read_bytes),)


def _masked_kernel(work: Attention, kernel: Kernel) -> Kernel:
    """The kernel with the layer's mask: a window, or chunks as sequences, only where they are shorter."""
    if work.chunk is not None and work.chunk < kernel.shape[2]:
        return _split_by_document(kernel, BatchShape(1, work.chunk, span=work.chunk))
    max_window = 0 if work.window is None else work.window if work.is_causal else 2 * work.window + 1
    window = max_window if max_window < kernel.shape[2] else 0
    return replace(kernel, is_causal=work.is_causal, window=window)


def fused_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> Kernel:
    """The fused kernel of whole sequences."""
    return _flash_forward(work, shape, options)[0]


def fused_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> Kernel:
    """The backward of `fused_forward`."""
    return _flash_backward(work, shape, options)[0]


def block_forward(work: Attention, sequences: int, block: ScoreBlock, options: WorkOptions) -> Kernel:
    """The fused kernel of one block of the scores of each of `sequences`."""
    kernel = _fused_forward(work, sequences, block.queries, block.keys, block.pairs, options)
    return replace(kernel, is_causal=block.is_causal, window=window_of([block]))


def blocks_forward(
    work: Attention, sequences: int, blocks: Sequence[ScoreBlock], options: WorkOptions
) -> Kernel:
    """The fused kernel of several blocks per sequence. Keys that two of them read are read twice."""
    kernel = _fused_forward(work, sequences, *total_size(blocks), options)
    return replace(kernel, window=window_of(blocks))


def blocks_backward(
    work: Attention, sequences: int, blocks: Sequence[ScoreBlock], options: WorkOptions
) -> Kernel:
    """The backward of `blocks_forward`."""
    kernel = _fused_backward(work, sequences, *total_size(blocks), options)
    return replace(kernel, window=window_of(blocks))


def _fused_forward(
    work: Attention, sequences: int, queries: int, keys: int, pairs: float, options: WorkOptions
) -> Kernel:
    e, heads = options.activation_bytes, work.num_heads
    bytes_per_query = (query_elements(work) + output_elements(work)) * e + heads * LOGSUMEXP_BYTES
    num_bytes = sequences * (queries * bytes_per_query + keys * key_value_elements(work) * e)
    flops = 2.0 * (sequences * heads * pairs) * (work.qk_head_dim + work.v_head_dim)
    shape = (sequences * heads, queries, keys, work.qk_head_dim)
    return Kernel("attention_forward", flops, float(num_bytes), options.kernel_dtype, shape)


def _flash_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    length, pairs = shape.sequence_length, _pairs(work, shape)
    kernel = _fused_backward(work, shape.sequences, length, length, pairs, options)
    kernel = _masked_kernel(work, _split_by_document(kernel, shape))
    if work.bias == "none":
        return (kernel,)
    e, scores = options.activation_bytes, _num_scores(work, shape)
    has_gradient = work.bias != "zeros"
    bias_bytes = scores * e * (2 if has_gradient else 1)
    kernel = replace(kernel, hbm_bytes=kernel.hbm_bytes + bias_bytes)
    return (kernel, *_bias_gradient(work, shape, options)) if has_gradient else (kernel,)


def _bias_gradient(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """The scores' gradient summed over the batch and, but for the first layer's, added to what later layers
    gave."""
    e, scores = options.activation_bytes, _num_scores(work, shape)
    accumulated_elements = 3 * scores // shape.sequences if work.bias == "read" else 0
    launches = 2 if work.bias == "read" else 1
    return (_scores_kernel(scores + accumulated_elements, options, e, launches),)


def block_backward(work: Attention, sequences: int, block: ScoreBlock, options: WorkOptions) -> Kernel:
    """The backward of `block_forward`."""
    kernel = _fused_backward(work, sequences, block.queries, block.keys, block.pairs, options)
    return replace(kernel, is_causal=block.is_causal, window=window_of([block]))


def _fused_backward(
    work: Attention, sequences: int, queries: int, keys: int, pairs: float, options: WorkOptions
) -> Kernel:
    """Three kernels: row sums of the output times its gradient, the products, the cast of the fp32 dq."""
    e, heads = options.activation_bytes, work.num_heads
    # Reads q, k, v, dout; writes dq, dk, dv; reads out and dout for the row sums; dq is accumulated in fp32.
    q, out = query_elements(work), output_elements(work)
    bytes_per_query = (2 * q + 3 * out) * e + 2 * heads * LOGSUMEXP_BYTES + 2 * q * 4
    num_bytes = sequences * (queries * bytes_per_query + 2 * keys * key_value_elements(work) * e)
    flops = 2.5 * (2.0 * (sequences * heads * pairs) * (work.qk_head_dim + work.v_head_dim))
    shape = (sequences * heads, queries, keys, work.qk_head_dim)
    return Kernel("attention_backward", flops, float(num_bytes), options.kernel_dtype, shape, 3)


def _product(work: Attention, shape: BatchShape, options: WorkOptions, head_dim: int, inner: str) -> Kernel:
    """One batched product of the b a s x s scores. `inner` names the dimension summed over.

    Rows of the scores are s long, so an unaligned sequence length slows every such product. Whether scores
    are read as they are (output, gradient of queries) or transposed (gradients of keys and values) makes no
    difference, because they are square.
    """
    length, batch = shape.sequence_length, shape.sequences * work.num_heads
    over_heads = inner == "head"
    mnk = (length, length, head_dim) if over_heads else (length, head_dim, length)
    layout: Layout = "nt" if over_heads else "nn"
    elements = batch * (length * length + 2 * length * head_dim)
    flops = 2.0 * batch * length * length * head_dim
    return Kernel(
        "gemm",
        flops,
        float(elements * options.activation_bytes),
        options.kernel_dtype,
        mnk,
        layout=layout,
        is_batched=True,
    )


def _math_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    e, scores = options.activation_bytes, _num_scores(work, shape)
    kernels = [
        *_repeat_kv(work, shape, options),
        _product(work, shape, options, work.qk_head_dim, "head"),
        _scores_kernel(scores, options, *_softmax_forward(work, shape, options)),
    ]
    if work.dropout and not options.joins_norms:
        kernels.append(_scores_kernel(scores, options, 2 * e + 1, 1))
    kernels.append(_product(work, shape, options, work.v_head_dim, "keys"))
    kernels.append(_transpose(work, shape, options))
    return tuple(kernels)


def _softmax_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[int, int]:
    """(bytes per score, launches) from the scores to the probabilities: scale, cap, bias, mask, sinks,
    softmax. Megatron's kernel: see [Note: softmax of four heads]."""
    e = options.activation_bytes
    if options.compile and not options.joins_norms:
        if _fits_megatron(work, shape, options):
            return e + _masked_bytes(work, e), 1
        return (e + 4) + 8 + 9 + 8 + (4 + e), 5
    if options.compile:
        return 2 * e + (1 if work.dropout else 0) + (e if work.softcaps else 0), 1
    softmax, launches = (e + 4 + 4 + e, 2) if work.upcasts_softmax and e < 4 else (2 * e, 1)
    if work.softcaps:
        softmax, launches = softmax + 6 * e, launches + 3
    if work.has_sinks:
        softmax, launches = softmax + 5 * e, launches + 3
    if work.bias != "none":
        softmax, launches = softmax + 2 * e, launches + 1
    return 2 * e + 2 * e + softmax, 2 + launches


def _fits_megatron(work: Attention, shape: BatchShape, options: WorkOptions) -> bool:
    """# [Note: softmax of four heads]
    Megatron's fused softmax of scale, mask and softmax takes only sequences times local heads that are a
    multiple of four since August 2021 (40becfc9, megatron/model/fused_softmax.py `is_kernel_available`).
    Otherwise scores are cast to fp32, scaled, masked, and probabilities cast back, a kernel each."""
    return options.dtype != "fp32" and shape.sequences * work.num_heads % 4 == 0


def _masked_bytes(work: Attention, num_bytes: int) -> int:
    """Bytes that Megatron's fused softmax reads of `num_bytes` per score: under a causal mask up to the
    diagonal, while it writes all (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h of
    Megatron-LM 3)."""
    return num_bytes // 2 if work.is_causal else num_bytes


def _softmax_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[int, int]:
    """(bytes per score, launches) of the way back: dropout, cast, softmax backward (reads probabilities and
    gradient, writes one), sinks, cap, scale."""
    e = options.activation_bytes
    mask = 1 if work.dropout else 0
    if options.compile and not options.joins_norms:
        softmax, launches = (e + _masked_bytes(work, 2 * e), 1)
        if not _fits_megatron(work, shape, options):
            softmax, launches = (4 + e) + 12 + 9 + 8 + (4 + e), 5
        return softmax + (2 * e + 1) * mask, launches + mask
    if options.compile:
        return 3 * e + mask + (e if work.softcaps else 0), 1
    upcasts = work.upcasts_softmax and e < 4
    softmax, launches = ((e + 4) + (4 + 4 + 4) + (4 + e), 3) if upcasts else (3 * e, 1)
    dropout = 2 * e + mask if mask else 0
    if work.softcaps:
        softmax, launches = softmax + 7 * e, launches + 3
    if work.has_sinks:
        softmax, launches = softmax + 11 * e, launches + 6
    return dropout + softmax + 2 * e, launches + 1 + mask


def _math_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Kernels of the gradients of values, probabilities, scores, queries and keys."""
    scores = _num_scores(work, shape)
    return (
        _transpose(work, shape, options),
        _product(work, shape, options, work.v_head_dim, "keys"),
        _product(work, shape, options, work.v_head_dim, "head"),
        _scores_kernel(scores, options, *_softmax_backward(work, shape, options)),
        *(_bias_gradient(work, shape, options) if work.bias in ("made", "read") else ()),
        _product(work, shape, options, work.qk_head_dim, "keys"),
        _product(work, shape, options, work.qk_head_dim, "keys"),
        *_repeat_kv(work, shape, options),
    )


def _num_scores(work: Attention, shape: BatchShape) -> int:
    return shape.sequences * work.num_heads * shape.sequence_length * shape.sequence_length


def _scores_kernel(scores: int, options: WorkOptions, bytes_each: int, launches: int) -> Kernel:
    return Kernel("elementwise", 0.0, float(scores * bytes_each), options.kernel_dtype, (), launches)


def _repeat_kv(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[Kernel, ...]:
    """Copy keys and values out to all heads (backward: sum their gradients back)."""
    if work.num_kv_heads == work.num_heads:
        return ()
    repeated = work.num_heads * (work.qk_head_dim + work.v_head_dim)
    num_bytes = shape.tokens * (repeated + key_value_elements(work)) * options.activation_bytes
    return (Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), 2),)


def _transpose(work: Attention, shape: BatchShape, options: WorkOptions) -> Kernel:
    """Transpose the heads back into each token's row: one copy of the output."""
    elements = 2 * shape.tokens * output_elements(work)
    return Kernel("elementwise", 0.0, float(elements * options.activation_bytes), options.kernel_dtype)
