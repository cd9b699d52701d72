"""LFM2, LFM2-MoE and LFM 3: short gated convolutions among layers of attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_lfm2.py`, `modeling_lfm2_moe.py` and their
`configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.operations.mixers.convolution import GatedConvolution
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention_mlp_block,
    embedding,
    language_model,
    linear,
    rename_modules,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.llama import Shape, attention_modules, build_unique_blocks, layer_windows
from zsim.specs.model.families.mixers import FULL, layer_kinds
from zsim.specs.model.families.moe import routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Parameter

_CONVOLUTION, _SLIDING = "conv", "sliding_attention"
_POST_NORMS = ("post_operator_norm", "post_ffn_norm")
_ORDER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
    "self_attn.q_layernorm", "self_attn.k_layernorm", "conv.conv", "conv.in_proj", "conv.out_proj",
    "feed_forward.w1", "feed_forward.w3", "feed_forward.w2", "feed_forward.experts", "feed_forward.gate",
    "operator_norm", "ffn_norm",
)  # fmt: skip


def lfm2(config: ConfigReader) -> ModelSpec:
    """A gated MLP in every layer, of two thirds of the width in the file unless it says otherwise."""
    shape = Shape.read(config, kv_default=8)
    width = config.optional_integer("block_ff_dim") or shape.ffn
    if config.boolean("block_auto_adjust_ff_dim", True):
        factor = config.values.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float)):
            raise config.error(f"'block_ffn_dim_multiplier' is {factor!r}; expected a number")
        multiple = config.integer("block_multiple_of", 256)
        width = int((1.0 if factor is None else factor) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    listed = config.integers("full_attn_idxs")
    default = [FULL if index in listed or not listed else _CONVOLUTION for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, FULL, _CONVOLUTION)
    mlp = _gated(shape, width)
    blocks = build_unique_blocks(kinds, lambda kind: _block(config, shape, "Lfm2DecoderLayer", kind, mlp))
    return _model(config, shape, blocks)


def lfm2_moe(config: ConfigReader) -> ModelSpec:
    """Routed experts in all but the first `num_dense_layers` layers."""
    shape = Shape.read(config, kv_default=8)
    kinds = layer_kinds(config, shape.layers, [FULL] * shape.layers, FULL, _CONVOLUTION)
    has_bias = config.boolean("use_expert_bias", True)
    choice = Router(
        0, 0, 0, "sigmoid", has_choice_bias=has_bias, normalizes=config.boolean("norm_topk_prob", True)
    )
    sparse = routed_mlp(
        config, shape.hidden, config.integer("moe_intermediate_size", 1792),
        config.integer("num_experts", 32), config.integer("num_experts_per_tok", 4), choice,
        gate="feed_forward.gate", act="silu",
    )  # fmt: skip
    dense = _gated(shape, shape.ffn)
    first = config.integer("num_dense_layers", 2, minimum=0)

    def block(layer: tuple[str, bool]) -> Block:
        return _block(config, shape, "Lfm2MoeDecoderLayer", layer[0], dense if layer[1] else sparse)

    layers = [(kind, index < first) for index, kind in enumerate(kinds)]
    return _model(config, shape, build_unique_blocks(layers, block))


def lfm3(config: ConfigReader) -> ModelSpec:
    """LFM 3 has windows in layers between those of attention to all tokens, gates of heads, and norms behind
    mixer and MLP too (`modeling_lfm3.py`).
    """
    config = config.add_defaults(conv_L_cache=7)
    shape = Shape.read(config, kv_default=4, head_dim=128)
    local = [index % 4 == 0 and index > 0 for index in range(shape.layers)]
    windows = layer_windows(config, shape.layers, config.integer("sliding_window", 256), local)
    default = [
        FULL if index % 4 == 2 else _SLIDING if has_window else _CONVOLUTION
        for index, has_window in enumerate(local)
    ]
    kinds = layer_kinds(config, shape.layers, default, FULL, _SLIDING, _CONVOLUTION)
    has_norms, has_gate = (
        config.boolean("use_sandwich_norm", True),
        config.boolean("use_attention_gate", True),
    )
    has_bias, width = config.boolean("attention_bias", False), shape.heads * shape.head_dim

    def block(layer: tuple[str, int | None]) -> Block:
        kind, window = layer
        mixer = attention_modules(
            shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="each head", window=window
        )
        if kind == _CONVOLUTION:
            mixer = _convolution(config, shape)
        elif has_gate:
            gate = linear("self_attn.g_proj", shape.hidden, shape.heads, shares_input=True)
            mixer[-2:-1] = [gate, mixer[-2], activation("self_attn.gate", width, "sigmoid", gated=True)]
        post = [[rms_norm(name, shape.hidden)] if has_norms else [] for name in _POST_NORMS]
        modules = (
            rms_norm("operator_norm", shape.hidden), *mixer, *post[0],
            residual("operator.residual", shape.hidden),
            rms_norm("ffn_norm", shape.hidden), *_gated(shape, shape.ffn), *post[1],
            residual("feed_forward.residual", shape.hidden),
        )  # fmt: skip
        attention = (f"self_attn.{name}" for name in ("o_proj", "q_norm", "k_norm", "g_proj"))
        names = (*_ORDER[:3], *attention, *_ORDER[6:], *_POST_NORMS)
        return set_registration(Block("Lfm3DecoderLayer", modules), *names)

    return _model(config, shape, build_unique_blocks(list(zip(kinds, windows, strict=True)), block))


def _gated(shape: Shape, width: int) -> list[Module]:
    return [
        linear("feed_forward.w1", shape.hidden, width),
        linear("feed_forward.w3", shape.hidden, width, shares_input=True),
        activation("feed_forward.act", width, "silu", gated=True),
        linear("feed_forward.w2", width, shape.hidden),
    ]


def _block(config: ConfigReader, shape: Shape, name: str, kind: str, mlp: Sequence[Module]) -> Block:
    mixer = _attention(shape) if kind == FULL else _convolution(config, shape)
    norms = rms_norm("operator_norm", shape.hidden), rms_norm("ffn_norm", shape.hidden)
    adds = residual("operator.residual", shape.hidden), residual("feed_forward.residual", shape.hidden)
    return set_registration(attention_mlp_block(name, norms, mixer, mlp, adds), *_ORDER)


def _attention(shape: Shape) -> list[Module]:
    modules = attention_modules(shape, qk_norm="each head")
    for old, new in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"), ("o_proj", "out_proj")):
        modules = rename_modules(modules, old, new)
    return modules


def _convolution(config: ConfigReader, shape: Shape) -> list[Module]:
    has_bias, taps = config.boolean("conv_bias", False), config.integer("conv_L_cache", 3)
    parameters = [Parameter("weight", (shape.hidden, 1, taps))]
    if has_bias:
        parameters.append(Parameter("bias", (shape.hidden,)))
    return [
        linear("conv.in_proj", shape.hidden, 3 * shape.hidden, bias=has_bias),
        Module("conv.conv", GatedConvolution(shape.hidden, taps), tuple(parameters)),
        linear("conv.out_proj", shape.hidden, shape.hidden, bias=has_bias),
    ]


def _model(config: ConfigReader, shape: Shape, blocks: Sequence[Block]) -> ModelSpec:
    return language_model(
        config,
        shape.hidden,
        [embedding("model.embed_tokens", shape.vocab, shape.hidden)],
        blocks,
        config.integer("max_position_embeddings", 128_000),
        root="model.layers",
        final=[rms_norm("model.embedding_norm", shape.hidden)],
        is_tied=True,
    )
