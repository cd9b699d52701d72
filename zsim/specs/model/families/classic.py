"""Falcon, MPT, BLOOM, OPT and Qwen of 2023.

Modules are in the order in which they run. Names, shapes and defaults are as in transformers 5.23
(`modeling_falcon.py`, `modeling_mpt.py`, `modeling_bloom.py`, `modeling_opt.py` and their
`configuration_*.py`), Qwen's as in the `modeling_qwen.py` that is published with its weights.
"""

from __future__ import annotations

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    embedding,
    language_model,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rms_norm,
    separate_qkv,
    set_registration,
    word_embedding,
)
from zsim.specs.model.spec import Block, ModelSpec

_FOUR_H = ("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h")


def falcon(config: ConfigReader) -> ModelSpec:
    """Falcon has few key/value heads, and attention and MLP in parallel, on one norm (7B) or two (40B)."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    is_new = config.boolean("new_decoder_architecture", False)
    is_multi_query = config.boolean("multi_query", True)
    kv_heads = config.integer("num_kv_heads", heads) if is_new else (1 if is_multi_query else heads)
    config.check_kv_heads(heads, kv_heads)
    is_parallel = is_new or config.boolean("parallel_attn", True)
    num_norms = config.integer("num_ln_in_parallel_attn", 2) if is_new else 1
    has_bias = config.boolean("bias", False)
    attention_dropout = config.fraction("attention_dropout", 0.0)
    attention_modules = [
        linear("self_attention.query_key_value", hidden, (heads + 2 * kv_heads) * head_dim, bias=has_bias),
        attention(
            "self_attention.core",
            heads,
            kv_heads,
            head_dim,
            rotary=not config.boolean("alibi", False),
            dropout=attention_dropout,
            upcasts_softmax=False,
            splits_fused_qkv=True,
        ),
        linear("self_attention.dense", hidden, hidden, bias=has_bias),
    ]
    norms = [layer_norm("input_layernorm", hidden)]
    if not is_parallel:
        # The attention's output is dropped out at the attention's own rate before the add.
        attention_modules.append(residual("attention_residual", hidden, attention_dropout))
        attention_modules.append(layer_norm("post_attention_layernorm", hidden))
    elif num_norms == 2:
        norms = [layer_norm("ln_attn", hidden), layer_norm("ln_mlp", hidden, shares_input=True)]
    inner, act = config.integer("ffn_hidden_size", 4 * hidden), config.activation("activation", "gelu")
    shares_input = is_parallel and num_norms == 1
    mlp = plain_mlp(_FOUR_H, hidden, inner, act, bias=has_bias, shares_input=shares_input)
    adds = [residual("attention_residual", hidden)] if is_parallel else []
    adds.append(residual("residual", hidden, config.fraction("hidden_dropout", 0.0)))
    order = (
        "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "ln_attn", "ln_mlp", "post_attention_layernorm", "input_layernorm",
    )  # fmt: skip
    block = set_registration(Block("FalconDecoderLayer", (*norms, *attention_modules, *mlp, *adds)), *order)
    words = word_embedding(config, hidden, "transformer.word_embeddings")
    blocks = [block] * config.num_blocks("num_hidden_layers")
    positions = config.integer("max_position_embeddings", 2048)
    return language_model(config, hidden, [words], blocks, positions, is_tied=True)


def mpt(config: ConfigReader) -> ModelSpec:
    """MPT has ALiBi and no biases anywhere. llm-foundry alone has `ffn_hidden_size`."""
    hidden, heads = config.integer("d_model"), config.integer("n_heads")
    head_dim, details = config.head_dim(hidden, heads), config.nested("attn_config")
    fixed = ((config, "no_bias", True), (config, "expansion_ratio", 4), (details, "kv_n_heads", heads))
    for reader, key, expected in fixed:
        if (value := reader.values.get(key)) not in (None, expected):
            raise reader.error(f"'{key}' is {value!r}; expected {expected!r}, as transformers' MPT has it")
    dropout = details.fraction("attn_pdrop", 0.0)
    attention_modules = [
        linear("attn.Wqkv", hidden, 3 * hidden),
        attention("attn.core", heads, heads, head_dim, rotary=False, dropout=dropout),
        linear("attn.out_proj", hidden, hidden),
    ]
    inner = config.integer("ffn_hidden_size", 4 * hidden)
    mlp = plain_mlp(("ffn.up_proj", "ffn.act", "ffn.down_proj"), hidden, inner, "gelu", bias=False)
    norms = layer_norm("norm_1", hidden, bias=False), layer_norm("norm_2", hidden, bias=False)
    adds = residual("resid_attn_dropout", hidden, dropout), residual("ffn.dropout", hidden, dropout)
    blocks = [attention_mlp_block("MptBlock", norms, attention_modules, mlp, adds)] * config.num_blocks(
        "n_layers"
    )
    words, positions = word_embedding(config, hidden), config.integer("max_seq_len", 2048)
    final = [layer_norm("transformer.norm_f", hidden, bias=False)]
    return language_model(
        config, hidden, [words], blocks, positions, root="transformer.blocks", final=final, is_tied=True
    )


def bloom(config: ConfigReader) -> ModelSpec:
    """ALiBi, a norm right after the embedding, biases everywhere."""
    hidden, heads = config.integer("hidden_size"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    dropout = config.fraction("hidden_dropout", 0.0)
    attention_dropout = config.fraction("attention_dropout", 0.0)
    attention_modules = [
        linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True),
        attention("self_attention.core", heads, heads, head_dim, rotary=False, dropout=attention_dropout),
        linear("self_attention.dense", hidden, hidden, bias=True),
    ]
    mlp_names = ("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h")
    mlp = plain_mlp(mlp_names, hidden, 4 * hidden, "gelu_bloom")
    norms = layer_norm("input_layernorm", hidden), layer_norm("post_attention_layernorm", hidden)
    adds = (residual("self_attention.residual", hidden, dropout), residual("mlp.residual", hidden, dropout))
    blocks = [attention_mlp_block("BloomBlock", norms, attention_modules, mlp, adds)] * config.num_blocks(
        "n_layer"
    )
    words = word_embedding(config, hidden, "transformer.word_embeddings")
    embeddings = [words, layer_norm("transformer.word_embeddings_layernorm", hidden)]
    return language_model(config, hidden, embeddings, blocks, None, is_tied=True)


def opt(config: ConfigReader) -> ModelSpec:
    """OPT has learned positions with two spare rows. `word_embed_proj_dim` may be narrower than the model
    (350M).
    """
    hidden = config.integer("hidden_size")
    width = config.integer("word_embed_proj_dim", hidden)
    positions = config.integer("max_position_embeddings", 2048)
    is_before = config.boolean("do_layer_norm_before", True)
    is_affine = config.boolean("layer_norm_elementwise_affine", True)
    block = _opt_block(config, hidden, is_before=is_before, is_affine=is_affine)
    root = "model.decoder"
    before = [
        word_embedding(config, width, f"{root}.embed_tokens"),
        embedding(f"{root}.embed_positions", positions + 2, hidden),
        residual(f"{root}.add_positions", hidden),
    ]
    final = []
    if is_before and not config.boolean("_remove_final_layer_norm", False):
        final.append(layer_norm(f"{root}.final_layer_norm", hidden, affine=is_affine))
    if width != hidden:
        before.insert(2, linear(f"{root}.project_in", width, hidden))
        final.append(linear(f"{root}.project_out", hidden, width))
    order = ("embed_tokens", "embed_positions", "project_out", "project_in", "final_layer_norm")
    return language_model(
        config,
        hidden,
        before,
        [block] * config.num_blocks("num_hidden_layers"),
        positions,
        root=f"{root}.layers",
        final=final,
        is_tied=True,
        head_width=width,
        registration=[f"{root}.{name}" for name in order],
    )


def _opt_block(config: ConfigReader, hidden: int, *, is_before: bool, is_affine: bool) -> Block:
    """Norms before attention and MLP, or after them (350M)."""
    heads = config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    has_bias = config.boolean("enable_bias", True)
    dropout, score_dropout = config.fraction("dropout", 0.1), config.fraction("attention_dropout", 0.0)
    attention_modules = [
        *separate_qkv("self_attn", hidden, bias=has_bias),
        attention("self_attn.core", heads, heads, head_dim, rotary=False, dropout=score_dropout),
        linear("self_attn.out_proj", hidden, hidden, bias=has_bias),
        residual("self_attn.residual", hidden, dropout),
    ]
    act = config.activation("activation_function", "relu")
    mlp = [
        *plain_mlp(("fc1", "activation_fn", "fc2"), hidden, config.integer("ffn_dim"), act, bias=has_bias),
        residual("residual", hidden, dropout),
    ]
    first = layer_norm("self_attn_layer_norm", hidden, affine=is_affine)
    second = layer_norm("final_layer_norm", hidden, affine=is_affine)
    modules = (
        (first, *attention_modules, second, *mlp) if is_before else (*attention_modules, first, *mlp, second)
    )
    order = (
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj",
        "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm",
    )  # fmt: skip
    return set_registration(Block("OPTDecoderLayer", modules), *order)


def qwen(config: ConfigReader) -> ModelSpec:
    """Qwen of 2023 has one projection for q, k and v, with a bias.

    `intermediate_size` counts both halves of the gated MLP. It has plain RMSNorm and rotary positions. The
    fused ones of flash-attn's extras, which its code takes where they are installed, are not taken.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    width = config.integer("kv_channels", hidden // heads)
    ffn, has_bias = config.integer("intermediate_size") // 2, not config.boolean("no_bias", True)
    dropout = config.fraction("attn_dropout_prob", 0.0)
    core = [
        linear("attn.c_attn", hidden, 3 * heads * width, bias=True),
        attention("attn.core", heads, heads, width, dropout=dropout, splits_fused_qkv=True),
        linear("attn.c_proj", heads * width, hidden, bias=has_bias),
    ]
    mlp = [
        linear("mlp.w1", hidden, ffn, bias=has_bias),
        linear("mlp.w2", hidden, ffn, bias=has_bias, shares_input=True),
        activation("mlp.act", ffn, "silu", gated=True),
        linear("mlp.c_proj", ffn, hidden, bias=has_bias),
    ]
    norms = rms_norm("ln_1", hidden), rms_norm("ln_2", hidden)
    adds = residual("attn.residual", hidden), residual("mlp.residual", hidden)
    block = attention_mlp_block("QWenBlock", norms, core, mlp, adds)
    order = "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.w1", "mlp.w2", "mlp.c_proj"
    return language_model(
        config,
        hidden,
        [embedding("transformer.wte", config.integer("vocab_size"), hidden)],
        [set_registration(block, *order)] * config.num_blocks("num_hidden_layers"),
        config.integer("max_position_embeddings", 8192),
        final=[rms_norm("transformer.ln_f", hidden)],
    )
