"""GPT-2, GPT-BigCode, GPT-Neo, GPT-J and GPT-NeoX: LayerNorm, a plain MLP, biases.

Modules are in the order in which they run. Names, shapes and defaults are as in transformers 5.23
(`modeling_gpt2.py`, `modeling_gpt_bigcode.py`, `modeling_gpt_neo.py`, `modeling_gptj.py`,
`modeling_gpt_neox.py` and their `configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    conv1d,
    embedding,
    language_model,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    separate_qkv,
    set_registration,
    word_embedding,
)
from zsim.specs.model.families.llama import build_unique_blocks
from zsim.specs.model.spec import Block, ModelSpec, Module

Product = Callable[[str, int, int], Module]


def gpt2(config: ConfigReader) -> ModelSpec:
    """GPT-2 and GPT-3 shapes, with `Conv1D` instead of `nn.Linear`."""
    return _gpt2(config, "GPT2Block", conv1d, config.integer("n_head"), "gelu_new")


def gpt_bigcode(config: ConfigReader) -> ModelSpec:
    """SantaCoder and StarCoder: GPT-2's shapes with one key/value head for all, and `nn.Linear`."""
    kv_heads = 1 if config.boolean("multi_query", True) else config.integer("n_head")
    return _gpt2(config, "GPTBigCodeBlock", partial(linear, bias=True), kv_heads, "gelu_pytorch_tanh")


def _gpt2(config: ConfigReader, kind: str, product: Product, kv_heads: int, act: str) -> ModelSpec:
    if config.boolean("add_cross_attention", False):
        raise config.error("'add_cross_attention' is true; expected false, of a decoder alone")
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("n_inner", 4 * hidden)
    dropout, score_dropout = config.fraction("resid_pdrop", 0.1), config.fraction("attn_pdrop", 0.1)
    act = config.activation("activation_function", act)
    qkv = product("attn.c_attn", hidden, (heads + 2 * kv_heads) * head_dim)
    core = attention(
        "attn.core", heads, kv_heads, head_dim, rotary=False, dropout=score_dropout, upcasts_softmax=False
    )
    attention_modules = [qkv, core, product("attn.c_proj", hidden, hidden)]
    up, down = product("mlp.c_fc", hidden, inner), product("mlp.c_proj", inner, hidden)
    mlp = [up, activation("mlp.act", inner, act), down]
    norms = layer_norm("ln_1", hidden), layer_norm("ln_2", hidden)
    adds = residual("attn.resid_dropout", hidden, dropout), residual("mlp.dropout", hidden, dropout)
    block = attention_mlp_block(kind, norms, attention_modules, mlp, adds)
    embeddings = _embeddings(
        config, hidden, config.integer("n_positions"), config.fraction("embd_pdrop", 0.1)
    )
    blocks = [block] * config.num_blocks("n_layer")
    return language_model(config, hidden, embeddings, blocks, config.integer("n_positions"), is_tied=True)


def _embeddings(config: ConfigReader, hidden: int, positions: int, dropout: float) -> list[Module]:
    """Word and learned position embeddings, their sum and its dropout."""
    position_embedding = embedding("transformer.wpe", positions, hidden)
    return [word_embedding(config, hidden), position_embedding, residual("transformer.drop", hidden, dropout)]


