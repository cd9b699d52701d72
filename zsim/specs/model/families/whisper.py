"""Whisper: an encoder of sounds, and a decoder that attends to the encoder's rows.

Names, shapes and defaults as in transformers 5.24 (`modeling_whisper.py`, `configuration_whisper.py`). The
encoder is a tower. Every sample has one sound of 30 seconds, as the encoder demands.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.audio_towers import whisper_encoder
from zsim.specs.model.families.bart import LAYER_DROPOUTS, build_block, refuse_dropouts
from zsim.specs.model.families.builders import embedding, language_model, layer_norm, residual
from zsim.specs.model.spec import ModelSpec

_ROOT = "model.decoder"
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", *LAYER_DROPOUTS)


def whisper(config: ConfigReader) -> ModelSpec:
    """A decoder with positions in a table, whose head is its embedding."""
    refuse_dropouts(config, _DROPOUTS)
    hidden, rows = config.integer("d_model", 384), config.integer("max_source_positions", 1500)
    config = config.override(d_model=hidden).add_defaults(vocab_size=51_865)
    positions = config.integer("max_target_positions", 448)
    first, later = (
        build_block(
            config, "WhisperDecoderLayer", "decoder", keeps_rows=keeps_rows, rows=rows, key_bias=False,
            sizes=(6, 1536),
        )
        for keeps_rows in (True, False)
    )  # fmt: skip
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
