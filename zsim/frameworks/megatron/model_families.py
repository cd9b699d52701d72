"""Megatron-Core's GPT as its flags describe it: any of its norms, positions, activations and biases.

Shapes and names are as in Megatron-Core 0.16.1 (`core/models/gpt/gpt_model.py`,
`core/transformer/attention.py`, `mlp.py`, `training/arguments.py`). Projections of one input are separate, as
in every family here. The plan joins those that Megatron runs as one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    attention_mlp_block,
    embedding,
    language_model,
    layer_norm,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
)
from zsim.specs.model.families.latent import latent_attention
from zsim.specs.model.huggingface import ModelFamily
from zsim.specs.model.spec import Attention, Block, ModelSpec, Module, Norm, Parameter

_NORMS = ("LayerNorm", "RMSNorm")
_POSITIONS = ("learned_absolute", "rope", "none", "alibi")


def megatron(config: ConfigReader) -> ModelSpec:
    """A model of Megatron-Core's GPT.

    Besides the sizes it reads `normalization`, `position_embedding_type`, `activation`, `gated`, `bias`,
    `qkv_bias`, `qk_layernorm`, `embedding_layernorm`, and `window_layer_pattern` (1 for each layer that has
    `sliding_window`). ALiBi's slopes have no weights, and the product of scores adds them.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    config.check_kv_heads(heads, kv_heads)
    head_dim = config.optional_integer("head_dim") or config.head_dim(hidden, heads)
    if config.optional_integer("vocab_size") is None:
        raise config.error(
            "no 'vocab_size': Megatron takes it from the tokenizer's file; give it as --vocab-size, or "
            "--set model.vocab_size=128256"
        )
    norm = layer_norm if _choose_option(config, "normalization", _NORMS) == "LayerNorm" else rms_norm
    dropout, score_dropout = config.fraction("hidden_dropout", 0.1), config.fraction("attention_dropout", 0.1)
    positions = _choose_option(config, "position_embedding_type", _POSITIONS)
    has_bias, qkv_bias = config.boolean("bias", True), config.boolean("qkv_bias", False)
    if config.boolean("multi_latent_attention", False):
        has_norms = config.boolean("qk_layernorm", False)
        attention_modules = latent_attention(config, hidden, heads, score_dropout, has_norms=has_norms)
    else:
        attention_modules = _projections(config, hidden, heads, kv_heads, head_dim, bias=has_bias or qkv_bias)
        core = attention(
            "self_attention.core_attention", heads, kv_heads, head_dim, rotary=positions == "rope",
            dropout=score_dropout, window=config.optional_integer("sliding_window"),
        )  # fmt: skip
        attention_modules += [
            core,
            linear("self_attention.linear_proj", heads * head_dim, hidden, bias=has_bias),
        ]
    norms = norm("input_layernorm", hidden), norm("pre_mlp_layernorm", hidden)
    adds = residual("self_attn_bda", hidden, dropout), residual("mlp_bda", hidden, dropout)
    inner = config.integer("intermediate_size")
    dense = attention_mlp_block(
        "TransformerLayer", norms, attention_modules, _mlp(config, "mlp", hidden, inner, bias=has_bias), adds
    )
    layers = config.num_blocks("num_hidden_layers")
    blocks = [dense] * layers
    if config.optional_integer("num_moe_experts") is not None:
        routed = _experts(config, hidden, inner, bias=has_bias)
        sparse = attention_mlp_block("TransformerLayer", norms, attention_modules, routed, adds)
        pattern = config.integers("moe_layer_pattern") or (1,) * layers
        if len(pattern) != layers:
            raise config.error(f"'moe_layer_pattern' has {len(pattern)} layers; expected {layers}")
        blocks = [sparse if has_experts else dense for has_experts in pattern]
    if windows := config.integers("window_layer_pattern"):
        if len(windows) != layers:
            raise config.error(f"'window_layer_pattern' has {len(windows)} layers; expected {layers}")
        unlimited = {block: _unlimited_block(block) for block in dict.fromkeys(blocks)}
        blocks = [
            block if is_limited else unlimited[block]
            for block, is_limited in zip(blocks, windows, strict=True)
        ]
    longest = config.integer("max_position_embeddings")
    before = [embedding("embedding.word_embeddings", config.integer("vocab_size"), hidden)]
    if config.boolean("embedding_layernorm", False):
        before.append(norm("embedding.word_embeddings.norm", hidden))
    if positions == "learned_absolute":
        before.append(embedding("embedding.position_embeddings", longest, hidden))
        before.append(residual("embedding.embedding_dropout", hidden, dropout))
    elif dropout:
        before.append(residual("embedding.embedding_dropout", hidden, dropout))
    return language_model(
        config,
        hidden,
        before,
        blocks,
        longest,
        root="decoder.layers",
        final=[norm("decoder.final_layernorm", hidden)],
        is_tied=True,
    )


