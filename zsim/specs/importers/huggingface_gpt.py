"""Decoders of the GPT-2 kind: LayerNorm, learned positions, plain MLP, biases.

Modules stand in the order they run; names, shapes and defaults as in transformers 5.23
(`modeling_gpt2.py` and `configuration_gpt2.py`).
"""

from __future__ import annotations

from zsim.specs.importers.huggingface_config import ConfigReader
from zsim.specs.importers.huggingface_parts import (
    Head,
    activation,
    attention,
    conv1d,
    embedding,
    layer_norm,
    residual,
)
from zsim.specs.model import Block, ModelSpec


def gpt2(config: ConfigReader) -> ModelSpec:
    """GPT-2 and GPT-3 shapes; `Conv1D` instead of `nn.Linear`."""
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("n_inner", 4 * hidden)
    dropout = config.fraction("resid_pdrop", 0.1)
    attention_dropout = config.fraction("attn_pdrop", 0.1)
    block = Block(
        "GPT2Block",
        (
            layer_norm("ln_1", hidden),
            conv1d("attn.c_attn", hidden, 3 * hidden),
            attention(
                "attn.core",
                heads,
                heads,
                head_dim,
                rotary=False,
                dropout=attention_dropout,
                upcasts_softmax=False,
            ),
            conv1d("attn.c_proj", hidden, hidden),
            residual("attn.resid_dropout", hidden, dropout),
            layer_norm("ln_2", hidden),
            conv1d("mlp.c_fc", hidden, inner),
            activation("mlp.act", inner, config.string("activation_function", "gelu_new")),
            conv1d("mlp.c_proj", inner, hidden),
            residual("mlp.dropout", hidden, dropout),
        ),
    )
    vocab, positions = config.integer("vocab_size"), config.integer("n_positions")
    is_tied = config.boolean("tie_word_embeddings", True)
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=positions,
        before=(
            embedding("transformer.wte", vocab, hidden),
            embedding("transformer.wpe", positions, hidden),
            residual("transformer.drop", hidden, config.fraction("embd_pdrop", 0.1)),
        ),
        blocks=(block,) * config.integer("n_layer"),
        after=Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )
