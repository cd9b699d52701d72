"""GPT-2, GPT-BigCode, GPT-Neo, GPT-J and GPT-NeoX: LayerNorm, a plain MLP, biases.

Modules stand in the order they run; names, shapes and defaults as in transformers 5.23
(`modeling_gpt2.py`, `modeling_gpt_bigcode.py`, `modeling_gpt_neo.py`, `modeling_gptj.py`,
`modeling_gpt_neox.py` and the `configuration_*.py` beside them).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.llama import one_block_per_window
from zsim.specs.model.families.parts import (
    Head,
    activation,
    attention,
    conv1d,
    embedding,
    layer_norm,
    linear,
    register,
    residual,
)
from zsim.specs.model.spec import Block, ModelSpec, Module

Product = Callable[[str, int, int], Module]


def gpt2(config: ConfigReader) -> ModelSpec:
    """GPT-2 and GPT-3 shapes; `Conv1D` instead of `nn.Linear`."""
    return _gpt2(config, conv1d, config.integer("n_head"), "gelu_new")


def gpt_bigcode(config: ConfigReader) -> ModelSpec:
    """SantaCoder and StarCoder: GPT-2's shapes with one key/value head for all, and `nn.Linear`."""
    kv_heads = 1 if config.boolean("multi_query", True) else config.integer("n_head")
    return _gpt2(config, partial(linear, bias=True), kv_heads, "gelu_pytorch_tanh")


def _gpt2(config: ConfigReader, product: Product, kv_heads: int, default_activation: str) -> ModelSpec:
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("n_inner", 4 * hidden)
    dropout = config.fraction("resid_pdrop", 0.1)
    core = attention(
        "attn.core",
        heads,
        kv_heads,
        head_dim,
        rotary=False,
        dropout=config.fraction("attn_pdrop", 0.1),
        upcasts_softmax=False,
    )
    block = Block(
        "GPT2Block" if product is conv1d else "GPTBigCodeBlock",
        (
            layer_norm("ln_1", hidden),
            product("attn.c_attn", hidden, (heads + 2 * kv_heads) * head_dim),
            core,
            product("attn.c_proj", hidden, hidden),
            residual("attn.resid_dropout", hidden, dropout),
            layer_norm("ln_2", hidden),
            product("mlp.c_fc", hidden, inner),
            activation("mlp.act", inner, config.string("activation_function", default_activation)),
            product("mlp.c_proj", inner, hidden),
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
        blocks=(block,) * config.num_blocks("n_layer"),
        after=Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )


def gpt_neo(config: ConfigReader) -> ModelSpec:
    """Layers with and without a window, as `attention_types` says; no bias on q, k, v."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_heads")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("intermediate_size", 4 * hidden)
    dropout = config.fraction("resid_dropout", 0.0)

    def block(window: int | None) -> Block:
        modules = (
            layer_norm("ln_1", hidden),
            linear("attn.attention.q_proj", hidden, hidden),
            linear("attn.attention.k_proj", hidden, hidden, shares_input=True),
            linear("attn.attention.v_proj", hidden, hidden, shares_input=True),
            attention(
                "attn.attention.core",
                heads,
                heads,
                head_dim,
                rotary=False,
                dropout=config.fraction("attention_dropout", 0.0),
                window=window,
            ),
            linear("attn.attention.out_proj", hidden, hidden, bias=True),
            residual("attn.attention.resid_dropout", hidden, dropout),
            layer_norm("ln_2", hidden),
            linear("mlp.c_fc", hidden, inner, bias=True),
            activation("mlp.act", inner, config.string("activation_function", "gelu_new")),
            linear("mlp.c_proj", inner, hidden, bias=True),
            residual("mlp.dropout", hidden, dropout),
        )
        qkv = ("k_proj", "v_proj", "q_proj", "out_proj")
        names = ("ln_1", *(f"attn.attention.{name}" for name in qkv), "ln_2", "mlp.c_fc", "mlp.c_proj")
        return register(Block("GPTNeoBlock", modules), *names)

    vocab = config.integer("vocab_size")
    positions = config.integer("max_position_embeddings", 2048)
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
            residual("transformer.drop", hidden, config.fraction("embed_dropout", 0.0)),
        ),
        blocks=tuple(one_block_per_window(_gpt_neo_windows(config), block)),
        after=Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )


def _gpt_neo_windows(config: ConfigReader) -> list[int | None]:
    """`[[["global", "local"], 12]]` -> 24 layers, every second one with `window_size`."""
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
    """Attention and MLP read the same norm; no bias in attention, one on the head."""
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("n_inner", 4 * hidden)
    dropout = config.fraction("resid_pdrop", 0.0)
    modules = (
        layer_norm("ln_1", hidden),
        linear("attn.q_proj", hidden, hidden),
        linear("attn.k_proj", hidden, hidden, shares_input=True),
        linear("attn.v_proj", hidden, hidden, shares_input=True),
        attention("attn.core", heads, heads, head_dim, dropout=config.fraction("attn_pdrop", 0.0)),
        linear("attn.out_proj", hidden, hidden),
        residual("attn.resid_dropout", hidden, dropout),
        linear("mlp.fc_in", hidden, inner, bias=True, shares_input=True),
        activation("mlp.act", inner, config.string("activation_function", "gelu_new")),
        linear("mlp.fc_out", inner, hidden, bias=True),
        residual("mlp.dropout", hidden, dropout),
    )
    order = ("ln_1", "attn.k_proj", "attn.v_proj", "attn.q_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out")
    vocab = config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", False)
    head = Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied, bias=True)
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=config.integer("n_positions", 2048),
        before=(embedding("transformer.wte", vocab, hidden),),
        blocks=(register(Block("GPTJBlock", modules), *order),) * config.num_blocks("n_layer"),
        after=head.modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )


def gpt_neox(config: ConfigReader) -> ModelSpec:
    """Two norms on the same input where the residual is parallel (the default)."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    inner, vocab = config.integer("intermediate_size"), config.integer("vocab_size")
    has_bias = config.boolean("attention_bias", True)
    is_parallel = config.boolean("use_parallel_residual", True)
    dropout = config.fraction("hidden_dropout", 0.0)
    modules = (
        layer_norm("input_layernorm", hidden),
        linear("attention.query_key_value", hidden, 3 * hidden, bias=has_bias),
        attention(
            "attention.core",
            heads,
            heads,
            head_dim,
            dropout=config.fraction("attention_dropout", 0.0),
            splits_fused_qkv=True,
        ),
        linear("attention.dense", hidden, hidden, bias=has_bias),
        residual("post_attention_dropout", hidden, dropout),
        layer_norm("post_attention_layernorm", hidden, shares_input=is_parallel),
        linear("mlp.dense_h_to_4h", hidden, inner, bias=True),
        activation("mlp.act", inner, config.string("hidden_act", "gelu")),
        linear("mlp.dense_4h_to_h", inner, hidden, bias=True),
        residual("post_mlp_dropout", hidden, dropout),
    )
    order = (
        "input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense",
        "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    )  # fmt: skip
    is_tied = config.boolean("tie_word_embeddings", False)
    embeddings = [embedding("gpt_neox.embed_in", vocab, hidden)]
    if dropout:
        embeddings.append(residual("gpt_neox.emb_dropout", hidden, dropout))
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=config.integer("max_position_embeddings", 2048),
        before=tuple(embeddings),
        blocks=(register(Block("GPTNeoXLayer", modules), *order),) * config.num_blocks("num_hidden_layers"),
        after=Head(layer_norm("gpt_neox.final_layer_norm", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="gpt_neox.layers",
        is_tied=is_tied,
        source=config.where,
    )
