"""Granite 4, Bamba, Jamba, Falcon-H1 and Zamba2: state spaces among, or beside, layers of attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_granitemoehybrid.py`, `modeling_bamba.py`,
`modeling_jamba.py`, `modeling_falcon_h1.py`, `modeling_zamba2.py` and their `configuration_*.py`).
Falcon-H1's branches read one norm's output and are added up. Its products with fixed numbers, and those of
Granite's embedding, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from zsim.operations.mixers.mamba1 import SelectiveScan
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.operation import Operation, Role
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    embedding,
    fused_mlp,
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
_LAYERS = "model.layers"
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
    names = "shared_mlp.input_linear", "shared_mlp.activation", "shared_mlp.output_linear"
    mlp = fused_mlp(names, shape.hidden, shared, shape.act)
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
    config: ConfigReader, shape: Shape, width: int = 0, *, has_norm: bool = True, out_bias: bool | None = None
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


def _final_layernorm(
    config: ConfigReader, shape: Shape, blocks: Sequence[Block], max_positions: int = 262_144
) -> ModelSpec:
    return language_model(
        config,
        shape.hidden,
        [embedding("model.embed_tokens", shape.vocab, shape.hidden)],
        blocks,
        config.integer("max_position_embeddings", max_positions),
        root=_LAYERS,
        final=[rms_norm("model.final_layernorm", shape.hidden)],
    )


def zamba2(config: ConfigReader) -> ModelSpec:
    """Mamba-2 in every layer. Before that of a "hybrid" layer is a block of attention and MLP that several of
    them share, which reads the stream beside the tokens' embeddings, with adapters of each use's own.

    The first use of a shared block owns its parameters, and the adapters of all its uses.
    """
    config = config.add_defaults(
        vocab_size=32_000, hidden_size=2560, num_hidden_layers=54, num_attention_heads=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    if config.optional_integer("intermediate_size") is None:
        config = config.add_defaults(intermediate_size=4 * config.integer("hidden_size"))
    shape = Shape.read(
        config,
        act="gelu",
        head_dim=2 * config.integer("hidden_size") // config.integer("num_attention_heads"),
    )
    hybrid = {6, 12, 18, 24, 30, 36, 42, 47, 51}
    default = [_HYBRID if index in hybrid else LINEAR for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, LINEAR, _HYBRID, "mamba")
    uses = [index for index, kind in enumerate(kinds) if kind == _HYBRID]
    if len(uses) > 1 and not config.boolean("tie_word_embeddings", True):
        raise config.error("'tie_word_embeddings' is false; expected true, without which no block is shared")
    width, heads = config.integer("mamba_expand", 2) * shape.hidden, config.integer("n_mamba_heads", 8)
    work = StateSpace(
        heads, width // heads, config.integer("mamba_d_state", 64), config.integer("mamba_ngroups", 1),
        config.integer("chunk_size", 256),
    )  # fmt: skip
    bias = config.boolean("add_bias_linear", False)
    mixer = state_space_layer(
        "mamba", shape.hidden, work, taps=config.integer("mamba_d_conv", 4), bias=bias,
    )  # fmt: skip
    layer = [rms_norm("input_layernorm", shape.hidden), *mixer, residual("mamba.residual", shape.hidden)]
    order = (*_MAMBA2, "input_layernorm")
    mamba = set_registration(Block("Zamba2MambaDecoderLayer", tuple(layer)), *order)
    shared = _SharedBlock(config, shape, uses, config.integer("num_mem_blocks", 1))
    within = [replace(module, name=f"mamba_decoder.{module.name}") for module in layer]
    blocks = [
        shared.block(uses.index(index), within, order) if kind == _HYBRID else mamba
        for index, kind in enumerate(kinds)
    ]
    return _final_layernorm(config, shape, blocks, 4096)


def _borrow(module: Module, first: str) -> Module:
    """The module with the parameters of block `first`."""
    return replace(module, parameters=(), lender=f"{first}.{module.name}") if module.parameters else module


_HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class _SharedBlock:
    """Builds the hybrid layers of Zamba2."""

    config: ConfigReader
    shape: Shape
    layers: Sequence[int]
    """Numbers of the hybrid layers."""
    blocks: int
    """Blocks that they share in turn."""

    def block(self, use: int, mamba: Sequence[Module], order: Sequence[str]) -> Block:
        """The layer of a use, in which the modules of the shared block are named as in the first."""
        config, shape, root, hidden = self.config, self.shape, "shared_transformer", self.shape.hidden
        bias, wide = config.boolean("add_bias_linear", False), 2 * hidden
        has_adapters = config.boolean("use_shared_attention_adapter", False)
        inner, features = shape.ffn, {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        attend, feed_forward = f"{root}.self_attn", f"{root}.feed_forward"
        modules = [
            activation(f"{root}.concatenation", wide, "scale"),
            rms_norm(f"{root}.input_layernorm", wide),
        ]
        for name, heads in features.items():
            modules.append(
                linear(f"{attend}.{name}_proj", wide, heads * shape.head_dim, shares_input=name != "q")
            )
            if has_adapters:
                modules += self._adapters(f"{attend}.linear_{name}_adapter_list", use, wide, wide)
        modules += [
            attention(
                f"{attend}.core", shape.heads, shape.kv_heads, shape.head_dim, dropout=shape.dropout,
                rotary=config.boolean("use_mem_rope", False),
            ),
            linear(f"{attend}.o_proj", shape.heads * shape.head_dim, hidden),
            rms_norm(f"{root}.pre_ff_layernorm", hidden),
            linear(f"{feed_forward}.gate_up_proj", hidden, 2 * inner, bias=bias),
            *self._adapters(f"{feed_forward}.gate_up_proj_adapter_list", use, hidden, 2 * inner),
            activation(f"{feed_forward}.act_fn", inner, shape.act, gated=True),
            linear(f"{feed_forward}.down_proj", inner, hidden, bias=bias),
        ]  # fmt: skip
        registered = [f"{attend}.{name}_proj" for name in "qkvo"]
        registered += [f"{attend}.linear_{name}_adapter_list" for name in "qkv"]
        registered += [
            f"{feed_forward}.{name}" for name in ("gate_up_proj", "down_proj", "gate_up_proj_adapter_list")
        ]
        registered += [f"{root}.input_layernorm", f"{root}.pre_ff_layernorm"]
        owned = [module.name for module in modules if module.parameters]
        names = [name for prefix in registered for name in owned if f"{name}.".startswith(f"{prefix}.")]
        if use >= self.blocks:  # the first uses own them
            first = f"{_LAYERS}.{self.layers[use % self.blocks]}"
            modules, names = [_borrow(module, first) for module in modules], []
        modules += [linear("linear", hidden, hidden), residual("linear.residual", hidden), *mamba]
        order = ("linear", *(f"mamba_decoder.{name}" for name in order), *names)
        return set_registration(Block("Zamba2HybridLayer", tuple(modules)), *order)

    def _adapters(self, name: str, use: int, inputs: int, outputs: int) -> list[Module]:
        """A product to a few features and one back, for this use. The first use owns those of later ones."""
        rank = self.config.integer("adapter_rank", 128)
        modules: list[Module] = []
        for number in range(use % self.blocks, len(self.layers), self.blocks):
            pair = [
                linear(f"{name}.{number}.0", inputs, rank, shares_input=True),
                linear(f"{name}.{number}.1", rank, outputs),
            ]
            if number == use:
                modules += [*pair, residual(f"{name}.{number}.sum", outputs)]
            elif use < self.blocks:
                modules += [replace(module, op_spec=Operation()) for module in pair]
        return modules