def gpt_neo(config: ConfigReader) -> ModelSpec:
    """GPT-Neo has layers with and without a window, as `attention_types` says, and no bias on q, k, v."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_heads")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("intermediate_size", 4 * hidden)
    dropout, score_dropout = config.fraction("resid_dropout", 0.0), config.fraction("attention_dropout", 0.0)
    act = config.activation("activation_function", "gelu_new")
    root = "attn.attention"
    norms = layer_norm("ln_1", hidden), layer_norm("ln_2", hidden)
    adds = residual(f"{root}.resid_dropout", hidden, dropout), residual("mlp.dropout", hidden, dropout)
    products = [f"{root}.{name}_proj" for name in ("k", "v", "q", "out")]
    mlp = plain_mlp(("mlp.c_fc", "mlp.act", "mlp.c_proj"), hidden, inner, act)

    def block(window: int | None) -> Block:
        attention_modules = [
            *separate_qkv(root, hidden),
            attention(
                f"{root}.core", heads, heads, head_dim, rotary=False, dropout=score_dropout, window=window
            ),
            linear(f"{root}.out_proj", hidden, hidden, bias=True),
        ]
        transformer_block = attention_mlp_block("GPTNeoBlock", norms, attention_modules, mlp, adds)
        return set_registration(transformer_block, "ln_1", *products, "ln_2", "mlp.c_fc", "mlp.c_proj")

    positions = config.integer("max_position_embeddings", 2048)
    embeddings = _embeddings(config, hidden, positions, config.fraction("embed_dropout", 0.0))
    blocks = build_unique_blocks(_gpt_neo_windows(config), block)
    return language_model(config, hidden, embeddings, blocks, positions, is_tied=True)


def _gpt_neo_windows(config: ConfigReader) -> list[int | None]:
    """Windows of all layers: `[[["global", "local"], 12]]` -> 24 layers, every second one with
    `window_size`."""
    layers, window = config.num_blocks("num_layers"), config.integer("window_size", 256)
    groups = config.values.get("attention_types") or [[["global", "local"], max(layers // 2, 1)]]
    try:
        count = sum(len(names) * times for names, times in groups)
        if count != layers:
            raise config.error(
                f"'attention_types' gives {count} layers; expected {layers}, the number of layers"
            )
        kinds = [kind for names, times in groups for _ in range(times) for kind in names]
    except (TypeError, ValueError):
        raise config.error(
            f"'attention_types' is {groups!r}; expected a list such as [[['global', 'local'], 12]]"
        ) from None
    return [window if kind == "local" else None for kind in kinds]


def gptj(config: ConfigReader) -> ModelSpec:
    """GPT-J's attention and MLP read the same norm. There is no bias in attention, and one on the head."""
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("n_inner", 4 * hidden)
    dropout, score_dropout = config.fraction("resid_pdrop", 0.0), config.fraction("attn_pdrop", 0.0)
    act = config.activation("activation_function", "gelu_new")
    modules = (
        layer_norm("ln_1", hidden),
        *separate_qkv("attn", hidden),
        attention("attn.core", heads, heads, head_dim, dropout=score_dropout),
        linear("attn.out_proj", hidden, hidden),
        residual("attn.resid_dropout", hidden, dropout),
        *plain_mlp(("mlp.fc_in", "mlp.act", "mlp.fc_out"), hidden, inner, act, shares_input=True),
        residual("mlp.dropout", hidden, dropout),
    )
    order = ("ln_1", "attn.k_proj", "attn.v_proj", "attn.q_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out")
    blocks = [set_registration(Block("GPTJBlock", modules), *order)] * config.num_blocks("n_layer")
    positions = config.integer("n_positions", 2048)
    words = word_embedding(config, hidden)
    return language_model(config, hidden, [words], blocks, positions, head_bias=True)


def gpt_neox(config: ConfigReader) -> ModelSpec:
    """Two norms on the same input where the residual is parallel (the default)."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    inner, act = config.integer("intermediate_size"), config.activation("hidden_act", "gelu")
    has_bias = config.boolean("attention_bias", True)
    dropout, score_dropout = config.fraction("hidden_dropout", 0.0), config.fraction("attention_dropout", 0.0)
    attention_modules = [
        linear("attention.query_key_value", hidden, 3 * hidden, bias=has_bias),
        attention("attention.core", heads, heads, head_dim, dropout=score_dropout, splits_fused_qkv=True),
        linear("attention.dense", hidden, hidden, bias=has_bias),
    ]
    mlp = plain_mlp(("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h"), hidden, inner, act)
    is_parallel = config.boolean("use_parallel_residual", True)
    second = layer_norm("post_attention_layernorm", hidden, shares_input=is_parallel)
    adds = (
        residual("post_attention_dropout", hidden, dropout),
        residual("post_mlp_dropout", hidden, dropout),
    )
    block = attention_mlp_block(
        "GPTNeoXLayer", (layer_norm("input_layernorm", hidden), second), attention_modules, mlp, adds
    )
    order = (
        "input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense",
        "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    )  # fmt: skip
    embeddings = [word_embedding(config, hidden, "gpt_neox.embed_in")]
    if dropout:
        embeddings.append(residual("gpt_neox.emb_dropout", hidden, dropout))
    blocks = [set_registration(block, *order)] * config.num_blocks("num_hidden_layers")
    positions = config.integer("max_position_embeddings", 2048)
    final = [layer_norm("gpt_neox.final_layer_norm", hidden)]
    return language_model(config, hidden, embeddings, blocks, positions, root="gpt_neox.layers", final=final)
