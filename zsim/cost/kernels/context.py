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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.attention import (
    LOGSUMEXP_BYTES,
    key_value_elements,
    output_elements,
    query_elements,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.score_blocks import ScoreBlock
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.spec import Attention, ContextSharding


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention of one of `ranks` ranks over `sequences` of `length` tokens. See [Note: the middle rank]."""

    work: Attention
    share: ContextSharding
    ranks: int
    sequences: int
    length: int
    options: WorkOptions

    @classmethod
    def of(cls, spec: Attention, shape: BatchShape, options: WorkOptions) -> SharedAttention:
        """The attention of a rank whose part of the batch is `shape`."""
        assert spec.context is not None
        share = spec.context
        return cls(spec, share, share.ranks, shape.sequences, shape.sequence_length, options)

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
        return BatchShape(self.sequences, self.length, self.ranks)

    @property
    def query_bytes(self) -> int:
        return self.tokens * query_elements(self.work) * self.options.activation_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes of K and V together."""
        return self.tokens * key_value_elements(self.work) * self.options.activation_bytes

    @property
    def key_bytes(self) -> int:
        return self.tokens * self.work.num_kv_heads * self.work.qk_head_dim * self.options.activation_bytes

    @property
    def value_bytes(self) -> int:
        return self.key_value_bytes - self.key_bytes

    @property
    def output_bytes(self) -> int:
        return self.tokens * output_elements(self.work) * self.options.activation_bytes

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
