"""Nemotron and StarCoder 2: LayerNorm, grouped queries with rotary positions, a plain MLP.

Names, shapes and defaults as in transformers 5.23 (`modeling_nemotron.py`, `modeling_starcoder2.py` and their
`configuration_*.py`). Nemotron's LayerNorm1P adds one to its weight, which changes neither shapes nor bytes.
"""

from __future__ import annotations

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    attention_mlp_block,
    embedding,
    language_model,
    layer_norm,
    plain_mlp,
    residual,
    set_registration,
)
from zsim.specs.model.families.llama import REGISTRATION, Shape, attention_modules
from zsim.specs.model.spec import Block, ModelSpec


def nemotron(config: ConfigReader) -> ModelSpec:
    """Nemotron 3 and 4: squared ReLU, no biases but the norms', an LM head of its own."""
    shape = Shape.read(config, act="relu2")
    names = "mlp.up_proj", "mlp.act_fn", "mlp.down_proj"
    bias = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    block = _block("NemotronDecoderLayer", shape, names, bias)
    return _decoder(config, shape, block, is_tied=False)


def starcoder2(config: ConfigReader) -> ModelSpec:
    """StarCoder 2 has GELU and biases everywhere.

    It has two key/value heads and no window unless the file says otherwise.
    """
    shape = Shape.read(config, kv_default=2, act="gelu_pytorch_tanh")
    has_bias = config.boolean("use_bias", True)
    names, dropout = ("mlp.c_fc", "mlp.act", "mlp.c_proj"), config.fraction("residual_dropout", 0.0)
    window = config.optional_integer("sliding_window")
    block = _block("Starcoder2DecoderLayer", shape, names, (has_bias, has_bias), dropout, window)
    return _decoder(config, shape, block, is_tied=True)


def _block(
    kind: str,
    shape: Shape,
    names: tuple[str, str, str],
    bias: tuple[bool, bool],
    dropout: float = 0.0,
    window: int | None = None,
) -> Block:
    """Norm, attention, add, then norm, MLP, add.

    `names` are those of the MLP. `bias` says whether attention and the MLP have biases.
    """
    core = attention_modules(shape, qkv_bias=bias[0], o_bias=bias[0], window=window)
    mlp = plain_mlp(names, shape.hidden, shape.ffn, shape.act, bias=bias[1])
    norms = (
        layer_norm("input_layernorm", shape.hidden),
        layer_norm("post_attention_layernorm", shape.hidden),
    )
    adds = (
        residual("self_attn.residual", shape.hidden, dropout),
        residual("mlp.residual", shape.hidden, dropout),
    )
    order = (*REGISTRATION[:4], names[0], names[2], "input_layernorm", "post_attention_layernorm")
    return set_registration(attention_mlp_block(kind, norms, core, mlp, adds), *order)


def _decoder(config: ConfigReader, shape: Shape, block: Block, *, is_tied: bool) -> ModelSpec:
    return language_model(
        config,
        shape.hidden,
        [embedding("model.embed_tokens", shape.vocab, shape.hidden)],
        [block] * shape.layers,
        config.integer("max_position_embeddings", 4096),
        root="model.layers",
        final=[layer_norm("model.norm", shape.hidden)],
        is_tied=is_tied,
    )
