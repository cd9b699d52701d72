"""Whisper: an encoder of sounds, and a decoder that attends to the encoder's rows.

Names, shapes and defaults as in transformers 5.24 (`modeling_whisper.py`, `configuration_whisper.py`). The
encoder is a tower. Every sample has one sound of 30 seconds, as the encoder demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.audio_towers import whisper_encoder
from zsim.specs.model.families.builders import (
    attention,
    embedding,
    language_model,
    layer_norm,
    linear,
    plain_mlp,
    replace_op_fields,
    residual,
    set_registration,
)
from zsim.specs.model.spec import Block, ModelSpec, Module

_ROOT = "model.decoder"
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")


def whisper(config: ConfigReader) -> ModelSpec:
    """A decoder with positions in a table, whose head is its embedding."""
    for key in _DROPOUTS:
        if config.fraction(key, 0.0):
            raise config.error(f"'{key}' is {config.values[key]}, which zsim does not simulate; expected 0")
    config = config.add_defaults(vocab_size=51_865)
    hidden, rows = config.integer("d_model", 384), config.integer("max_source_positions", 1500)
    positions = config.integer("max_target_positions", 448)
    first, later = (_block(config, hidden, rows, keeps_rows=is_first) for is_first in (True, False))
    model = language_model(
        config,
        hidden,
        [
            embedding(f"{_ROOT}.embed_tokens", config.integer("vocab_size"), hidden),
            embedding(f"{_ROOT}.embed_positions", positions, hidden),
            residual(f"{_ROOT}.add_positions", hidden),
        ],
        [first, *[later] * (config.num_blocks("decoder_layers", 4) - 1)],
        positions,
        root=f"{_ROOT}.layers",
        final=[layer_norm(f"{_ROOT}.layer_norm", hidden)],
        is_tied=True,
    )
    head = next(module for module in model.after if module.name == "lm_head")
    after = tuple(replace(module, name="proj_out") if module is head else module for module in model.after)
    return replace(model, after=after, has_encoder=True, towers=(whisper_encoder(config, rows),))


def _block(config: ConfigReader, hidden: int, rows: int, *, keeps_rows: bool) -> Block:
    """Self-attention, attention to the encoder's rows, and a plain MLP, each after a norm. The first block
    keeps the encoder's output for all.
    """
    inner, act = config.integer("decoder_ffn_dim", 1536), config.activation("activation_function", "gelu")
    modules = [
        layer_norm("self_attn_layer_norm", hidden),
        *_attention(config, "self_attn", hidden),
        residual("self_attn.residual", hidden),
        layer_norm("encoder_attn_layer_norm", hidden),
        *_attention(config, "encoder_attn", hidden, rows),
        residual("encoder_attn.residual", hidden),
        layer_norm("final_layer_norm", hidden),
        *plain_mlp(("fc1", "activation_fn", "fc2"), hidden, inner, act),
        residual("mlp.residual", hidden),
    ]
    if keeps_rows:
        modules = [
            replace(m, shares_input=m.shares_input and "encoder_attn.k" not in m.name) for m in modules
        ]
    products = ("k_proj", "v_proj", "q_proj", "out_proj")
    order = [
        name
        for part in ("self_attn", "encoder_attn")
        for name in (*(f"{part}.{product}" for product in products), f"{part}_layer_norm")
    ]
    block = Block("WhisperDecoderLayer", tuple(modules))
    return set_registration(block, *order, "fc1", "fc2", "final_layer_norm")


def _attention(config: ConfigReader, root: str, hidden: int, rows: int = 0) -> Sequence[Module]:
    """Attention without positions, to so many `rows` of a sound or to earlier tokens. Keys have no bias."""
    heads = config.integer("decoder_attention_heads", 6)
    if hidden % heads:
        raise config.error(f"'decoder_attention_heads' is {heads}; expected a divisor of {hidden}")
    core = attention(f"{root}.core", heads, heads, hidden // heads, rotary=False, upcasts_softmax=False)
    keys = [
        linear(f"{root}.k_proj", hidden, hidden, shares_input=True),
        linear(f"{root}.v_proj", hidden, hidden, bias=True, shares_input=True),
    ]
    if rows:
        core = replace_op_fields(core, is_causal=False, sample_keys=rows)
        keys = [replace(module, sample_rows="frames") for module in keys]
    return [
        linear(f"{root}.q_proj", hidden, hidden, bias=True),
        *keys,
        core,
        linear(f"{root}.out_proj", hidden, hidden, bias=True),
    ]