def _unlimited_block(block: Block) -> Block:
    """The block with attention to all positions (core/transformer/utils.py `is_layer_window_attention`)."""
    modules = [
        replace_op_fields(module, window=None) if isinstance(module.op_spec, Attention) else module
        for module in block.modules
    ]
    return replace(block, modules=tuple(modules))


def _choose_option(config: ConfigReader, key: str, options: tuple[str, ...]) -> str:
    value = config.string(key, options[0])
    if value not in options:
        raise config.error(f"'{key}' is '{value}'; expected {', '.join(options)}")
    return value


def _projections(
    config: ConfigReader, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool
) -> list[Module]:
    """Queries, keys and values, each with its norm if the heads have one."""
    is_layer, modules = _choose_option(config, "normalization", _NORMS) == "LayerNorm", []
    has_norms = config.boolean("qk_layernorm", False)
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        is_query = name == "q"
        modules.append(
            linear(
                f"self_attention.linear_{name}",
                hidden,
                count * head_dim,
                bias=bias,
                shares_input=not is_query,
            )
        )
        if has_norms and name != "v":
            names = ("weight", "bias") if is_layer else ("weight",)
            parameters = tuple(Parameter(parameter_name, (head_dim,)) for parameter_name in names)
            op_spec = Norm(count * head_dim, "layer" if is_layer else "rms")
            modules.append(Module(f"self_attention.{name}_layernorm", op_spec, parameters))
    return modules


def _mlp(config: ConfigReader, name: str, hidden: int, inner: int, *, bias: bool) -> list[Module]:
    """One product before the activation, or gate and up where it is gated."""
    is_gated = config.boolean("gated", False)
    act = config.activation("activation", "silu" if is_gated else "gelu")
    products = [linear(f"{name}.linear_gate" if is_gated else f"{name}.linear_fc1", hidden, inner, bias=bias)]
    if is_gated:
        products.append(linear(f"{name}.linear_up", hidden, inner, bias=bias, shares_input=True))
    return [
        *products,
        activation(f"{name}.activation_func", inner, act, gated=is_gated),
        linear(f"{name}.linear_fc2", inner, hidden, bias=bias),
    ]


def _experts(config: ConfigReader, hidden: int, ffn: int, *, bias: bool) -> list[Module]:
    """Router, routed experts, and shared ones where the model has them (core/transformer/moe/)."""
    count, top_k = config.integer("num_moe_experts"), config.integer("moe_router_topk", 2)
    width, is_gated = config.integer("moe_ffn_hidden_size", ffn), config.boolean("gated", False)
    if top_k > count:
        raise config.error(f"'moe_router_topk' is {top_k}; expected at most the number of experts, {count}")
    has_sigmoid = _choose_option(config, "moe_router_score_function", ("softmax", "sigmoid")) == "sigmoid"
    router = Router(
        hidden, count, top_k, "sigmoid" if has_sigmoid else "softmax",
        config.integer("moe_router_num_groups", 1), config.integer("moe_router_group_topk", 1),
        has_choice_bias=config.boolean("moe_router_enable_expert_bias", False),
    )  # fmt: skip
    act = config.activation("activation", "silu" if is_gated else "gelu")
    gate_up_width = width * (2 if is_gated else 1)
    weights = [
        Parameter("linear_fc1", (count, gate_up_width, hidden)),
        Parameter("down", (count, hidden, width)),
    ]
    if bias:
        weights += [
            Parameter("linear_fc1_bias", (count, gate_up_width)),
            Parameter("down_bias", (count, hidden)),
        ]
    op_spec = Experts(count, top_k, hidden, width, act, is_gated)
    modules = [
        Module("mlp.router", router, (Parameter("weight", (count, hidden)),)),
        Module("mlp.experts", op_spec, tuple(weights)),
    ]
    shared = config.optional_integer("moe_shared_expert_intermediate_size")
    if shared is None:
        return modules
    modules += _mlp(config, "mlp.shared_experts", hidden, shared, bias=bias)
    if config.boolean("moe_shared_expert_gate", False):
        modules.append(linear("mlp.shared_experts.gate", hidden, 1, shares_input=True))
    return modules


FAMILIES: Mapping[str, ModelFamily] = {"megatron": ModelFamily(megatron, listed_before="nemotron")}
