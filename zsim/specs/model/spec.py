"""The specification of a model: leaf modules, grouped into blocks.

ZeRO-3 fetches leaf modules, FSDP wraps blocks, so a model has both: `ModelSpec.blocks` has one entry per
transformer block, and entries of the same shape are the *same* `Block` object, so that work is derived
once per shape and not once per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from zsim.specs.model.experts import Experts, GroupedLinear, Rearrange, Router
from zsim.specs.model.traced import Captured, Extent, Traced


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor, in the framework's layout (FSDP2 shards its first dimension). `summed_over`: the kind of
    group whose ranks each compute a part of its gradient, from their part of the tokens ("tensor").
    `trainable`: `requires_grad`; a frozen one has no gradient and no optimizer states. `belongs_to`: the kind
    of ranks that have it, where they are others than those of data parallelism ("expert_data"): its gradient
    is reduced over them. `stored`: the type it is kept in, if that is not the framework's: "fp32", "bf16",
    "nf4" or "nf4-single" (4 bits, with scales that are quantised again or not).
    `in_fp8`: a product reads it quantised."""

    name: str
    shape: tuple[int, ...]
    summed_over: str = ""
    trainable: bool = True
    belongs_to: str = ""
    stored: str = ""
    in_fp8: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


# The work of a module on its input. Widths are in elements per token.


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
    the product for the weight's."""

    reduces: ExchangeKind
    input_shards: int = 1
    group: str = "tensor"


@dataclass(frozen=True, slots=True)
class InPieces:
    """A product cut into pieces of its tokens, so that its own collectives overlap it (Transformer Engine's
    userbuffers). `gathers` ("forward" or "backward"): its input, or its output's gradient, goes around the
    `ranks` in a ring, a step beneath each of `ranks` pieces; `scatters`: that many pieces of its output are
    reduce-scattered, each beneath the next; 0: none."""

    ranks: int
    gathers: Literal["forward", "backward"]
    scatters: int = 0
    group: str = "tensor"


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
    the ranks that exchange heads for tokens; rings go through every `inner`-th rank."""

    ranks: int
    method: ContextMethod
    library: Literal["te", "torch", "deepspeed"]
    inner: int = 1


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


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective among ranks that share a layer: one in forward, another in backward (None: none there).
    `width`: elements per token of the full tensor, which each of `ranks` holds a part of before a gather and
    after a scatter; `in_fp32`: statistics of the loss; `follows_precision`: a product behind it reads fp8 in
    fp8 training, and gets it gathered quantised where the recipe does so. `dtype`: of its elements, "" for
    the activations'. `numel`: elements of the full tensor, where they are not of tokens. `loads`: of an
    all-to-all, what each rank receives in forward (and sends in backward, or the other way round where
    `returns`) over the mean; () if all receive as much."""

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
    | Rearrange
    | AdapterInput
    | AdapterSum
    | Traced
)


@dataclass(frozen=True)
class Module:
    """A leaf module: its work and the parameters it owns, in registration order.

    `name` is relative to the block (`self_attn.q_proj`), or complete outside the blocks (`model.norm`).
    `shares_input`: its input is a tensor that an earlier module of the block already keeps for backward
    (k_proj and v_proj read the input of q_proj), so keeping it costs no extra memory. `token_shards`: it sees
    this fraction of the micro-batch's tokens (sequence and context parallelism). `rows_per_token`: rows that
    it sees for each of these tokens (a token goes to several experts). `host_waits`: the host reads from the
    GPU before it launches its forward (how many rows each expert has).
    `input_gradient`: its input needs a gradient, because something before it is trained. `borrows_frozen`: it
    multiplies by another module's weight (a tied head), which is frozen. `owner`: the module that its
    parameters belong to, where that is not `name`: the module is a function in a container, between its
    children ("": in the block, or the model).
    """

    name: str
    work: Work
    parameters: tuple[Parameter, ...] = ()
    shares_input: bool = False
    token_shards: int = 1
    rows_per_token: float = 1.0
    host_waits: bool = False
    input_gradient: bool = True
    borrows_frozen: bool = False
    owner: str | None = None

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def path_of(self, parameter: Parameter) -> str:
        """A parameter's name, relative to the block."""
        return joined(self.name if self.owner is None else self.owner, parameter.name)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @property
    def trains_weight(self) -> bool:
        """Whether the weight that it multiplies by gets a gradient."""
        own = next((one.trainable for one in self.parameters if one.name == "weight"), None)
        return not self.borrows_frozen if own is None else own

    @property
    def has_backward(self) -> bool:
        """Whether autograd runs its backward: its input or one of its parameters needs a gradient."""
        is_tied = isinstance(self.work, Linear) and self.trains_weight
        return self.input_gradient or self.trainable_numel > 0 or is_tied


