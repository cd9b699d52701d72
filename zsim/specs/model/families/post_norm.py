"""OLMo 2 and 3, EXAONE 4 and GLM 4: norms after attention and MLP.

Names, shapes and defaults are as in transformers 5.23 (`modeling_olmo2.py`, `modeling_olmo3.py`,
`modeling_exaone4.py`, `modeling_glm4.py` and their `configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.operations.operation import Role
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
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
    layer_windows,
)
from zsim.specs.model.spec import Block, ModelSpec, Module

_OLMO_NORM = "gemma_rms"  # Olmo2RMSNorm multiplies by its weight in fp32


def olmo2(config: ConfigReader) -> ModelSpec:
    """OLMo 2 has no norm before attention and MLP. It has norms over all heads of queries and of keys."""
    shape = Shape.read(config)
    return _olmo(config, shape, "Olmo2DecoderLayer", [None] * shape.layers)


def olmo3(config: ConfigReader) -> ModelSpec:
    """OLMo 2 with a window in three layers of four."""
    shape = Shape.read(config)
    window = config.integer("sliding_window", 4096)
    local = [(index + 1) % 4 != 0 for index in range(shape.layers)]
    return _olmo(config, shape, "Olmo3DecoderLayer", layer_windows(config, shape.layers, window, local))


def _olmo(config: ConfigReader, shape: Shape, kind: str, windows: Sequence[int | None]) -> ModelSpec:
    has_bias = config.boolean("attention_bias", False)

    def block(window: int | None) -> Block:
        core = attention_modules(
            shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="all heads", norm=_OLMO_NORM, window=window
        )
        return _post_norm_block(kind, shape, core, _OLMO_NORM)

    blocks = build_unique_blocks(windows, block)
    return decoder(config, shape, blocks, max_positions=2048, norm=_OLMO_NORM)


def exaone4(config: ConfigReader) -> ModelSpec:
    """EXAONE 4 has norms on query and key heads. With a window, layers without one have no positions.

    `sliding_window_pattern` is a number, or letters as in "LLLG" (the last of so many layers is global).
    """
    shape = Shape.read(config)
    layers = shape.layers
    has_window = "sliding_window" not in config.values or config.values["sliding_window"] is not None
    window = config.integer("sliding_window", 4096) if has_window else None
    pattern = config.values.get("sliding_window_pattern", 4)
    global_interval = (
        len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", 4)
    )
    local = [window is not None and (index + 1) % global_interval != 0 for index in range(layers)]
    windows = layer_windows(config, layers, window, local)

    def block(layer_window: int | None) -> Block:
        rotary = window is None or layer_window is not None
        core = attention_modules(shape, qk_norm="each head", window=layer_window, rotary=rotary)
        return _post_norm_block("Exaone4DecoderLayer", shape, core, "rms")

    return decoder(config, shape, build_unique_blocks(windows, block), max_positions=2048)


def _post_norm_block(kind: str, shape: Shape, core: Sequence[Module], norm: str) -> Block:
    """Attention, norm, add, then MLP, norm, add."""
    modules = (
        *core,
        rms_norm("post_attention_layernorm", shape.hidden, kind=norm),
        residual("self_attn.residual", shape.hidden),
        *gated_mlp("mlp", shape.hidden, shape.ffn, shape.act),
        rms_norm("post_feedforward_layernorm", shape.hidden, kind=norm),
        residual("mlp.residual", shape.hidden),
    )
    return set_registration(Block(kind, modules), *REGISTRATION)


def glm4(config: ConfigReader) -> ModelSpec:
    """GLM 4 has norms before and after attention and MLP. Half of a head is rotated, and one projection makes
    gate and up.
    """
    return _glm4(config, Shape.read(config, kv_default=2, head_dim=128), "Glm4DecoderLayer", 131_072)


def glm4v(config: ConfigReader) -> ModelSpec:
    """The text models of GLM-4.1V and GLM-4.6V Flash: GLM 4 with biases (`modeling_glm4v.py`, 5.24)."""
    config = config.add_defaults(
        vocab_size=151_552, hidden_size=4096, intermediate_size=13_696, num_hidden_layers=40,
        num_attention_heads=32, attention_bias=True,
    )  # fmt: skip
    return _glm4(config, Shape.read(config, kv_default=2), "Glm4vTextDecoderLayer", 32_768)


def _glm4(config: ConfigReader, shape: Shape, kind: str, max_positions: int) -> ModelSpec:
    has_bias = config.boolean("attention_bias", False)
    core = [
        replace_op_fields(module, rotary_width=partial_rotary(config, shape.head_dim))
        if module.role is Role.MIXER
        else module
        for module in attention_modules(shape, qkv_bias=has_bias)
    ]
    modules = (
        rms_norm("input_layernorm", shape.hidden),
        *core,
        rms_norm("post_self_attn_layernorm", shape.hidden),
        residual("self_attn.residual", shape.hidden),
        rms_norm("post_attention_layernorm", shape.hidden),
        linear("mlp.gate_up_proj", shape.hidden, 2 * shape.ffn),
        activation("mlp.activation_fn", shape.ffn, shape.act, gated=True),
        linear("mlp.down_proj", shape.ffn, shape.hidden),
        rms_norm("post_mlp_layernorm", shape.hidden),
        residual("mlp.residual", shape.hidden),
    )
    order = (
        *REGISTRATION[:4], "mlp.gate_up_proj", "mlp.down_proj", "input_layernorm",
        "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm",
    )  # fmt: skip
    block = set_registration(Block(kind, modules), *order)
    return decoder(config, shape, [block] * shape.layers, max_positions=max_positions)


def partial_rotary(config: ConfigReader, head_dim: int, default: float = 0.5) -> int | None:
    """Features of a head that are rotated. None for all."""
    rope = config.values.get("rope_parameters")
    if isinstance(rope, dict):
        default = rope.get("partial_rotary_factor", default)
    factor = config.values.get("partial_rotary_factor", default)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise config.error(f"'partial_rotary_factor' is {factor!r}; expected a number above 0 up to 1")
    return None if factor == 1 else int(head_dim * factor)
