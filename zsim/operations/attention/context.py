"""Attention as one of c ranks computes it that each have a part of every sequence.

A sequence is cut into 2c chunks, of which rank i has chunks i and 2c - 1 - i, so that all ranks have the same
number of query-key pairs under a causal mask (Megatron-Core 0.16.1 training/utils.py
`get_batch_on_this_cp_rank`; torch 2.13 `_HeadTailLoadBalancer`). With s tokens and keys of rank i - j in step
j of a ring, step 0 is causal over the rank's own s/c tokens. In step j <= i all queries see the first chunk
of the keys, in later steps the queries of the second chunk see both: s^2/(2c^2) pairs each, s^2/(2c) in all,
1/c of the sequence's.

# [Note: the middle rank]
Ranks differ in how many of their steps are of which shape, not in their pairs. A plan has one program for all
of them, that of rank c // 2. With a window w they differ in their pairs: of the queries of a chunk those that
have fewer than w tokens before them see fewer, so that a chunk has the more pairs the later it is, up to w
s/(2c). Rank c - 1, of the two middle chunks, has the most, and the others wait for it.

# [Note: tensors of a rank]
Sizes are of tensors of a rank's tokens, 1/c of the sequences, unless said otherwise. Kept are q, K and V, and
the log-sum-exp. The output is the next product's input. Where heads are exchanged for tokens, it is also kept
as it was before the exchange. The sources are those of `zsim.plan.workload.context`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.score_blocks import ScoreBlock
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention.core import AttentionCore
from zsim.operations.attention.kernels import LOGSUMEXP_BYTES
from zsim.operations.sharding import ContextSharding
from zsim.operations.tensors import Sizes


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention of one of `ranks` ranks over `sequences` of `length` tokens. See [Note: the middle rank]."""

    work: AttentionCore
    share: ContextSharding
    ranks: int
    sequences: int
    length: int
    options: WorkOptions
    documents: float

    @classmethod
    def of(cls, spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> SharedAttention:
        """The attention of a rank whose part of the batch is `shape`. Packed documents are sequences, each
        padded to a multiple of 2c tokens (TransformerEngine 2.17.1 context_parallel.py, `thd`)."""
        assert spec.context is not None
        share, sequences, length = spec.context, shape.sequences, shape.sequence_length
        if shape.span is not None and shape.span < length:
            tokens, chunks = sequences * length, 2 * share.ranks
            length = max(1, round(shape.span / chunks)) * chunks
            sequences = max(1, round(tokens / length))
        return cls(spec, share, share.ranks, sequences, length, options, shape.documents)

    @property
    def rank(self) -> int:
        """The rank whose program this is. See [Note: the middle rank]."""
        window = self.work.window
        return self.ranks // 2 if window is None or window >= self.length else self.ranks - 1

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all sequences."""
        return self.sequences * self.length // self.ranks

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.sequences, self.length, self.ranks, documents=self.documents)

    @property
    def query_bytes(self) -> int:
        return self.tokens * self.work.query_elements * self.options.activation_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes of K and V together."""
        return self.tokens * self.work.key_value_elements * self.options.activation_bytes

    @property
    def key_bytes(self) -> int:
        return self.tokens * self.work.num_kv_heads * self.work.qk_head_dim * self.options.activation_bytes

    @property
    def value_bytes(self) -> int:
        return self.key_value_bytes - self.key_bytes

    @property
    def output_bytes(self) -> int:
        return self.tokens * self.work.output_elements * self.options.activation_bytes

    @property
    def logsumexp_bytes(self) -> int:
        return self.tokens * self.work.num_heads * LOGSUMEXP_BYTES

    def ring_block(self, step: int) -> ScoreBlock:
        """The scores that a ring computes in a step."""
        local_length = self.length // self.ranks
        if step == 0:
            return ScoreBlock(local_length, local_length, is_causal=True)
        if self.sees_all_queries(step):
            return ScoreBlock(local_length, local_length // 2, is_causal=False)
        return ScoreBlock(local_length // 2, local_length, is_causal=False)

    def sees_all_queries(self, step: int) -> bool:
        """Whether both chunks of queries take part in a step of the ring."""
        return step <= self.rank

    def gathered_blocks(self) -> tuple[ScoreBlock, ScoreBlock]:
        """The scores of each of the two chunks against all keys up to its last token. With a window w the
        keys begin w - 1 before its first token (`get_kv_seq_info_after_all_gather`, TransformerEngine
        2.17.1).
        """
        chunk, window = self.length // (2 * self.ranks), self.work.window
        max_keys = self.length if window is None else chunk + window - 1
        first, second = (
            ScoreBlock(chunk, min(end * chunk, max_keys), is_causal=True, window=window)
            for end in (self.rank + 1, 2 * self.ranks - self.rank)
        )
        return first, second

    def exchange_heads(self) -> SharedAttention:
        """The attention after ranks have exchanged heads for tokens, all or the inner ones of "a2a+p2p": a
        part of the heads, at least one of K and V, on as many times the tokens."""
        exchanged_ranks = self.share.inner if self.share.method == "a2a+p2p" else self.ranks
        heads, groups = (
            self.work.num_heads // exchanged_ranks,
            max(1, self.work.num_kv_heads // exchanged_ranks),
        )
        work = replace(self.work, num_heads=heads, num_kv_heads=groups)
        return replace(self, work=work, ranks=self.ranks // exchanged_ranks)

    def elementwise_kernel(self, num_bytes: float, launches: int = 1) -> Kernel:
        """Elementwise kernels that read and write so many bytes in all."""
        return Kernel("elementwise", 0.0, float(num_bytes), self.options.kernel_dtype, (), launches)


def saved_tensors(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor kept from forward to backward."""
    shared = SharedAttention.of(spec, shape, options)
    if shared.share.has_masks:
        local_bytes, ranks = (shared.query_bytes, shared.logsumexp_bytes), shared.ranks
        return local_bytes[0], ranks * shared.key_bytes, ranks * shared.value_bytes, local_bytes[1]
    if not _exchanges_heads(shared):
        return shared.query_bytes, shared.key_bytes, shared.value_bytes, shared.logsumexp_bytes
    exchanged = shared.exchange_heads()
    return (
        exchanged.query_bytes,
        exchanged.key_bytes,
        exchanged.value_bytes,
        exchanged.logsumexp_bytes,
        exchanged.output_bytes,
    )


def forward_tensors(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during forward only, the output included."""
    shared = SharedAttention.of(spec, shape, options)
    out = shared.output_bytes
    if shared.share.has_masks:
        # K and V made contiguous, and as they were gathered.
        return shared.key_bytes, shared.value_bytes, *_gathered_keys_and_values(shared), out
    if shared.share.library == "torch":
        # The fp32 sum, a step's output in both types, and two temporaries of the merge.
        merge = (out // options.activation_bytes * 4,) * (2 if options.compile else 4)
        return (*_torch_buffers(shared), *merge, out)
    if _exchanges_heads(shared):
        exchanged = shared.exchange_heads()
        inputs = exchanged.query_bytes, exchanged.key_bytes, exchanged.value_bytes
        ring = _ring_forward(exchanged) if exchanged.ranks > 1 else ()
        return (*inputs, *max((inputs, (out, out, out), ring), key=sum))
    if shared.share.method == "all-gather":
        full = shared.ranks * shared.key_value_bytes
        return (full, *max(((full // 2,), (out, out, out)), key=sum))
    return _ring_forward(shared)


def backward_tensors(spec: AttentionCore, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during backward only: gradients of output and inputs, and
    temporaries.
    """
    shared = SharedAttention.of(spec, shape, options)
    e, q, kv, out = options.activation_bytes, shared.query_bytes, shared.key_value_bytes, shared.output_bytes
    in_fp32 = q // e * 4  # dq, as the kernel sums it up
    if shared.share.has_masks:
        # dK and dV of all ranks' tokens, one of them copied by rank
        full = shared.ranks * shared.key_bytes
        return (out, in_fp32, q, *_gathered_keys_and_values(shared), full, kv)
    if shared.share.library == "torch":
        sums = (kv // e * 4,) * 3
        return (out, in_fp32, in_fp32, q, kv, *sums, *_torch_buffers(shared))
    if _exchanges_heads(shared):
        exchanged = shared.exchange_heads()
        gradients = exchanged.query_bytes, exchanged.key_value_bytes
        if exchanged.ranks > 1:
            return (out, out, *gradients, *_ring_backward(exchanged))
        return (out, out, *gradients, *gradients, in_fp32)
    if shared.share.method == "all-gather":
        # dK and dV, K and V, and the gradients of both calls, of all ranks' tokens
        full = shared.ranks * kv
        call_gradient_bytes = sum(block.keys for block in shared.gathered_blocks()) * full // shared.length
        return (out, q, q // 2, in_fp32 // 2, full, full, call_gradient_bytes)
    return (out, *_ring_backward(shared))


def _gathered_keys_and_values(shared: SharedAttention) -> Sizes:
    """Two tensors as large as K and V of all ranks."""
    return shared.ranks * shared.key_bytes, shared.ranks * shared.value_bytes


def _exchanges_heads(shared: SharedAttention) -> bool:
    return shared.share.method in ("all-to-all", "a2a+p2p")


def _ring_forward(shared: SharedAttention) -> Sizes:
    """K and V of every step (the last ones are kept, but the rank's own are there twice), the output and
    log-sum-exp of every step, and the output."""
    query_divisors = [1 if shared.sees_all_queries(step) else 2 for step in range(shared.ranks)]
    steps = [
        size // divisor
        for divisor in query_divisors
        for size in (shared.output_bytes, shared.logsumexp_bytes)
    ]
    return (*(shared.key_value_bytes,) * shared.ranks, *steps, shared.output_bytes)


def _ring_backward(shared: SharedAttention) -> Sizes:
    """dq and its part of one step, also in fp32, two buffers of K, V, dK and dV, and dK and dV of one
    step.
    """
    q, kv = shared.query_bytes, shared.key_value_bytes
    return q, q, q // shared.options.activation_bytes * 4, 2 * kv, 2 * kv, kv


def _torch_buffers(shared: SharedAttention) -> Sizes:
    """K and V copied into one tensor, and those of all ranks or of the next step."""
    kv = shared.key_value_bytes
    return kv, kv * (shared.ranks if shared.share.method == "all-gather" else 1)
