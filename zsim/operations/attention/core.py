"""The fields of attention's core, and what they count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.shapes import BatchShape
from zsim.operations.sharding import ContextSharding

ScoreBias = Literal["none", "made", "read", "zeros"]


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """The core of attention: scores, softmax, values, and the rotary embedding if there is one.

    A token sees itself and those before it. With `window` w it sees itself and w - 1 before it, and with
    `chunk` those of its own chunk of so many tokens. If attention is not `is_causal`, it sees all tokens, or
    with a window w tokens on each side. T5's cross-attention sees the encoder's tokens, as many as the
    decoder has. That with `sample_keys` sees all rows of the sequence's images or sounds.
    """

    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    rotary: bool = True
    dropout: float = 0.0
    window: int | None = None
    upcasts_softmax: bool = True
    """Written-out attention computes its softmax in fp32 (most families)."""
    splits_fused_qkv: bool = False
    """q, k and v are slices of one projection's output."""
    unpads: bool = False
    """q, k and v are gathered by a padding mask before and the output is scattered after, as flash-attn 0.2's
    `FlashMHA` does whenever it is given a mask, padding or not. Its kernel collects the output in fp32
    (flash_attn/flash_attention.py, csrc/flash_attn/fmha_api.cpp `o_tmp`).
    """
    host_waits: bool = False
    """The host reads from the GPU before it launches the kernel, and so cannot run ahead of the layer."""
    context: ContextSharding | None = None
    """The ranks that share every sequence, if several do."""
    is_causal: bool = True
    chunk: int | None = None
    softcaps: bool = False
    """Scores are squeezed through tanh."""
    has_sinks: bool = False
    """A learned logit per head is a further column of the softmax."""
    bias: ScoreBias = "none"
    """A bias learned by distance, added to the scores of all heads: "made" by this layer, "read" from the
    layer that made it, "zeros" where none is learned but a tensor of zeros is added all the same.
    """
    rotary_width: int | None = None
    """Features of a head that have rotary positions, if not all have."""
    is_latent: bool = False
    """Queries and keys are put together from a part without positions and one with, and all heads share the
    key's (multi-head latent attention).
    """
    scales_rotary: bool = False
    """Cosines and sines are multiplied by a factor other than 1 (YaRN's)."""
    reads_keys: bool = False
    """Keys and values are those of an earlier layer, which has rotated and keeps them."""
    sample_keys: int = 0
    """Rows of an image or a sound, of which keys and values are (cross-attention). 0 for those of tokens."""

    def num_keys(self, shape: BatchShape) -> int:
        """Keys that a sequence has."""
        samples = shape.sounds or shape.images
        if not self.sample_keys or samples is None:
            return self.sample_keys or shape.sequence_length
        return round(self.sample_keys * samples.per_sequence)

    def key_rows(self, shape: BatchShape) -> int:
        """Rows of keys and values of the micro-batch."""
        return shape.sequences * self.num_keys(shape) if self.sample_keys else shape.tokens

    @property
    def query_elements(self) -> int:
        """Elements of q per token."""
        return self.num_heads * self.qk_head_dim

    @property
    def key_value_elements(self) -> int:
        """Elements of k and v per token."""
        return self.num_kv_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def input_elements(self) -> int:
        """Elements of q, k and v per token."""
        return self.query_elements + self.key_value_elements

    @property
    def kept_key_value_elements(self) -> int:
        """Elements of k and v per token that no earlier layer keeps."""
        return 0 if self.reads_keys else self.key_value_elements

    @property
    def output_elements(self) -> int:
        """Elements of the output per token."""
        return self.num_heads * self.v_head_dim
