"""The operation of a module on its input. Widths are in elements per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from zsim.specs.model.experts import Experts, GroupedLinear, MergedWeights, Rearrange, Router
from zsim.specs.model.traced import TracedModule


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row lookup, without a matrix product."""

    rows: int
    width: int


ExchangeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class OverlappedCollectives:
    """Collectives of a product's backward that run during its two products, as Megatron's column-parallel
    layers launch them.
    """

    reduces: ExchangeKind
    """The collective of the input's gradient, during the product for the weight's gradient."""
    input_shards: int = 1
    """The number of parts that the input's tokens are cut into. If it is more than 1, one part is kept, and
    the input is gathered during the product for the input's gradient.
    """
    group: str = "tensor"
    is_sequential: bool = False
    """Nothing overlaps: the gather is before both products, and the reduction after them."""


@dataclass(frozen=True, slots=True)
class ChunkedOverlap:
    """A product cut into pieces of its tokens, so that its own collectives overlap it (Transformer Engine's
    userbuffers).
    """

    ranks: int
    gathers: Literal["forward", "backward"]
    """The direction in which the input ("forward"), or the output's gradient ("backward"), goes around the
    `ranks` in a ring, with a step during each of `ranks` pieces.
    """
    scatters: int = 0
    """Pieces of the output that are reduce-scattered, each during the next. 0 for none."""
    group: str = "tensor"
    starts_with_local_rows: bool = False
    """The input is gathered at once, during the product of the rank's own tokens (nanotron's)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`num_tokens x in_features` times `in_features x out_features`."""

    in_features: int
    out_features: int
    overlapped_collectives: OverlappedCollectives | None = None
    """The collectives of its backward, where they overlap its products."""
    chunked_overlap: ChunkedOverlap | None = None
    """The collectives that overlap its own pieces."""
    dtype: str = ""
    """The type it is computed in, if that is not the training's."""
    is_adapter: bool = False
    """It reads what the adapted product reads, and the gradients of that input are added."""
    input_cast_ranks: int = 1
    """In fp8 training, the ranks that each cast a part of its input before it is gathered."""
    gradient_cast_ranks: int = 1
    """In fp8 training, the ranks that each cast a part of its output's gradient before it is gathered."""
    follows_norm: bool = False
    """In fp8 training, the norm before it writes what it reads."""
    in_bf16: bool = False
    """In fp8 training, it is left out and stays in bf16."""

    @property
    def gathers_input(self) -> bool:
        """Whether its forward gathers its input in pieces."""
        return self.chunked_overlap is not None and self.chunked_overlap.gathers == "forward"

    @property
    def holds_gathered_input(self) -> bool:
        """Whether its forward gathers its input into a tensor of its own."""
        return (
            self.chunked_overlap is not None
            and self.chunked_overlap.starts_with_local_rows
            and self.gathers_input
        )


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation over `width`."""

    width: int
    kind: str = "rms"
    """`layer`, `rms`, `gemma_rms` (multiplies by its weight in fp32), or another of
    `zsim.cost.kernels.elementwise`.
    """
    writes_fp8: bool = False
    """The output is quantised as it is written (Transformer Engine's fused layers)."""


ContextLibrary = Literal["te", "torch", "ulysses"]
ContextMethod = Literal["p2p", "all-gather", "all-to-all", "a2a+p2p"]


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """Attention over sequences of which each of `ranks` ranks has a part."""

    ranks: int
    method: ContextMethod
    """The way in which attention sees complete sequences."""
    library: ContextLibrary
    """Transformer Engine, torch's `context_parallel`, or DeepSpeed's Ulysses."""
    inner: int = 1
    """The ranks that exchange heads for tokens, with "a2a+p2p". Rings go through every `inner`-th rank."""
    has_masks: bool = False
    """torch's context parallelism is that of FlexAttention."""


ScoreBias = Literal["none", "made", "read", "zeros"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The core of attention: scores, softmax, values, and the rotary embedding if there is one.

    A token sees itself and those before it. With `window` w it sees itself and w - 1 before it, and with
    `chunk` those of its own chunk of so many tokens. If attention is not `is_causal`, it sees all tokens, or
    with a window w tokens on each side. Cross-attention sees the encoder's tokens, as many as the decoder
    has.
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


@dataclass(frozen=True, slots=True)
class Activation:
    """Elementwise non-linearity over `width`. `gated` multiplies it with a second input."""

    width: int
    gated: bool
    name: str = "silu"


@dataclass(frozen=True, slots=True)
class Residual:
    """The add to the residual stream, after dropout if the model has it."""

    width: int
    dropout: float = 0.0
    scales: bool = False
    """The branch is multiplied by a number first."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Cross-entropy over the vocabulary."""

    vocab_size: int
    num_metrics: int = 0
    """Times that torch's cross-entropy of the held logits is computed again after each backward, for
    logging.
    """
    holds_logits: Literal["no", "as they are", "in fp32"] = "no"
    """The trainer keeps a reference to the logits, as they are or cast to fp32, until those of the next
    micro-batch replace them. With "no" it releases them before backward.
    """


class ExchangeLibrary(NamedTuple):
    """The library whose kernels an all-to-all is, "deepep" or "hybridep"."""

    name: str
    forwarded_bytes_fraction: float = 0.0
    """For an all-to-all between nodes, bytes that a GPU passes on inside its node, meanwhile, for each that
    it gets from another node.
    """


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective among ranks that share a layer: one in forward, and another in backward (None: none
    there).
    """

    forward: ExchangeKind | None
    backward: ExchangeKind | None
    width: int
    """Elements per token of the full tensor, of which each of `ranks` holds a part before a gather and after
    a scatter.
    """
    ranks: int
    group: str = "tensor"
    in_fp32: bool = False
    """The elements are statistics of the loss."""
    follows_precision: bool = False
    """A product after it reads fp8 in fp8 training, and gets it gathered quantised where the recipe
    does so.
    """
    dtype: str = ""
    """The type of the elements. Empty for the activations' type."""
    numel: int = 0
    """Elements of the full tensor, where they are not of tokens."""
    loads: tuple[float, ...] = ()
    """For an all-to-all, what each rank receives in forward (and sends in backward, or the other way round
    where `returns`) over the mean. Empty if all receive as much.
    """
    returns: bool = False
    repeats: bool = False
    """An earlier product has gathered the same input, and compiled graphs do so once (torch's
    `fx_graph_cse`).
    """
    copies: bool = False
    """The full tensor of several sequences is copied between the order of ranks and that of sequences."""
    library: ExchangeLibrary | None = None
    """The library whose kernels an all-to-all is. None for those of the cluster's backend."""
    shares_forwarded_bytes: bool = False
    """The kernels of the exchange between nodes pass these bytes on
    (`ExchangeLibrary.forwarded_bytes_fraction`), without a call of their own.
    """


@dataclass(frozen=True, slots=True)
class AdapterInput:
    """Preparation of an adapter's input: a cast to `dtype` (fp32, or empty for none), and dropout."""

    width: int
    dropout: float = 0.0
    dtype: str = ""
    recasts: bool = False
    """The input is also cast to fp32, and autocast casts it back at the product."""


@dataclass(frozen=True, slots=True)
class AdapterSum:
    """The adapter's output times its scale, added to the product's output, and cast back."""

    width: int
    dtype: str = ""
    """The type of the adapter's output. Empty for the training's."""


OpSpec = (
    Embedding
    | Linear
    | Norm
    | Attention
    | Activation
    | Residual
    | Loss
    | Exchange
    | Router
    | Experts
    | GroupedLinear
    | MergedWeights
    | Rearrange
    | AdapterInput
    | AdapterSum
    | TracedModule
)
