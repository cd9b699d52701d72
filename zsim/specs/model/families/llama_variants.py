"""Qwen of 2023 and SmolLM 3: variants of Llama's block.

Names, shapes and defaults are as in transformers 5.23 (`modeling_smollm3.py`,
`configuration_smollm3.py`). Qwen is as in the `modeling_qwen.py` that is published with its weights.
"""

from __future__ import annotations

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
from zsim.specs.model.families.llama import (
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


def smollm3(config: ConfigReader) -> ModelSpec:
    """SmolLM 3 has no positions in every fourth layer. It has a window there with `use_sliding_window`."""
    shape = Shape.read(config, kv_default=4)
    has_bias = config.boolean("attention_bias", False)
    rotary = rotary_layers(config, shape.layers)
    window = config.optional_integer("sliding_window")
    slides = config.boolean("use_sliding_window", False)
    local = [slides and window is not None and not has_rotary for has_rotary in rotary]
    windows = layer_windows(config, shape.layers, window, local)
    mlp = gated_mlp("mlp", shape.hidden, shape.ffn, shape.act, bias=config.boolean("mlp_bias", False))

    def block(kind: tuple[int | None, bool]) -> Block:
        core = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, window=kind[0], rotary=kind[1])
        return pre_norm_block("SmolLM3DecoderLayer", shape, core, mlp)

    blocks = build_unique_blocks(list(zip(windows, rotary, strict=True)), block)
    return decoder(config, shape, blocks, max_positions=32768, is_tied=True)
