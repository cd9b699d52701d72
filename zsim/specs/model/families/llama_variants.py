"""Qwen, Qwen 2, Qwen 3, Phi 3 and InternLM 3: variants of Llama's block.

Names, shapes and defaults are as in transformers 5.23 (`modeling_qwen2.py`, `modeling_qwen3.py`,
`modeling_phi3.py`, `modular_internlm3.py` and their `configuration_*.py`). Qwen, which
is older, is as in the `modeling_qwen.py` that is published with its weights.
"""

from __future__ import annotations

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    embedding,
    fused_mlp,
    language_model,
    linear,
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
    pre_norm_block,
)
from zsim.specs.model.spec import Block, ModelSpec


def qwen(config: ConfigReader) -> ModelSpec:
    """Qwen of 2023 has one projection for q, k and v, with a bias.

    `intermediate_size` counts both halves of the gated MLP. It has plain RMSNorm and rotary positions. The
    fused ones of flash-attn's extras, which its code takes where they are installed, are not taken.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    width = config.integer("kv_channels", hidden // heads)
    ffn, has_bias = config.integer("intermediate_size") // 2, not config.boolean("no_bias", True)
    core = [
        linear("attn.c_attn", hidden, 3 * heads * width, bias=True),
        attention(
            "attn.core",
            heads,
            heads,
            width,
            dropout=config.fraction("attn_dropout_prob", 0.0),
            splits_fused_qkv=True,
        ),
        linear("attn.c_proj", heads * width, hidden, bias=has_bias),
    ]
    mlp = [
        linear("mlp.w1", hidden, ffn, bias=has_bias),
        linear("mlp.w2", hidden, ffn, bias=has_bias, shares_input=True),
        activation("mlp.act", ffn, "silu", gated=True),
        linear("mlp.c_proj", ffn, hidden, bias=has_bias),
    ]
    block = attention_mlp_block(
        "QWenBlock",
        (rms_norm("ln_1", hidden), rms_norm("ln_2", hidden)),
        core,
        mlp,
        (residual("attn.residual", hidden), residual("mlp.residual", hidden)),
    )
    order = "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.w1", "mlp.w2", "mlp.c_proj"
    return language_model(
        config,
        hidden,
        [embedding("transformer.wte", config.integer("vocab_size"), hidden)],
        [set_registration(block, *order)] * config.num_blocks("num_hidden_layers"),
        config.integer("max_position_embeddings", 8192),
        final=[rms_norm("transformer.ln_f", hidden)],
    )


def qwen2(config: ConfigReader) -> ModelSpec:
    """Qwen 2 has biases on q, k and v, always. It has a window only with `use_sliding_window`, from
    `max_window_layers` on.
    """
    shape = Shape.read(config)

    def block(window: int | None) -> Block:
        core = attention_modules(shape, qkv_bias=True, window=window)
        return pre_norm_block("Qwen2DecoderLayer", shape, core)

    blocks = build_unique_blocks(qwen_windows(config, shape.layers), block)
    return decoder(config, shape, blocks, max_positions=32768)


def qwen3(config: ConfigReader) -> ModelSpec:
    """Heads of 128 whatever the hidden size, RMSNorm on every query and key head."""
    shape = Shape.read(config, head_dim=128)
    has_bias = config.boolean("attention_bias", False)

    def block(window: int | None) -> Block:
        core = attention_modules(
            shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="each head", window=window
        )
        return pre_norm_block("Qwen3DecoderLayer", shape, core)

    blocks = build_unique_blocks(qwen_windows(config, shape.layers), block)
    return decoder(config, shape, blocks, max_positions=32768)


def qwen_windows(config: ConfigReader, layers: int) -> list[int | None]:
    """The attention window of each layer, as Qwen's configuration chooses it."""
    if not config.boolean("use_sliding_window", False):
        return [None] * layers
    first = config.integer("max_window_layers", 28, minimum=0)
    window = config.integer("sliding_window", 4096)
    return layer_windows(config, layers, window, [index >= first for index in range(layers)])


def phi3(config: ConfigReader) -> ModelSpec:
    """Phi 3 has one projection for q, k and v, and one for gate and up. Dropout is before the adds."""
    shape = Shape.read(config)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    window = config.optional_integer("sliding_window")
    core = [
        linear("self_attn.qkv_proj", shape.hidden, queries + 2 * keys),
        attention(
            "self_attn.core",
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            dropout=shape.dropout,
            window=window,
            splits_fused_qkv=True,
        ),
        linear("self_attn.o_proj", queries, shape.hidden),
    ]
    names = "mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj"
    mlp = fused_mlp(names, shape.hidden, shape.ffn, shape.act)
    block = pre_norm_block(
        "Phi3DecoderLayer",
        shape,
        core,
        mlp,
        dropout=config.fraction("resid_pdrop", 0.0),
        registration=("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", *REGISTRATION),
    )
    return decoder(config, shape, [block] * shape.layers, max_positions=4096)


def internlm3(config: ConfigReader) -> ModelSpec:
    """InternLM 3 has Llama's block with 2 key/value heads of 128.

    transformers 5.23 runs Llama's own code, which takes one setting for the biases of all four projections.
    """
    shape = Shape.read(config, kv_default=2, head_dim=128)
    bias, mlp_bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    if bias != mlp_bias:
        raise config.error(
            f"'qkv_bias' is {bias} and 'bias' is {mlp_bias}; expected the same value, as transformers has it"
        )
    core = attention_modules(shape, qkv_bias=bias, o_bias=bias)
    mlp = gated_mlp("mlp", shape.hidden, shape.ffn, shape.act, bias=mlp_bias)
    block = pre_norm_block("LlamaDecoderLayer", shape, core, mlp)
    return decoder(config, shape, [block] * shape.layers, max_positions=32768)
