"""T5, T5 1.1, Flan-T5, mT5 and umT5: an encoder, and a decoder that attends to it too.

Names, shapes and defaults are as in transformers 5.24 (`modeling_t5.py`, `configuration_t5.py`, and those of
mT5 and umT5), which always ties embedding and head. The decoder has as many tokens as the encoder:
`sequence_length` of each. The encoder's last norm is counted with the modules after the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    check_translator,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
    translator,
)
from zsim.specs.model.spec import Block, Embedding, Linear, ModelSpec, Module, Parameter, ScoreBias

_NORM = "t5_rms"
_KINDS = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}


def t5(config: ConfigReader) -> ModelSpec:
    """T5 has distances between tokens as a bias, learned in the first block of each half, and dropout
    everywhere. umT5 learns a bias in every block.
    """
    check_translator(config, _KINDS[config.family])
    if config.family != "t5":
        sizes = {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 250_112}
        absent = {key: size for key, size in sizes.items() if config.optional_integer(key) is None}
        config = config.add_defaults(**absent, feed_forward_proj="gated-gelu")
    hidden, vocab = config.integer("d_model"), config.integer("vocab_size")
    layers = config.num_blocks("num_layers")
    dropout = config.fraction("dropout_rate", 0.1)
    has_decoder_count = config.optional_integer("num_decoder_layers") is not None
    decoders = config.num_blocks("num_decoder_layers") if has_decoder_count else layers
    encoder = _stack(config, hidden, dropout, layers, is_decoder=False)
    decoder = _stack(config, hidden, dropout, decoders, is_decoder=True)
    words = Module("shared", Embedding(vocab, hidden), (Parameter("weight", (vocab, hidden)),))
    drop = [activation("encoder.dropout", hidden, "dropout")] if dropout else []
    return translator(
        config,
        hidden,
        (words, *drop, Module("decoder.embed_tokens", Embedding(vocab, hidden)), *drop),
        {"encoder.block": encoder, "decoder.block": decoder},
        (
            rms_norm("encoder.final_layer_norm", hidden, kind=_NORM),
            rms_norm("decoder.final_layer_norm", hidden, kind=_NORM),
            Module("lm_head", Linear(hidden, vocab)),
        ),
    )


def _stack(
    config: ConfigReader, hidden: int, dropout: float, layers: int, *, is_decoder: bool
) -> Sequence[Block]:
    first, later = (
        _block(config, hidden, dropout, is_decoder=is_decoder, is_first=is_first)
        for is_first in (True, False)
    )
    return [first] * layers if config.family == "umt5" else [first, *[later] * (layers - 1)]


def _block(config: ConfigReader, hidden: int, dropout: float, *, is_decoder: bool, is_first: bool) -> Block:
    """Self-attention, in a decoder cross-attention, and the MLP, each after a norm."""
    score_bias: ScoreBias = "made" if is_first else "read"
    attention_modules = _attention(config, "layer.0.SelfAttention", hidden, score_bias, is_causal=is_decoder)
    norm = rms_norm("layer.0.layer_norm", hidden, kind=_NORM)
    modules = [norm, *attention_modules, residual("layer.0.dropout", hidden, dropout)]
    mlp_layer = 1
    if is_decoder:
        # Every block adds a bias of zeros, which the first makes.
        cross = _attention(config, "layer.1.EncDecAttention", hidden, "zeros", is_cross=True)
        norm = rms_norm("layer.1.layer_norm", hidden, kind=_NORM)
        modules += [norm, *cross, residual("layer.1.dropout", hidden, dropout)]
        mlp_layer = 2
    mlp = _mlp(config, f"layer.{mlp_layer}.DenseReluDense", hidden, dropout)
    norm = rms_norm(f"layer.{mlp_layer}.layer_norm", hidden, kind=_NORM)
    modules += [norm, *mlp, residual(f"layer.{mlp_layer}.dropout", hidden, dropout)]
    names = [module.name for module in modules if module.parameters and "layer_norm" not in module.name]
    names.sort(key=lambda name: name.endswith("relative_attention_bias"))
    order = [name for number in range(mlp_layer + 1) for name in _layer_registration(names, number)]
    return set_registration(Block(f"{_KINDS[config.family]}Block", tuple(modules)), *order)


def _layer_registration(names: Sequence[str], number: int) -> list[str]:
    """The modules of a layer of the block, and then its norm."""
    names_of_layer = [name for name in names if name.startswith(f"layer.{number}.")]
    return [*names_of_layer, f"layer.{number}.layer_norm"]


def _attention(
    config: ConfigReader,
    root: str,
    hidden: int,
    bias: ScoreBias,
    *,
    is_causal: bool = False,
    is_cross: bool = False,
) -> list[Module]:
    """Projections to heads of `d_kv`, with scores that are not scaled by their width.

    With `is_cross` keys and values are of the encoder's output, which the block keeps for all of its decoder.
    """
    heads, head_dim = config.integer("num_heads", 8), config.integer("d_kv", 64)
    inner, dropout = heads * head_dim, config.fraction("dropout_rate", 0.1)
    core = attention(
        f"{root}.core", heads, heads, head_dim, rotary=False, dropout=dropout, upcasts_softmax=False
    )
    modules = [
        linear(f"{root}.q", hidden, inner),
        linear(f"{root}.k", hidden, inner, shares_input=True),
        linear(f"{root}.v", hidden, inner, shares_input=True),
        replace_op_fields(core, is_causal=is_causal, bias=bias),
        linear(f"{root}.o", inner, hidden),
    ]
    if bias == "made":
        rows = config.integer("relative_attention_num_buckets", 32)
        table = Module(
            f"{root}.relative_attention_bias", Embedding(rows, heads), (Parameter("weight", (rows, heads)),)
        )
        modules.insert(3, table)
    return modules


def _mlp(config: ConfigReader, root: str, hidden: int, dropout: float) -> list[Module]:
    """ReLU (T5), or a gated activation (T5 1.1: `feed_forward_proj` "gated-gelu")."""
    inner, kind = config.integer("d_ff", 2048), config.string("feed_forward_proj", "relu")
    gated, _, act = kind.rpartition("-")
    if gated not in ("", "gated"):
        raise config.error(f"'feed_forward_proj' is '{kind}'; expected an activation, or gated-ACTIVATION")
    act = "gelu_new" if kind == "gated-gelu" else act
    drop = [activation(f"{root}.dropout", inner, "dropout")] if dropout else []
    if gated:
        first = [
            linear(f"{root}.wi_0", hidden, inner),
            linear(f"{root}.wi_1", hidden, inner, shares_input=True),
            activation(f"{root}.act", inner, act, gated=True),
        ]
    else:
        relu_act = "relu_kept" if act == "relu" and dropout else act
        first = [linear(f"{root}.wi", hidden, inner), activation(f"{root}.act", inner, relu_act)]
    return [*first, *drop, linear(f"{root}.wo", inner, hidden)]
