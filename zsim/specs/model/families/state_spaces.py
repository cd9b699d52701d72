"""Granite 4, Bamba, Jamba and Falcon-H1: state spaces among, or beside, layers of attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_granitemoehybrid.py`, `modeling_bamba.py`,
`modeling_jamba.py`, `modeling_falcon_h1.py` and their `configuration_*.py`). Falcon-H1's branches read one
norm's output and are added up. Its products with fixed numbers, and those of Granite's embedding, are left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from zsim.operations.mixers.mamba1 import SelectiveScan
from zsim.operations.operation import Role
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention_mlp_block,
    embedding,
    language_model,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    gated_mlp,
    partial_rotary,
)
from zsim.specs.model.families.mixers import (
    FULL,
    LINEAR,
    convolution,
    layer_kinds,
    state_space,
    state_space_layer,
)
from zsim.specs.model.families.moe import routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Parameter

_ATTENTION = tuple(name for name in REGISTRATION if name.startswith("self_attn."))
_FEED_FORWARD = tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))
_MAMBA2 = ("mamba", "mamba.conv1d", "mamba.in_proj", "mamba.norm", "mamba.out_proj")
_ALIASES = {"mamba": LINEAR, "attention": FULL}


def granitemoehybrid(config: ConfigReader) -> ModelSpec:
    """Mamba-2 or attention, then a shared MLP and, where the model has experts, routed ones beside it."""
    shape = Shape.read(config)
    listed = layer_kinds(config, shape.layers, [LINEAR] * shape.layers, LINEAR, FULL, *_ALIASES)
    kinds = [_ALIASES.get(kind, kind) for kind in listed]
    has_bias = config.boolean("attention_bias", False)
    rotary = config.string("position_embedding_type", "nope") == "rope"
    mamba = state_space_layer(
        "mamba", shape.hidden, state_space(config, shape.hidden), taps=config.integer("mamba_d_conv", 4),
        conv_bias=config.boolean("mamba_conv_bias", True), bias=config.boolean("mamba_proj_bias", False),
    )  # fmt: skip
    mixers = {
        LINEAR: mamba,
        FULL: attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, rotary=rotary),
    }
    shared = config.integer("shared_intermediate_size", 1024)
    mlp = [
        linear("shared_mlp.input_linear", shape.hidden, 2 * shared),
        activation("shared_mlp.activation", shared, shape.act, gated=True),
        linear("shared_mlp.output_linear", shared, shape.hidden),
    ]
    experts = config.integer("num_local_experts", 8, minimum=0)
    if experts:
        top_k = config.integer("num_experts_per_tok", 2)
        gate = "block_sparse_moe.router"
        mlp += routed_mlp(config, shape.hidden, shape.ffn, experts, top_k, gate=gate)

    def block(kind: str) -> Block:
        names = ("input_layernorm", "post_attention_layernorm")
        norms = rms_norm(names[0], shape.hidden), rms_norm(names[1], shape.hidden)
        adds = (
            residual("self_attn.residual", shape.hidden, scales=True),
            residual("mlp.residual", shape.hidden, scales=True),
        )
        order = (
            *names, "block_sparse_moe.router", "block_sparse_moe.experts",
            "shared_mlp.input_linear", "shared_mlp.output_linear", *_MAMBA2, *_ATTENTION,
        )  # fmt: skip
        built = attention_mlp_block("GraniteMoeHybridDecoderLayer", norms, mixers[kind], mlp, adds)
        return set_registration(built, *order)

    blocks = build_unique_blocks(kinds, block)
    return decoder(config, shape, blocks, max_positions=2048, scales_logits=True)


def bamba(config: ConfigReader) -> ModelSpec:
    """Mamba-2 in all layers but those of `attn_layer_indices`, with a gated MLP in each. Half of a head is
    rotated.
    """
    shape = Shape.read(config, kv_default=8)
    has_bias = config.boolean("attention_bias", False)
    attention = [
        replace_op_fields(module, rotary_width=partial_rotary(config, shape.head_dim))
        if module.role is Role.MIXER
        else module
        for module in attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias)
    ]
    listed = set(config.integers("attn_layer_indices"))
    kinds = [FULL if index in listed else LINEAR for index in range(shape.layers)]
    mixers = {LINEAR: _mamba2(config, shape), FULL: attention}
    mlp = gated_mlp(
        "feed_forward", shape.hidden, shape.ffn, shape.act, bias=config.boolean("mlp_bias", False)
    )
    order = (*_FEED_FORWARD, "input_layernorm", "pre_ff_layernorm", *_MAMBA2, *_ATTENTION)
    blocks = build_unique_blocks(
        kinds, lambda kind: _pre_ff_block("BambaDecoderLayer", shape, mixers[kind], mlp, order)
    )
    return _final_layernorm(config, shape, blocks)


def falcon_h1(config: ConfigReader) -> ModelSpec:
    """Mamba-2 and attention side by side in every layer."""
    shape = Shape.read(config, kv_default=8)
    has_bias = config.boolean("attention_bias", False)
    width = config.optional_integer("mamba_d_ssm") or 0
    if "mamba_d_ssm" not in config.values:
        width = 1024
    mamba = _mamba2(
        config, shape, width, has_norm=config.boolean("mamba_rms_norm", False),
        out_bias=config.boolean("projectors_bias", False),
    )  # fmt: skip
    attention = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias)
    attention[0] = linear(
        "self_attn.q_proj", shape.hidden, shape.heads * shape.head_dim, bias=has_bias, shares_input=True
    )
    branches = [*mamba, residual("mamba.add", shape.hidden, scales=True), *attention]
    mlp = gated_mlp(
        "feed_forward", shape.hidden, shape.ffn, shape.act, bias=config.boolean("mlp_bias", False)
    )
    order = (*_FEED_FORWARD, *_MAMBA2, *_ATTENTION, "input_layernorm", "pre_ff_layernorm")
    block = _pre_ff_block("FalconH1DecoderLayer", shape, branches, mlp, order)
    return _final_layernorm(config, shape, [block] * shape.layers)


def jamba(config: ConfigReader) -> ModelSpec:
    """Mamba in seven of eight layers, attention without positions in the eighth, and routed experts in every
    second.
    """
    config = config.add_defaults(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        vocab_size=65536,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=8)
    count = config.integer("num_experts", 16)
    period, offset = (
        config.integer(f"attn_layer_{key}", default, minimum=0)
        for key, default in (("period", 8), ("offset", 4))
    )
    expert_period, expert_offset = (
        config.integer(f"expert_layer_{key}", default, minimum=0)
        for key, default in (("period", 2), ("offset", 1))
    )
    sparse = routed_mlp(
        config, shape.hidden, shape.ffn, count, config.integer("num_experts_per_tok", 2),
        gate="feed_forward.router",
    )  # fmt: skip
    dense = gated_mlp("feed_forward", shape.hidden, shape.ffn, shape.act)
    mamba, attention = _mamba(config, shape), attention_modules(shape, rotary=False)
    kinds = [
        (index % period == offset, count > 1 and index % expert_period == expert_offset)
        for index in range(shape.layers)
    ]
    order = (
        *_ATTENTION, "mamba", *(
            f"mamba.{name}" for name in (
                "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj",
                "dt_layernorm", "b_layernorm", "c_layernorm",
            )
        ),
        "feed_forward.router", "feed_forward.experts", *_FEED_FORWARD, "input_layernorm", "pre_ff_layernorm",
    )  # fmt: skip

    def block(kind: tuple[bool, bool]) -> Block:
        has_attention, is_sparse = kind
        name = "JambaAttentionDecoderLayer" if has_attention else "JambaMambaDecoderLayer"
        mixer = attention if has_attention else mamba
        return _pre_ff_block(name, shape, mixer, sparse if is_sparse else dense, order)

    return _final_layernorm(config, shape, build_unique_blocks(kinds, block))


def _mamba(config: ConfigReader, shape: Shape) -> list[Module]:
    """Mamba with norms of time steps, B and C."""
    root, width = "mamba", config.integer("mamba_expand", 2) * shape.hidden
    state, rank = config.integer("mamba_d_state", 16), ceil(shape.hidden / 16)
    if config.values.get("mamba_dt_rank", "auto") != "auto":
        rank = config.integer("mamba_dt_rank")
    has_bias = config.boolean("mamba_proj_bias", False)
    states = (Parameter("A_log", (width, state)), Parameter("D", (width,)))
    return [
        linear(f"{root}.in_proj", shape.hidden, 2 * width, bias=has_bias),
        convolution(
            f"{root}.conv1d", width, config.integer("mamba_d_conv", 4),
            bias=config.boolean("mamba_conv_bias", True),
        ),
        linear(f"{root}.x_proj", width, rank + 2 * state),
        rms_norm(f"{root}.dt_layernorm", rank),
        rms_norm(f"{root}.b_layernorm", state),
        rms_norm(f"{root}.c_layernorm", state),
        linear(f"{root}.dt_proj", rank, width, bias=True),
        Module(root, SelectiveScan(width, state), states),
        linear(f"{root}.out_proj", width, shape.hidden, bias=has_bias),
    ]  # fmt: skip


def _mamba2(
    config: ConfigReader,
    shape: Shape,
    width: int = 0,
    *,
    has_norm: bool = True,
    out_bias: bool | None = None,
) -> list[Module]:
    work = state_space(config, shape.hidden, width)
    return state_space_layer(
        "mamba", shape.hidden, work, taps=config.integer("mamba_d_conv", 4),
        conv_bias=config.boolean("mamba_conv_bias", True), bias=config.boolean("mamba_proj_bias", False),
        has_norm=has_norm, out_bias=out_bias,
    )  # fmt: skip


def _pre_ff_block(
    kind: str, shape: Shape, mixer: Sequence[Module], mlp: Sequence[Module], order: Sequence[str]
) -> Block:
    norms = rms_norm("input_layernorm", shape.hidden), rms_norm("pre_ff_layernorm", shape.hidden)
    adds = residual("self_attn.residual", shape.hidden), residual("feed_forward.residual", shape.hidden)
    return set_registration(attention_mlp_block(kind, norms, mixer, mlp, adds), *order)


def _final_layernorm(config: ConfigReader, shape: Shape, blocks: Sequence[Block]) -> ModelSpec:
    return language_model(
        config,
        shape.hidden,
        [embedding("model.embed_tokens", shape.vocab, shape.hidden)],
        blocks,
        config.integer("max_position_embeddings", 262_144),
        root="model.layers",
        final=[rms_norm("model.final_layernorm", shape.hidden)],
    )
