"""Falcon, MPT, BLOOM and OPT.

Modules stand in the order they run; names, shapes and defaults as in transformers 5.23
(`modeling_falcon.py`, `modeling_mpt.py`, `modeling_bloom.py`, `modeling_opt.py` and the `configuration_*.py`
beside them).
"""

from __future__ import annotations

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.parts import (
    Head,
    activation,
    attention,
    embedding,
    layer_norm,
    linear,
    register,
    residual,
)
from zsim.specs.model.spec import Block, ModelSpec


def falcon(config: ConfigReader) -> ModelSpec:
    """Few key/value heads; attention and MLP side by side, on one norm (7B) or two (40B)."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    is_new = config.boolean("new_decoder_architecture", False)
    is_multi_query = config.boolean("multi_query", True)
    kv_heads = config.integer("num_kv_heads", heads) if is_new else (1 if is_multi_query else heads)
    config.check_kv_heads(heads, kv_heads)
    is_parallel = is_new or config.boolean("parallel_attn", True)
    num_norms = config.integer("num_ln_in_parallel_attn", 2) if is_new else 1
    has_bias = config.boolean("bias", False)
    inner = config.integer("ffn_hidden_size", 4 * hidden)
    dropout = config.fraction("hidden_dropout", 0.0)
    attention_dropout = config.fraction("attention_dropout", 0.0)
    is_rotary = not config.boolean("alibi", False)
    attend = [
        linear("self_attention.query_key_value", hidden, (heads + 2 * kv_heads) * head_dim, bias=has_bias),
        attention(
            "self_attention.core",
            heads,
            kv_heads,
            head_dim,
            rotary=is_rotary,
            dropout=attention_dropout,
            upcasts_softmax=False,
            splits_fused_qkv=True,
        ),
        linear("self_attention.dense", hidden, hidden, bias=has_bias),
    ]
    norms = [layer_norm("input_layernorm", hidden)]
    if not is_parallel:
        # The attention's output is dropped out at the attention's own rate before the add.
        attend.append(residual("attention_residual", hidden, attention_dropout))
        attend.append(layer_norm("post_attention_layernorm", hidden))
    elif num_norms == 2:
        norms = [layer_norm("ln_attn", hidden), layer_norm("ln_mlp", hidden, shares_input=True)]
    reads_the_same_norm = is_parallel and num_norms == 1
    mlp = [
        linear("mlp.dense_h_to_4h", hidden, inner, bias=has_bias, shares_input=reads_the_same_norm),
        activation("mlp.act", inner, config.string("activation", "gelu")),
        linear("mlp.dense_4h_to_h", inner, hidden, bias=has_bias),
    ]
    modules = [*norms, *attend, *mlp]
    if is_parallel:
        modules.append(residual("attention_residual", hidden))
    modules.append(residual("residual", hidden, dropout))
    order = (
        "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "ln_attn", "ln_mlp", "post_attention_layernorm", "input_layernorm",
    )  # fmt: skip
    vocab = config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", True)
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=config.integer("max_position_embeddings", 2048),
        before=(embedding("transformer.word_embeddings", vocab, hidden),),
        blocks=(register(Block("FalconDecoderLayer", tuple(modules)), *order),)
        * config.num_blocks("num_hidden_layers"),
        after=Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )


def mpt(config: ConfigReader) -> ModelSpec:
    """ALiBi, no biases anywhere; `expansion_ratio` and `kv_n_heads` as llm-foundry reads them."""
    hidden, heads = config.integer("d_model"), config.integer("n_heads")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("expansion_ratio", 4) * hidden
    details = config.nested("attn_config")
    kv_heads = details.integer("kv_n_heads", heads)
    config.check_kv_heads(heads, kv_heads)
    if not config.boolean("no_bias", True):
        raise config.error("'no_bias' is false; expected true, because transformers' MPT has no biases")
    dropout = details.fraction("attn_pdrop", 0.0)
    block = Block(
        "MptBlock",
        (
            layer_norm("norm_1", hidden, bias=False),
            linear("attn.Wqkv", hidden, (heads + 2 * kv_heads) * head_dim),
            attention("attn.core", heads, kv_heads, head_dim, rotary=False, dropout=dropout),
            linear("attn.out_proj", hidden, hidden),
            residual("resid_attn_dropout", hidden, dropout),
            layer_norm("norm_2", hidden, bias=False),
            linear("ffn.up_proj", hidden, inner),
            activation("ffn.act", inner, "gelu"),
            linear("ffn.down_proj", inner, hidden),
            residual("ffn.dropout", hidden, dropout),
        ),
    )
    vocab = config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", True)
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=config.integer("max_seq_len", 2048),
        before=(embedding("transformer.wte", vocab, hidden),),
        blocks=(block,) * config.num_blocks("n_layers"),
        after=Head(layer_norm("transformer.norm_f", hidden, bias=False), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.blocks",
        is_tied=is_tied,
        source=config.where,
    )


def bloom(config: ConfigReader) -> ModelSpec:
    """ALiBi, a norm right after the embedding, biases everywhere."""
    hidden, heads = config.integer("hidden_size"), config.integer("n_head")
    head_dim = config.head_dim(hidden, heads)
    dropout = config.fraction("hidden_dropout", 0.0)
    attention_dropout = config.fraction("attention_dropout", 0.0)
    block = Block(
        "BloomBlock",
        (
            layer_norm("input_layernorm", hidden),
            linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True),
            attention("self_attention.core", heads, heads, head_dim, rotary=False, dropout=attention_dropout),
            linear("self_attention.dense", hidden, hidden, bias=True),
            residual("self_attention.residual", hidden, dropout),
            layer_norm("post_attention_layernorm", hidden),
            linear("mlp.dense_h_to_4h", hidden, 4 * hidden, bias=True),
            activation("mlp.gelu_impl", 4 * hidden, "gelu_bloom"),
            linear("mlp.dense_4h_to_h", 4 * hidden, hidden, bias=True),
            residual("mlp.residual", hidden, dropout),
        ),
    )
    vocab = config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", True)
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=None,
        before=(
            embedding("transformer.word_embeddings", vocab, hidden),
            layer_norm("transformer.word_embeddings_layernorm", hidden),
        ),
        blocks=(block,) * config.num_blocks("n_layer"),
        after=Head(layer_norm("transformer.ln_f", hidden), hidden, vocab, is_tied).modules(),
        block_prefix="transformer.h",
        is_tied=is_tied,
        source=config.where,
    )


def opt(config: ConfigReader) -> ModelSpec:
    """Learned positions with two spare rows; `word_embed_proj_dim` may be narrower than the model (350M)."""
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    width = config.integer("word_embed_proj_dim", hidden)
    positions = config.integer("max_position_embeddings", 2048)
    is_before = config.boolean("do_layer_norm_before", True)
    has_final_norm = is_before and not config.boolean("_remove_final_layer_norm", False)
    is_affine = config.boolean("layer_norm_elementwise_affine", True)
    root = "model.decoder"
    before = [
        embedding(f"{root}.embed_tokens", vocab, width),
        embedding(f"{root}.embed_positions", positions + 2, hidden),
    ]
    if width != hidden:
        before.append(linear(f"{root}.project_in", width, hidden))
    before.append(residual(f"{root}.add_positions", hidden))
    is_tied = config.boolean("tie_word_embeddings", True)
    after = list(Head(None, width, vocab, is_tied).modules())
    if width != hidden:
        after.insert(0, linear(f"{root}.project_out", hidden, width))
    if has_final_norm:
        after.insert(0, layer_norm(f"{root}.final_layer_norm", hidden, affine=is_affine))
    present = {module.name for module in (*before, *after) if module.parameters}
    order = ("embed_tokens", "embed_positions", "project_out", "project_in", "final_layer_norm")
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=positions,
        before=tuple(before),
        blocks=(_opt_block(config, hidden, is_before=is_before, is_affine=is_affine),)
        * config.num_blocks("num_hidden_layers"),
        after=tuple(after),
        block_prefix=f"{root}.layers",
        is_tied=is_tied,
        source=config.where,
        registered_before_blocks=tuple(f"{root}.{name}" for name in order if f"{root}.{name}" in present),
    )


def _opt_block(config: ConfigReader, hidden: int, *, is_before: bool, is_affine: bool) -> Block:
    """Norms before attention and MLP, or after them (350M)."""
    heads = config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    inner = config.integer("ffn_dim")
    has_bias = config.boolean("enable_bias", True)
    dropout = config.fraction("dropout", 0.1)
    attend = [
        linear("self_attn.q_proj", hidden, hidden, bias=has_bias),
        linear("self_attn.k_proj", hidden, hidden, bias=has_bias, shares_input=True),
        linear("self_attn.v_proj", hidden, hidden, bias=has_bias, shares_input=True),
        attention(
            "self_attn.core",
            heads,
            heads,
            head_dim,
            rotary=False,
            dropout=config.fraction("attention_dropout", 0.0),
        ),
        linear("self_attn.out_proj", hidden, hidden, bias=has_bias),
        residual("self_attn.residual", hidden, dropout),
    ]
    mlp = [
        linear("fc1", hidden, inner, bias=has_bias),
        activation("activation_fn", inner, config.string("activation_function", "relu")),
        linear("fc2", inner, hidden, bias=has_bias),
        residual("residual", hidden, dropout),
    ]
    first = layer_norm("self_attn_layer_norm", hidden, affine=is_affine)
    second = layer_norm("final_layer_norm", hidden, affine=is_affine)
    modules = (first, *attend, second, *mlp) if is_before else (*attend, first, *mlp, second)
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    order = (
        *(f"self_attn.{name}" for name in names),
        "self_attn_layer_norm",
        "fc1",
        "fc2",
        "final_layer_norm",
    )
    return register(Block("OPTDecoderLayer", modules), *order)
