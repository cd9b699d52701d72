"""Qwen 2, Qwen 3, Phi 3 and Gemma 2: variants of Llama's block.

Names, shapes and defaults as in transformers 5.23 (`modeling_qwen2.py`, `modeling_qwen3.py`,
`modeling_phi3.py`, `modeling_gemma2.py` and their `configuration_*.py`).
"""

from __future__ import annotations

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    decoder,
    gated_mlp,
    layer_windows,
    one_block_per_window,
    pre_norm_block,
)
from zsim.specs.model.families.parts import activation, attention, linear, register, residual, rms_norm
from zsim.specs.model.spec import Block, ModelSpec


def qwen2(config: ConfigReader) -> ModelSpec:
    """Biases on q, k and v, always; a window only with `use_sliding_window`, from `max_window_layers` on."""
    shape = Shape.read(config)

    def block(window: int | None) -> Block:
        core = attention_modules(shape, qkv_bias=True, window=window)
        return pre_norm_block("Qwen2DecoderLayer", shape, core)

    blocks = one_block_per_window(qwen_windows(config, shape.layers), block)
    return decoder(config, shape, blocks, max_positions=32768)


def qwen3(config: ConfigReader) -> ModelSpec:
    """Heads of 128 whatever the hidden size, RMSNorm on every query and key head."""
    shape = Shape.read(config, head_dim=128)
    has_bias = config.boolean("attention_bias", False)

    def block(window: int | None) -> Block:
        core = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, window=window)
        return pre_norm_block("Qwen3DecoderLayer", shape, core)

    blocks = one_block_per_window(qwen_windows(config, shape.layers), block)
    return decoder(config, shape, blocks, max_positions=32768)


def qwen_windows(config: ConfigReader, layers: int) -> list[int | None]:
    """The attention window of each layer, as Qwen's configuration chooses it."""
    if not config.boolean("use_sliding_window", False):
        return [None] * layers
    first = config.integer("max_window_layers", 28, minimum=0)
    window = config.integer("sliding_window", 4096)
    return layer_windows(config, layers, window, [index >= first for index in range(layers)])


def phi3(config: ConfigReader) -> ModelSpec:
    """One projection for q, k and v, one for gate and up; dropout before the adds."""
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
    mlp = [
        linear("mlp.gate_up_proj", shape.hidden, 2 * shape.ffn),
        activation("mlp.activation_fn", shape.ffn, shape.act, gated=True),
        linear("mlp.down_proj", shape.ffn, shape.hidden),
    ]
    block = pre_norm_block(
        "Phi3DecoderLayer",
        shape,
        core,
        mlp,
        dropout=config.fraction("resid_pdrop", 0.0),
        registration=("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", *REGISTRATION),
    )
    return decoder(config, shape, [block] * shape.layers, max_positions=4096)


def gemma2(config: ConfigReader) -> ModelSpec:
    """Heads of 256, a norm before and after attention and MLP, every other layer with a window, tied, logits
    capped."""
    act = config.string("hidden_activation", "gelu_pytorch_tanh")
    shape = Shape.read(config, kv_default=4, head_dim=256)
    has_bias = config.boolean("attention_bias", False)

    def block(window: int | None) -> Block:
        core = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, window=window)
        modules = (
            rms_norm("input_layernorm", shape.hidden, kind="gemma_rms"),
            *core,
            rms_norm("post_attention_layernorm", shape.hidden, kind="gemma_rms"),
            residual("self_attn.residual", shape.hidden),
            rms_norm("pre_feedforward_layernorm", shape.hidden, kind="gemma_rms"),
            *gated_mlp("mlp", shape.hidden, shape.ffn, act),
            rms_norm("post_feedforward_layernorm", shape.hidden, kind="gemma_rms"),
            residual("mlp.residual", shape.hidden),
        )
        return register(Block("Gemma2DecoderLayer", modules), *REGISTRATION)

    window = config.integer("sliding_window", 4096)
    every_other = [index % 2 == 0 for index in range(shape.layers)]
    windows = layer_windows(config, shape.layers, window, every_other)
    has_cap = config.values.get("final_logit_softcapping", 30.0) is not None
    return decoder(
        config,
        shape,
        one_block_per_window(windows, block),
        is_tied=True,
        max_positions=8192,
        softcaps_logits=has_cap,
        norm="gemma_rms",
    )
