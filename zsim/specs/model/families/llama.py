"""Parts of decoders of the Llama kind: RMSNorm, rotary positions, gated MLP.

Modules are in the order in which they run. Names, shapes and defaults are as in transformers 5.23
(`modeling_llama.py`, `configuration_llama.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    embedding,
    language_model,
    linear,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.spec import Block, ModelSpec, Module

QkNorm = Literal["none", "each head", "all heads"]

REGISTRATION = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions that all these families have."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dropout: float
    act: str

    @classmethod
    def read(
        cls,
        config: ConfigReader,
        *,
        kv_default: int | None = None,
        head_dim: int | None = None,
        act: str = "",
        act_key: str = "hidden_act",
    ) -> Shape:
        """The dimensions in a file. `kv_default` and `head_dim` are the family's defaults, and None derives
        them from the heads.
        """
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        # What the file says, also null, counts before the family's default.
        default = heads if "num_key_value_heads" in config.values or kv_default is None else kv_default
        kv_heads = config.integer("num_key_value_heads", default)
        config.check_kv_heads(heads, kv_heads)
        is_said = "head_dim" in config.values
        explicit = config.optional_integer("head_dim") or (None if is_said else head_dim)
        return cls(
            hidden=hidden,
            ffn=config.integer("intermediate_size"),
            layers=config.num_blocks("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=explicit or config.head_dim(hidden, heads),
            vocab=config.integer("vocab_size"),
            dropout=config.fraction("attention_dropout", 0.0),
            act=config.activation(act_key, act or "silu"),
        )


def attention_modules(
    shape: Shape,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QkNorm = "none",
    norm: str = "rms",
    window: int | None = None,
    rotary: bool = True,
) -> list[Module]:
    """q, k and v projections, the core, the output projection.

    With `qk_norm` there is a norm of kind `norm` over each head of queries and keys, or over all of them.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    modules = [linear("self_attn.q_proj", shape.hidden, queries, bias=qkv_bias)]
    if qk_norm != "none":
        modules.append(_head_norm("q", shape.head_dim, shape.heads, qk_norm, norm))
    modules.append(linear("self_attn.k_proj", shape.hidden, keys, bias=qkv_bias, shares_input=True))
    if qk_norm != "none":
        modules.append(_head_norm("k", shape.head_dim, shape.kv_heads, qk_norm, norm))
    modules.append(linear("self_attn.v_proj", shape.hidden, keys, bias=qkv_bias, shares_input=True))
    core = attention(
        "self_attn.core",
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        rotary=rotary,
        dropout=shape.dropout,
        window=window,
    )
    modules.append(core)
    modules.append(linear("self_attn.o_proj", queries, shape.hidden, bias=o_bias))
    return modules


def _head_norm(name: str, head_dim: int, heads: int, over: QkNorm, kind: str) -> Module:
    full = f"self_attn.{name}_norm"
    if over == "all heads":
        return rms_norm(full, head_dim * heads, kind=kind)
    return rms_norm(full, head_dim, rows_per_token=heads, kind=kind)


def gated_mlp(name: str, hidden: int, ffn: int, act: str, *, bias: bool = False) -> list[Module]:
    """`down(act(gate(x)) * up(x))`."""
    return [
        linear(f"{name}.gate_proj", hidden, ffn, bias=bias),
        linear(f"{name}.up_proj", hidden, ffn, bias=bias, shares_input=True),
        activation(f"{name}.act_fn", ffn, act, gated=True),
        linear(f"{name}.down_proj", ffn, hidden, bias=bias),
    ]


def pre_norm_block(
    kind: str,
    shape: Shape,
    core: Sequence[Module],
    mlp: Sequence[Module] | None = None,
    *,
    dropout: float = 0.0,
    scales: bool = False,
    norm: str = "rms",
    registration: Sequence[str] = REGISTRATION,
) -> Block:
    """Norm, attention, add, then norm, MLP (default: the gated one), add."""
    mlp = gated_mlp("mlp", shape.hidden, shape.ffn, shape.act) if mlp is None else mlp
    norms = (
        rms_norm("input_layernorm", shape.hidden, kind=norm),
        rms_norm("post_attention_layernorm", shape.hidden, kind=norm),
    )
    adds = (
        residual("self_attn.residual", shape.hidden, dropout, scales=scales),
        residual("mlp.residual", shape.hidden, dropout, scales=scales),
    )
    return set_registration(attention_mlp_block(kind, norms, core, mlp, adds), *registration)


def layer_windows(
    config: ConfigReader, layers: int, window: int | None, is_local: Sequence[bool]
) -> list[int | None]:
    """The attention window of each layer: `layer_types` where the file has it, else `is_local`."""
    types = config.strings("layer_types")
    if types and len(types) != layers:
        raise config.error(
            f"'layer_types' names {len(types)} layers; expected {layers}, the number of layers"
        )
    local = [kind == "sliding_attention" for kind in types] if types else is_local
    return [window if has_window else None for has_window in local]


def rotary_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has rotary positions, as `no_rope_layers` says (1: it has).

    Without that key all layers have them but every `no_rope_layer_interval`-th.
    """
    listed = config.integers("no_rope_layers")
    if listed and len(listed) != layers:
        raise config.error(f"'no_rope_layers' has {len(listed)} numbers; expected {layers}, one per layer")
    interval = config.integer("no_rope_layer_interval", 4)
    return [bool(has_rotary) for has_rotary in listed] or [
        (index + 1) % interval != 0 for index in range(layers)
    ]


_Kind = TypeVar("_Kind")


def build_unique_blocks(kinds: Sequence[_Kind], build: Callable[[_Kind], Block]) -> list[Block]:
    """The block of each layer. Layers with the same window (or whatever tells them apart) share one
    `Block`.
    """
    built = {kind: build(kind) for kind in dict.fromkeys(kinds)}
    return [built[kind] for kind in kinds]


def decoder(
    config: ConfigReader,
    shape: Shape,
    blocks: Sequence[Block],
    *,
    max_positions: int,
    is_tied: bool | None = False,
    softcaps_logits: bool = False,
    scales_logits: bool = False,
    norm: str = "rms",
) -> ModelSpec:
    """Token embedding, blocks, final norm, head."""
    return language_model(
        config,
        shape.hidden,
        [embedding("model.embed_tokens", shape.vocab, shape.hidden)],
        blocks,
        config.integer("max_position_embeddings", max_positions),
        root="model.layers",
        final=[rms_norm("model.norm", shape.hidden, kind=norm)],
        is_tied=is_tied,
        softcaps=softcaps_logits,
        scales=scales_logits,
    )


def partial_rotary(config: ConfigReader, head_dim: int, default: float = 0.5) -> int | None:
    """Features of a head that are rotated. None for all."""
    rope = config.values.get("rope_parameters")
    factor = config.values.get("partial_rotary_factor")
    if factor is None and isinstance(rope, dict):
        factor = rope.get("partial_rotary_factor")
    factor = default if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise config.error(f"'partial_rotary_factor' is {factor!r}; expected a number above 0 up to 1")
    return None if factor == 1 else int(head_dim * factor)
