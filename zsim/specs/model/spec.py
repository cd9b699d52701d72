"""What a model is: leaf modules, grouped into blocks.

ZeRO-3 fetches leaf modules, FSDP wraps blocks, so a model is both: `ModelSpec.blocks` is one entry per
transformer block, and entries of the same shape are the *same* `Block` object, so that work is derived
once per shape and not once per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor, in the framework's own layout (its first dimension is what FSDP2 shards)."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


# What a module does with its input. Widths are in elements per token.


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row lookup; no matrix product."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Linear:
    """`num_tokens x in_features` times `in_features x out_features`."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation over `width`: `layer`, `rms`, or `gemma_rms` (multiplies by its weight in fp32)."""

    width: int
    kind: str = "rms"


@dataclass(frozen=True, slots=True)
class Attention:
    """The core of attention: scores, softmax, values; rotary embedding included where there is one.

    `upcasts_softmax`: written-out attention computes its softmax in fp32 (most families).
    `splits_fused_qkv`: q, k and v are slices of one projection's output.
    `unpads`: q, k and v are gathered by a padding mask before and the output scattered after, as flash-attn
    0.2's `FlashMHA` does whenever it is given a mask, padding or not; its kernel collects the output in fp32
    (flash_attn/flash_attention.py, csrc/flash_attn/fmha_api.cpp `o_tmp`). `host_waits`: the host reads
    something from the GPU before it launches the kernel, and so cannot run ahead of the layer.
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


@dataclass(frozen=True, slots=True)
class Activation:
    """Elementwise non-linearity over `width`; `gated` multiplies it with a second input."""

    width: int
    gated: bool
    name: str = "silu"


@dataclass(frozen=True, slots=True)
class Residual:
    """Adding the residual stream (and, where the model has it, dropout before)."""

    width: int
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Cross-entropy over the vocabulary. `holds_logits`: the trainer has a name for the logits, as they are
    or cast to fp32, until the next micro-batch's take it over; "no": it lets go of them before backward.
    `num_metrics`: how many more times it takes torch's cross-entropy of those it holds after each backward,
    to log it."""

    vocab_size: int
    num_metrics: int = 0
    holds_logits: Literal["no", "as they are", "in fp32"] = "no"


@dataclass(frozen=True, slots=True)
class Experts:
    """Router and routed experts of a mixture-of-experts layer; `top_k` of `num_experts` per token."""

    num_experts: int
    top_k: int
    in_features: int
    expert_features: int


Work = Embedding | Linear | Norm | Attention | Activation | Residual | Loss | Experts


@dataclass(frozen=True)
class Module:
    """A leaf module: what it computes and the parameters it owns, in registration order.

    `name` is relative to the block (`self_attn.q_proj`), or whole outside the blocks (`model.norm`).
    `shares_input`: its input is the tensor that an earlier module of the block keeps for backward already
    (k_proj and v_proj read what q_proj reads), so it costs no memory of its own.
    """

    name: str
    work: Work
    parameters: tuple[Parameter, ...] = ()
    shares_input: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Block:
    """One transformer block: its modules in the order they run forward.

    `registration` names its modules in the order of `named_parameters()` where that is not the order of
    running (Llama registers `input_layernorm` after the MLP); None when it is.
    """

    kind: str
    modules: tuple[Module, ...]
    registration: tuple[str, ...] | None = None

    @cached_property
    def numel(self) -> int:
        return sum(module.numel for module in self.modules)

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

    `before` (embeddings) and `after` (final norm, head, loss) run once around the blocks. A tied head is a
    `Linear` module without parameters of its own. `block_prefix` is what stands before the block's number
    (`model.layers` in `model.layers.0.self_attn.q_proj.weight`). `registered_before_blocks` names the
    modules that `named_parameters()` lists before the blocks, in order, where they are not just `before` (OPT
    registers its final norm there); None when they are. `not_simulated` says why zsim only counts this
    family.
    """

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

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence where positions are a table of weights; None where they are not."""
        tables = sum(isinstance(module.work, Embedding) for module in self.before)
        return self.max_positions if tables > 1 else None

    @cached_property
    def numel(self) -> int:
        """Parameters in all, tied weights counted once."""
        return self.rest_numel + sum(block.numel for block in self.blocks)

    @cached_property
    def rest_numel(self) -> int:
        """Parameters outside the blocks."""
        return sum(module.numel for module in (*self.before, *self.after))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(full name, parameter) in the order of torch's `named_parameters()`, tied weights once."""
        early = list(self.before)
        if self.registered_before_blocks is not None:
            by_name = {module.name: module for module in (*self.before, *self.after)}
            early = [by_name[name] for name in self.registered_before_blocks]
        for module in early:
            yield from _named(module.name, module)
        for index, block in enumerate(self.blocks):
            for module in block.registered_modules:
                yield from _named(f"{self.block_prefix}.{index}.{module.name}", module)
        listed = {module.name for module in early}
        for module in self.after:
            if module.name not in listed:
                yield from _named(module.name, module)


def _named(name: str, module: Module) -> Iterator[tuple[str, Parameter]]:
    for parameter in module.parameters:
        yield f"{name}.{parameter.name}", parameter
