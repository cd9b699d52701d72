"""BART and what is built like it: mBART, M2M-100 and NLLB, Marian, Pegasus, Whisper.

Names, shapes and defaults as in transformers 5.24 (`modeling_bart.py`, `configuration_bart.py`, and those of
the others). The decoder has as many tokens as the encoder: `sequence_length` of each. The encoder's last norm
is counted with the modules after the blocks. Whisper's encoder is a tower. Every sample has one sound of 30
seconds, as it demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.audio_towers import whisper_encoder
from zsim.specs.model.families.builders import (
    activation,
    attention,
    check_translator,
    embedding,
    language_model,
    layer_norm,
    linear,
    plain_mlp,
    replace_op_fields,
    residual,
    set_registration,
    translator,
)
from zsim.specs.model.spec import Block, Embedding, Linear, ModelSpec, Module, Parameter

_LAYER_DROPOUTS = ("encoder_layerdrop", "decoder_layerdrop")


class _Variant(NamedTuple):
    name: str
    """What the names of its classes begin with."""
    norms_first: bool
    """Blocks have their norms before attention and the MLP, not behind the sums."""
    positions: Literal["learned", "fixed", "computed"]
    norms: Sequence[str] = ()
    """Norms of either half: of its embeddings, and of its last block's output."""
    has_logit_bias: bool = True
    defaults: tuple[str, float, float] = ("gelu", 0.0, 0.0)
    """Activation, dropout of attention, and layers dropped."""
    head: str = "ForConditionalGeneration"
    """What the name of its class ends with."""


_VARIANTS = {
    "bart": _Variant("Bart", False, "learned", ("layernorm_embedding",)),
    "mbart": _Variant("MBart", True, "learned", ("layernorm_embedding", "layer_norm")),
    "m2m_100": _Variant("M2M100", True, "computed", ("layer_norm",), False, ("relu", 0.1, 0.05)),
    "marian": _Variant("Marian", False, "fixed", head="MTModel"),
    "pegasus": _Variant("Pegasus", True, "fixed", ("layer_norm",)),
}
_SPARE_ROWS = 2  # of learned positions
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def bart(config: ConfigReader) -> ModelSpec:
    """An encoder and a decoder that share their embedding with the head."""
    variant = _VARIANTS[config.family]
    check_translator(config, variant.name, variant.head)
    act, attention_dropout, layer_dropout = variant.defaults
    config = config.override(d_model=config.integer("d_model", 1024)).add_defaults(
        activation_function=act, attention_dropout=attention_dropout, dropout=0.1,
        **dict.fromkeys(_LAYER_DROPOUTS, layer_dropout),
    )  # fmt: skip
    _refuse_dropouts(config, *_LAYER_DROPOUTS)
    for key in ("tie_word_embeddings", "share_encoder_decoder_embeddings"):
        if not config.boolean(key, True):
            raise config.error(f"'{key}' is false; expected true: zsim has {variant.name} with one embedding")
    hidden, vocab = config.integer("d_model"), config.integer("vocab_size")
    positions = config.integer("max_position_embeddings", 1024)
    blocks = {}
    for half in ("encoder", "decoder"):
        first, later = (
            _build_block(
                config, f"{variant.name}{half.title()}Layer", half, keeps_rows=keeps_rows,
                norms_first=variant.norms_first,
            )
            for keeps_rows in (True, False)
        )  # fmt: skip
        blocks[f"model.{half}.layers"] = [first, *[later] * (config.num_blocks(f"{half}_layers", 12) - 1)]
    norms = [f"model.{half}.layer_norm" for half in ("encoder", "decoder") if "layer_norm" in variant.norms]
    return translator(
        config,
        hidden,
        (
            embedding("model.shared", vocab, hidden),
            *_inputs(config, variant, "encoder", positions),
            Module("model.decoder.embed_tokens", Embedding(vocab, hidden)),
            *_inputs(config, variant, "decoder", positions),
        ),
        blocks,
        (
            *(layer_norm(name, hidden) for name in norms),
            Module("lm_head", Linear(hidden, vocab)),
            *([activation("final_logits_bias", vocab, "scale")] if variant.has_logit_bias else []),
        ),
        None if variant.positions == "computed" else positions,
    )


