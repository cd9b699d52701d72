"""The work of a module on its input. Widths are in elements per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

from zsim.dataclass import dataclass
from zsim.specs.model.experts import Experts, GroupedLinear, MergedWeights, Rearrange, Router
from zsim.specs.model.traced import Traced


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row lookup; no matrix product."""

    rows: int
    width: int


ExchangeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Beneath:
    """Collectives of a product's backward that run beneath its two products, as Megatron's column-parallel
    layers launch them. `input_shards` > 1: the input is kept as that fraction of its tokens, and gathered
    beneath the product for the input's gradient; `reduces`: the collective of the input's gradient, beneath
    the product for the weight's. `in_line`: the gather is before both products, the reduction behind them."""

    reduces: ExchangeKind
    input_shards: int = 1
    group: str = "tensor"
    in_line: bool = False


@dataclass(frozen=True, slots=True)
class InPieces:
    """A product cut into pieces of its tokens, so that its own collectives overlap it (Transformer Engine's
    userbuffers). `gathers` ("forward" or "backward"): its input, or its output's gradient, goes around the
    `ranks` in a ring, a step beneath each of `ranks` pieces; `scatters`: that many pieces of its output are
    reduce-scattered, each beneath the next; 0: none. `own_rows`: it is gathered at once, beneath the product
    of the rank's own tokens (nanotron's)."""

    ranks: int
    gathers: Literal["forward", "backward"]
    scatters: int = 0
    group: str = "tensor"
    own_rows: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """`num_tokens x in_features` times `in_features x out_features`; `beneath`: the collectives of its
    backward, where they overlap its products; `in_pieces`: those that overlap its own pieces. `dtype`: the
    type it is computed in, if that is not the training's. `is_adapter`: it reads what the product beside it
    reads, and the gradients of that input are added. In fp8 training: `input_parts` and `gradient_parts`: the
    ranks that each cast a part of its input, or of its output's gradient, before it is gathered;
    `follows_norm`: the norm before it writes what it reads; `in_bf16`: it is left out."""

    in_features: int
    out_features: int
    beneath: Beneath | None = None
    in_pieces: InPieces | None = None
    dtype: str = ""
    is_adapter: bool = False
    input_parts: int = 1
    gradient_parts: int = 1
    follows_norm: bool = False
    in_bf16: bool = False

    @property
    def gathers_input(self) -> bool:
        """Whether its forward gathers its input in pieces."""
        return self.in_pieces is not None and self.in_pieces.gathers == "forward"

    @property
    def holds_gathered(self) -> bool:
        """Whether its forward gathers its input into a tensor of its own."""
        return self.in_pieces is not None and self.in_pieces.own_rows and self.gathers_input


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation over `width`: `layer`, `rms`, `gemma_rms` (multiplies by its weight in fp32), or another
    of `zsim.cost.kernels.elementwise`.
    `writes_fp8`: its output is quantised as it is written (Transformer Engine's fused layers)."""

    width: int
    kind: str = "rms"
    writes_fp8: bool = False


ContextMethod = Literal["p2p", "all-gather", "all-to-all", "a2a+p2p"]


@dataclass(frozen=True, slots=True)
class ContextShare:
    """How attention sees whole sequences of which each of `ranks` ranks has a part: `method`, by the code of
    `library` (Transformer Engine, torch's `context_parallel`, DeepSpeed's Ulysses). `inner`: with "a2a+p2p",
    the ranks that exchange heads for tokens; rings go through every `inner`-th rank. `has_masks`: torch's is
    that of FlexAttention."""

    ranks: int
    method: ContextMethod
    library: Literal["te", "torch", "deepspeed"]
    inner: int = 1
    has_masks: bool = False


ScoreBias = Literal["none", "made", "read", "zeros"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The core of attention: scores, softmax, values, and the rotary embedding if there is one.

    `upcasts_softmax`: written-out attention computes its softmax in fp32 (most families). `splits_fused_qkv`:
    q, k and v are slices of one projection's output. `unpads`: q, k and v are gathered by a padding mask
    before and the output is scattered after, as flash-attn 0.2's `FlashMHA` does whenever it is given a mask,
    padding or not; its kernel collects the output in fp32 (flash_attn/flash_attention.py,
    csrc/flash_attn/fmha_api.cpp `o_tmp`). `host_waits`: the host reads from the GPU before it launches the
    kernel, and so cannot run ahead of the layer. `context`: the ranks that share every sequence, if several
    do.

    A token sees itself and those before it; with `window` w itself and w - 1 before it; with `chunk` those of
    its own chunk of so many tokens. Not `is_causal`: it sees all tokens, or with a window w tokens on each
    side; cross-attention sees the encoder's, as many as the decoder has. `softcaps`: scores are squeezed
    through tanh; `has_sinks`: a learned logit per head is a further column of the softmax. `bias`: learned by
    distance, added to the scores of all heads: "made" by this layer, "read" from the layer that made it,
    "zeros" where none is learned but a tensor of zeros is added all the same. `rotary_width`: of a head's
    features, if not all have rotary positions; `is_latent`: queries and keys are put together from a part
    without positions and one with, and all heads share the key's (multi-head latent attention).
    `scales_rotary`: cosines and sines are multiplied by a factor other than 1 (YaRN's).
    """

    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    rotary: bool = True
    dropout: float = 0.0
    window: int | None = None
    upcasts_softmax: bool = True
    splits_fused_qkv: bool = False
    unpads: bool = False
    host_waits: bool = False
    context: ContextShare | None = None
    is_causal: bool = True
    chunk: int | None = None
    softcaps: bool = False
    has_sinks: bool = False
    bias: ScoreBias = "none"
    rotary_width: int | None = None
    is_latent: bool = False
    scales_rotary: bool = False


@dataclass(frozen=True, slots=True)
class Activation:
    """Elementwise non-linearity over `width`; `gated` multiplies it with a second input."""

    width: int
    gated: bool
    name: str = "silu"


@dataclass(frozen=True, slots=True)
class Residual:
    """The add to the residual stream, after dropout if the model has it. `scales`: the branch is multiplied
    by a number first."""

    width: int
    dropout: float = 0.0
    scales: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Cross-entropy over the vocabulary. `holds_logits`: the trainer keeps a reference to the logits, as they
    are or cast to fp32, until those of the next micro-batch replace them; "no": it releases them before
    backward. `num_metrics`: how many more times torch's cross-entropy of the held logits is computed after
    each backward, for logging."""

    vocab_size: int
    num_metrics: int = 0
    holds_logits: Literal["no", "as they are", "in fp32"] = "no"


class ExchangeLibrary(NamedTuple):
    """Whose kernels an all-to-all is, "deepep" or "hybridep". `forwards`: of one between nodes, bytes that a
    GPU passes on inside its node, meanwhile, for each that it gets from another."""

    name: str
    forwards: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective among ranks that share a layer: one in forward, another in backward (None: none there).
    `width`: elements per token of the full tensor, which each of `ranks` holds a part of before a gather and
    after a scatter; `in_fp32`: statistics of the loss; `follows_precision`: a product behind it reads fp8 in
    fp8 training, and gets it gathered quantised where the recipe does so. `dtype`: of its elements, "" for
    the activations'. `numel`: elements of the full tensor, where they are not of tokens. `loads`: of an
    all-to-all, what each rank receives in forward (and sends in backward, or the other way round where
    `returns`) over the mean; () if all receive as much. `repeats`: an earlier product has gathered the same
    input, and compiled graphs do so once (torch's `fx_graph_cse`). `copies`: of several sequences, the full
    tensor is copied between the order of ranks and that of sequences. `library`: whose kernels an all-to-all
    is, None for those of the cluster's backend; `is_beneath`: the kernels of the exchange between nodes pass
    these bytes on (`ExchangeLibrary.forwards`), without a call of their own."""

    forward: ExchangeKind | None
    backward: ExchangeKind | None
    width: int
    ranks: int
    group: str = "tensor"
    in_fp32: bool = False
    follows_precision: bool = False
    dtype: str = ""
    numel: int = 0
    loads: tuple[float, ...] = ()
    returns: bool = False
    repeats: bool = False
    copies: bool = False
    library: ExchangeLibrary | None = None
    is_beneath: bool = False


@dataclass(frozen=True, slots=True)
class AdapterInput:
    """Cast of an adapter's input to `dtype` (fp32; "": none), dropout, and, with `recasts`, a cast to fp32
    and autocast's cast back at the product."""

    width: int
    dropout: float = 0.0
    dtype: str = ""
    recasts: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSum:
    """The adapter's output in `dtype` ("": the training's) times its scale, added to the product's output,
    and cast back."""

    width: int
    dtype: str = ""


Work = (
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
    | Traced
)
