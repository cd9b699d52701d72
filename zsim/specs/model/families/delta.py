"""Qwen3-Next, Qwen 3.5 and later, Lara Mini, Olmo Hybrid: layers of Gated DeltaNet among layers of attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_qwen3_next.py`, `modeling_qwen3_5.py`,
`modeling_qwen3_5_moe.py`, `modeling_lara_mini.py`, `modeling_olmo_hybrid.py` and their
`configuration_*.py`). Checkpoints of Qwen also have a module for multi-token prediction, which transformers
leaves out: a layer of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    attention_mlp_block,
    linear,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.latent import count_prediction_modules
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
    DeltaShape,
    delta_layer,
    gated_attention,
    layer_kinds,
    separate_delta_layer,
)
from zsim.specs.model.families.moe import EXPERTS_FIRST, GATE_FIRST, registration_order, routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module

_NORM = "gemma_rms"  # its weight is added to one, in fp32
_SLIDING = "sliding_attention"
_ATTENTION = tuple(name for name in REGISTRATION if name.startswith("self_attn."))
_SEPARATE = ("", "conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_FUSED = ("", "conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj")


def qwen3_next(config: ConfigReader) -> ModelSpec:
    """Three layers of Gated DeltaNet to one of gated attention, routed experts and a gated shared one."""
    config = config.add_defaults(head_dim=256, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16)
    shape = Shape.read(config.add_defaults(intermediate_size=5632), kv_default=2)
    sparse = _experts(config, shape, 512, 10)
    dense_layers, step = set(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", 1)
    is_sparse = [index not in dense_layers and not (index + 1) % step for index in range(shape.layers)]
    return _model(config, shape, "Qwen3NextDecoderLayer", sparse, is_sparse, GATE_FIRST, is_fused=True)


def qwen3_5(config: ConfigReader) -> ModelSpec:
    """The dense text models of Qwen 3.5, 3.6 and 3.8."""
    config = config.add_defaults(head_dim=256)
    shape = Shape.read(config, kv_default=4)
    none = [False] * shape.layers
    return _model(config, shape, "Qwen3_5DecoderLayer", [], none, (), is_fused=False)


def qwen3_5_moe(config: ConfigReader) -> ModelSpec:
    """The text models of Qwen 3.5 and 3.6 with routed experts in every layer."""
    config = config.add_defaults(head_dim=256)
    width = config.integer("moe_intermediate_size", 512)
    shape = Shape.read(config.add_defaults(intermediate_size=width), kv_default=2)
    sparse = _experts(config, shape, 256, 8)
    return _model(
        config, shape, "Qwen3_5MoeDecoderLayer", sparse, [True] * shape.layers, GATE_FIRST, is_fused=False
    )


def lara_mini(config: ConfigReader) -> ModelSpec:
    """Layers of Gated DeltaNet, of attention in a window, and of attention to all tokens without positions.
    All have routed experts and a shared one.
    """
    config = config.add_defaults(
        head_dim=128, hidden_size=1024, num_hidden_layers=34, num_attention_heads=16, linear_num_key_heads=8,
        linear_num_value_heads=16, tie_word_embeddings=True, max_position_embeddings=131_072,
        intermediate_size=512,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=4)
    has_bias, window = config.boolean("attention_bias", False), config.integer("sliding_window", 512)
    attention = {
        kind: attention_modules(
            shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="each head",
            window=window if kind == _SLIDING else None, rotary=kind == _SLIDING,
        )
        for kind in (_SLIDING, FULL)
    }  # fmt: skip
    pattern = (LINEAR, _SLIDING, LINEAR, FULL, _SLIDING)
    return _model(
        config, shape, "LaraMiniDecoderLayer", _experts(config, shape, 128, 4, is_gated=False),
        [True] * shape.layers, EXPERTS_FIRST, is_fused=False, attention=attention, norm="rms",
        default=[pattern[index % 5] for index in range(shape.layers)],
    )  # fmt: skip


def _experts(
    config: ConfigReader, shape: Shape, experts: int, top_k: int, *, is_gated: bool = True
) -> list[Module]:
    """Routed experts behind a router in the activations' type, and a gated shared one, or not `is_gated` a
    router in fp32 and a shared one without a gate.
    """
    width, shared = (
        config.integer(key, 512) for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    experts, top_k = config.integer("num_experts", experts), config.integer("num_experts_per_tok", top_k)
    normalizes = config.boolean("norm_topk_prob", True)
    choice = Router(0, 0, 0, normalizes=normalizes, in_fp32=not is_gated)
    gate = [linear("mlp.shared_expert_gate", shape.hidden, 1, shares_input=True)] if is_gated else []
    return [
        *gated_mlp("mlp.shared_expert", shape.hidden, shared, shape.act),
        *routed_mlp(config, shape.hidden, width, experts, top_k, choice),
        *gate,
    ]


def _model(
    config: ConfigReader,
    shape: Shape,
    kind: str,
    sparse: Sequence[Module],
    is_sparse: Sequence[bool],
    order: Sequence[str],
    *,
    is_fused: bool,
    attention: Mapping[str, Sequence[Module]] | None = None,
    norm: str = _NORM,
    default: list[str] | None = None,
) -> ModelSpec:
    """The model with `sparse` MLPs where `is_sparse`, and dense ones elsewhere.

    `attention` is that of each kind of layer, by default Qwen's gated one. `default` has the layers' kinds.
    """
    if attention is None or default is None:
        interval = config.integer("full_attention_interval", 4)
        default = [LINEAR if (index + 1) % interval else FULL for index in range(shape.layers)]
        rotary = partial_rotary(config, shape.head_dim, 0.25)
        has_bias = config.boolean("attention_bias", False)
        attention = {FULL: gated_attention(shape, bias=has_bias, norm=norm, rotary_width=rotary)}
    kinds = layer_kinds(config, shape.layers, default, LINEAR, *attention)
    mixers = {
        **attention, LINEAR: delta_layer(shape.hidden, DeltaShape.read(config), is_fused=is_fused)
    }  # fmt: skip
    names = _FUSED if is_fused else _SEPARATE
    mixer_order = tuple(f"linear_attn.{name}".rstrip(".") for name in names)
    registration = registration_order(order or (), (*mixer_order, *_ATTENTION))

    def block(layer: tuple[str, bool]) -> Block:
        mlp = sparse if layer[1] else gated_mlp("mlp", shape.hidden, shape.ffn, shape.act)
        norms = (
            rms_norm("input_layernorm", shape.hidden, kind=norm),
            rms_norm("post_attention_layernorm", shape.hidden, kind=norm),
        )
        adds = residual("self_attn.residual", shape.hidden), residual("mlp.residual", shape.hidden)
        return set_registration(attention_mlp_block(kind, norms, mixers[layer[0]], mlp, adds), *registration)

    blocks = build_unique_blocks(list(zip(kinds, is_sparse, strict=True)), block)
    model = decoder(config, shape, blocks, max_positions=32768, norm=norm)
    return count_prediction_modules(config, model, block((FULL, any(is_sparse))), "mtp_num_hidden_layers")


def olmo_hybrid(config: ConfigReader) -> ModelSpec:
    """Gated DeltaNet in a block with norms before, attention in one with norms after attention and MLP."""
    config = config.add_defaults(
        hidden_size=3840, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=30,
        vocab_size=100_352,
    )  # fmt: skip
    shape = Shape.read(config)
    key_dim = config.integer(
        "linear_key_head_dim", int(0.75 * shape.hidden / config.integer("linear_num_key_heads", shape.heads))
    )
    delta_shape = DeltaShape.read(config, shape.heads, shape.heads, (key_dim, 2 * key_dim))
    default = [FULL if index % 4 == 3 else LINEAR for index in range(shape.layers)]
    if FULL not in default:
        default[-1] = FULL
    kinds = layer_kinds(config, shape.layers, default, LINEAR, FULL)
    build: dict[str, Callable[[], Block]] = {
        LINEAR: lambda: _olmo_delta_block(shape, delta_shape),
        FULL: lambda: _olmo_attention_block(config, shape),
    }
    blocks = build_unique_blocks(kinds, lambda kind: build[kind]())
    return decoder(config, shape, blocks, max_positions=65536, norm=_NORM)


def _olmo_delta_block(shape: Shape, delta: DeltaShape) -> Block:
    norms = (
        rms_norm("input_layernorm", shape.hidden, kind=_NORM),
        rms_norm("post_attention_layernorm", shape.hidden, kind=_NORM),
    )
    adds = residual("linear_attn.residual", shape.hidden), residual("mlp.residual", shape.hidden)
    mlp = gated_mlp("mlp", shape.hidden, shape.ffn, shape.act)
    block = attention_mlp_block(
        "OlmoHybridLinearAttentionDecoderLayer", norms, separate_delta_layer(shape.hidden, delta), mlp, adds
    )
    mixer = ("", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj", "conv1d", "o_norm")
    return set_registration(
        block,
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(norm.name for norm in norms),
        *(f"linear_attn.{name}".rstrip(".") for name in mixer),
    )


def _olmo_attention_block(config: ConfigReader, shape: Shape) -> Block:
    has_bias = config.boolean("attention_bias", False)
    modules = (
        *attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="all heads", norm=_NORM),
        rms_norm("post_attention_layernorm", shape.hidden, kind=_NORM),
        residual("self_attn.residual", shape.hidden),
        *gated_mlp("mlp", shape.hidden, shape.ffn, shape.act),
        rms_norm("post_feedforward_layernorm", shape.hidden, kind=_NORM),
        residual("mlp.residual", shape.hidden),
    )
    return set_registration(Block("OlmoHybridAttentionDecoderLayer", modules), *REGISTRATION)