@dataclass(frozen=True)
class Block:
    """One transformer block: its modules in the order in which they run forward.

    `registration`: names of its modules in the order of `named_parameters()` if they run in another order
    (Llama registers `input_layernorm` after the MLP), else None. `held`: what it takes as input, where that
    is not the residual stream. `is_wrapped`: whether frameworks that wrap blocks wrap it; modules that run
    between two blocks are a block that they leave to the root."""

    kind: str
    modules: tuple[Module, ...]
    registration: tuple[str, ...] | None = None
    held: Extent | None = None
    is_wrapped: bool = True

    @cached_property
    def numel(self) -> int:
        return sum(module.numel for module in self.modules)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(module.trainable_numel for module in self.modules)

    @cached_property
    def registered_modules(self) -> tuple[Module, ...]:
        """The modules that own parameters, in the order of `named_parameters()`."""
        owners = tuple(module for module in self.modules if module.parameters)
        if self.registration is None:
            return owners
        by_name = {module.name: module for module in owners}
        return tuple(by_name[name] for name in self.registration)


@dataclass(frozen=True)
class ModelSpec:
    """A whole model.

    `before` (embeddings) and `after` (final norm, LM head, loss) run once around the blocks. A tied head is a
    `Linear` module without parameters. `block_prefix` precedes the block's number (`model.layers` in
    `model.layers.0.self_attn.q_proj.weight`). `registered_before_blocks`: names of the modules that
    `named_parameters()` lists before the blocks, in order, if they are not just `before` (OPT registers its
    final norm there), else None; `registered_after_blocks`: those behind the blocks, if not in the order in
    which they run. `not_simulated`: why zsim only counts this family. `mtp_parameters`: parameters of a
    module for multi-token prediction that the published checkpoint has besides, without the embedding and
    head that it shares. `has_encoder`: the first blocks are those of an encoder, and the decoder sees as many
    tokens; `block_names`: full names of all blocks where one prefix is not enough. Of a pipeline stage:
    `first_block`, the number of its first block. `token_shards`: the fraction of the tokens that the residual
    stream has on a rank. `block_names`: complete names of the blocks, where they are not numbered in one
    list; "" of a block that is not wrapped. `registration`: complete names of all parameters in order, where
    the order is not that of modules before, blocks, modules after. `captured`: of a model that was captured
    from a torch module."""

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    before: tuple[Module, ...]
    blocks: tuple[Block, ...]
    after: tuple[Module, ...]
    block_prefix: str
    is_tied: bool
    source: str
    not_simulated: str | None = None
    registered_before_blocks: tuple[str, ...] | None = None
    first_block: int = 0
    token_shards: int = 1
    registered_after_blocks: tuple[str, ...] | None = None
    mtp_parameters: int = 0
    has_encoder: bool = False
    block_names: tuple[str, ...] = ()
    registration: tuple[str, ...] | None = None
    captured: Captured | None = None

    def block_name(self, number: int) -> str:
        """The full name of a block, by its number in the whole model."""
        return self.block_names[number] if self.block_names else f"{self.block_prefix}.{number}"

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Names of the module lists that hold the blocks."""
        if not self.block_names:
            return (self.block_prefix,)
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.block_names if name))

    @property
    def learned_positions(self) -> int | None:
        """The maximum sequence length if positions are a table of weights; else None."""
        tables = sum(isinstance(module.work, Embedding) for module in self.before)
        return self.max_positions if tables > 1 else None

    @cached_property
    def numel(self) -> int:
        """Parameters in all, tied weights counted once."""
        return self.rest_numel + sum(block.numel for block in self.blocks)

    @cached_property
    def trainable_numel(self) -> int:
        """Parameters with a gradient and optimizer states."""
        rest = sum(module.trainable_numel for module in (*self.before, *self.after))
        return rest + sum(block.trainable_numel for block in self.blocks)

    @cached_property
    def rest_numel(self) -> int:
        """Parameters outside the blocks."""
        return sum(module.numel for module in (*self.before, *self.after))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(full name, parameter) in the order of torch's `named_parameters()`, tied weights once."""
        if self.registration is None:
            yield from self._by_module()
            return
        by_name = dict(self._by_module())
        yield from ((name, by_name[name]) for name in self.registration)

    def _by_module(self) -> Iterator[tuple[str, Parameter]]:
        early = list(self.before)
        if self.registered_before_blocks is not None:
            by_name = {module.name: module for module in (*self.before, *self.after)}
            early = [by_name[name] for name in self.registered_before_blocks if name in by_name]
        for module in early:
            yield from _named("", module)
        for index, block in enumerate(self.blocks, self.first_block):
            for module in block.registered_modules:
                yield from _named(self.block_name(index), module)
        listed = {module.name for module in early}
        late = list(self.after)
        if self.registered_after_blocks is not None:
            late.sort(key=lambda module: _place(module.name, self.registered_after_blocks or ()))
        for module in late:
            if module.name not in listed:
                yield from _named("", module)


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def joined(prefix: str, name: str) -> str:
    """`prefix.name`, or the one of the two that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _named(prefix: str, module: Module) -> Iterator[tuple[str, Parameter]]:
    for parameter in module.parameters:
        yield joined(prefix, module.path_of(parameter)), parameter