def whisper(config: ConfigReader) -> ModelSpec:
    """Whisper has a decoder with positions in a table, whose head is its embedding."""
    check_translator(config, "Whisper")
    _refuse_dropouts(config, *_DROPOUTS, *_LAYER_DROPOUTS)
    hidden, rows = config.integer("d_model", 384), config.integer("max_source_positions", 1500)
    config = config.override(d_model=hidden).add_defaults(
        vocab_size=51_865, decoder_attention_heads=6, decoder_ffn_dim=1536
    )
    positions = config.integer("max_target_positions", 448)
    first, later = (
        _build_block(
            config, "WhisperDecoderLayer", "decoder", keeps_rows=keeps_rows, rows=rows, key_bias=False
        )
        for keeps_rows in (True, False)
    )
    model = language_model(
        config,
        hidden,
        [
            embedding("model.decoder.embed_tokens", config.integer("vocab_size"), hidden),
            embedding("model.decoder.embed_positions", positions, hidden),
            residual("model.decoder.add_positions", hidden),
        ],
        [first, *[later] * (config.num_blocks("decoder_layers", 4) - 1)],
        positions,
        root="model.decoder.layers",
        final=[layer_norm("model.decoder.layer_norm", hidden)],
        is_tied=True,
    )
    head = next(module for module in model.after if module.name == "lm_head")
    after = tuple(replace(module, name="proj_out") if module is head else module for module in model.after)
    return replace(model, after=after, has_encoder=True, towers=(whisper_encoder(config, rows),))


def _refuse_dropouts(config: ConfigReader, *keys: str) -> None:
    """Raises InputError for a dropout that is not 0."""
    for key in keys:
        if config.fraction(key, 0.0):
            raise config.error(f"'{key}' is {config.values[key]}, which zsim does not simulate; expected 0")


def _inputs(config: ConfigReader, variant: _Variant, half: str, positions: int) -> list[Module]:
    """The scale, positions, norm and dropout behind the embedding of a half."""
    hidden, root = config.integer("d_model"), f"model.{half}"
    modules = [activation(f"{root}.embed_scale", hidden, "scale")]
    if variant.positions != "computed":
        is_learned = variant.positions == "learned"
        rows = positions + (_SPARE_ROWS if is_learned else 0)
        weight = Parameter("weight", (rows, hidden), trainable=is_learned)
        modules.append(Module(f"{root}.embed_positions", Embedding(rows, hidden), (weight,)))
    modules.append(residual(f"{root}.add_positions", hidden))
    if "layernorm_embedding" in variant.norms:
        modules.append(layer_norm(f"{root}.layernorm_embedding", hidden))
    if config.fraction("dropout", 0.0):
        modules.append(activation(f"{root}.dropout", hidden, "dropout"))
    return modules


def _build_block(
    config: ConfigReader,
    kind: str,
    half: str,
    *,
    keeps_rows: bool,
    norms_first: bool = True,
    rows: int = 0,
    key_bias: bool = True,
) -> Block:
    """Self-attention, in a decoder attention to the encoder's rows, and a plain MLP, each with a norm. The
    first block keeps the encoder's output for all.

    `rows` are those of a sound, and 0 for tokens.
    """
    hidden, dropout = config.integer("d_model"), config.fraction("dropout", 0.0)
    heads = config.integer(f"{half}_attention_heads", 16)
    if hidden % heads:
        raise config.error(f"'{half}_attention_heads' is {heads}; expected a divisor of {hidden}")
    inner = config.integer(f"{half}_ffn_dim", 4096)
    act, inner_dropout = config.activation("activation_function", "gelu"), "activation_dropout"
    mlp = plain_mlp(("fc1", "activation_fn", "fc2"), hidden, inner, act)
    if config.fraction(inner_dropout, 0.0):
        mlp.insert(2, activation(inner_dropout, inner, "dropout"))
        mlp[1] = activation("activation_fn", inner, "relu_kept" if act == "relu" else act)
    branches: list[tuple[str, str, list[Module]]] = []
    order: list[str] = []
    for name in ("self_attn", "encoder_attn") if half == "decoder" else ("self_attn",):
        is_cross, norm_name = name == "encoder_attn", f"{name}_layer_norm"
        key, value, query, output = (f"{name}.{part}" for part in ("k_proj", "v_proj", "q_proj", "out_proj"))
        core = attention(
            f"{name}.core", heads, heads, hidden // heads, rotary=False, upcasts_softmax=False,
            dropout=config.fraction("attention_dropout", 0.0),
        )  # fmt: skip
        keys = [
            linear(key, hidden, hidden, bias=key_bias, shares_input=not (is_cross and keeps_rows)),
            linear(value, hidden, hidden, bias=True, shares_input=True),
        ]
        if is_cross and rows:
            keys = [replace(module, sample_rows="frames") for module in keys]
        is_causal = half == "decoder" and not is_cross
        products = [
            linear(query, hidden, hidden, bias=True),
            *keys,
            replace_op_fields(core, is_causal=is_causal, sample_keys=rows if is_cross else 0),
            linear(output, hidden, hidden, bias=True),
        ]
        branches.append((name, norm_name, products))
        order += [key, value, query, output, norm_name]
    modules: list[Module] = []
    for name, norm_name, branch in (*branches, ("mlp", "final_layer_norm", mlp)):
        norm, add = layer_norm(norm_name, hidden), residual(f"{name}.residual", hidden, dropout)
        modules += [norm, *branch, add] if norms_first else [*branch, add, norm]
    return set_registration(Block(kind, tuple(modules)), *order, "fc1", "fc2", "final_layer_norm")
