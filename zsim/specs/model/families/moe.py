"""Mixture-of-experts decoders: Mixtral, Qwen 2 and 3 MoE, DeepSeek V3.

The routed experts are one module with two stacked weights, as transformers 5.23 registers them
(`MixtralExperts` and its kin); names, shapes and defaults as in its `modeling_mixtral.py`,
`modeling_qwen2_moe.py`, `modeling_qwen3_moe.py`, `modeling_deepseek_v3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.experts import Experts, Router
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    decoder,
    gated_mlp,
    pre_norm_block,
)
from zsim.specs.model.families.parts import linear, rms_norm
from zsim.specs.model.spec import Attention, Block, ModelSpec, Module, Parameter

_SHARED = tuple(
    f"mlp.{name}.{part}"
    for name in ("shared_expert", "shared_experts")
    for part in ("gate_proj", "up_proj", "down_proj")
)
_GATE_FIRST = ("mlp.gate", "mlp.experts", *_SHARED, "mlp.shared_expert_gate")
_EXPERTS_FIRST = ("mlp.experts", "mlp.gate", *_SHARED)


def mixtral(config: ConfigReader) -> ModelSpec:
    """Every MLP is routed; `intermediate_size` is the width of one expert."""
    shape = Shape.read(config, kv_default=8)
    num_experts, top_k = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    window = config.optional_integer("sliding_window")
    core = attention_modules(shape, window=window)
    mlp = _routed(config, shape.hidden, shape.ffn, num_experts, top_k)
    block = pre_norm_block("MixtralDecoderLayer", shape, core, mlp, registration=_order(_GATE_FIRST))
    return _finish(config, shape, [block] * shape.layers, 4096 * 32)


def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Routed experts and a gated shared expert; some layers dense."""
    shape = Shape.read(config)
    has_bias = config.boolean("qkv_bias", True)
    width = config.integer("moe_intermediate_size", 1408)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    num_experts, top_k = config.integer("num_experts", 60), config.integer("num_experts_per_tok", 4)
    core = attention_modules(shape, qkv_bias=has_bias)
    sparse = [
        *gated_mlp("mlp.shared_expert", shape.hidden, shared, shape.act),
        *_routed(config, shape.hidden, width, num_experts, top_k),
        linear("mlp.shared_expert_gate", shape.hidden, 1, shares_input=True),
    ]
    return _mixed(config, shape, "Qwen2MoeDecoderLayer", core, sparse, _GATE_FIRST)


def qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Routed experts, norms on query and key heads; some layers dense."""
    shape = Shape.read(config, kv_default=4)
    has_bias = config.boolean("attention_bias", False)
    width = config.integer("moe_intermediate_size", 768)
    num_experts, top_k = config.integer("num_experts", 128), config.integer("num_experts_per_tok", 8)
    core = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="each head")
    sparse = _routed(config, shape.hidden, width, num_experts, top_k)
    return _mixed(config, shape, "Qwen3MoeDecoderLayer", core, sparse, _EXPERTS_FIRST)


def deepseek_v3(config: ConfigReader) -> ModelSpec:
    """Latent attention; the first layers dense, the others with routed and shared experts.

    The multi-token-prediction layer of the published checkpoint is not part of transformers' model.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    shape = Shape(
        hidden=hidden,
        ffn=config.integer("intermediate_size"),
        layers=config.num_blocks("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.integer("v_head_dim", 128),
        vocab=config.integer("vocab_size"),
        dropout=config.fraction("attention_dropout", 0.0),
        act=config.string("hidden_act", "silu"),
    )
    width = config.integer("moe_intermediate_size", 2048)
    num_experts, top_k = config.integer("n_routed_experts", 256), config.integer("num_experts_per_tok", 8)
    core = _latent_attention(config, shape)
    shared_width = width * config.integer("n_shared_experts", 1)
    choice = Router(
        0, 0, 0, "sigmoid", config.integer("n_group", 8), config.integer("topk_group", 4),
        in_fp32=True, has_choice_bias=True,
    )  # fmt: skip
    sparse = [
        *_routed(config, hidden, width, num_experts, top_k, choice),
        *gated_mlp("mlp.shared_experts", hidden, shared_width, shape.act),
    ]
    order = _order(_EXPERTS_FIRST, _LATENT)
    kind = "DeepseekV3DecoderLayer"
    dense_block = pre_norm_block(kind, shape, core, registration=order)
    sparse_block = pre_norm_block(kind, shape, core, sparse, registration=order)
    first = min(config.integer("first_k_dense_replace", 3, minimum=0), shape.layers)
    return _finish(config, shape, [dense_block] * first + [sparse_block] * (shape.layers - first), 4096)


_LATENT = tuple(
    f"self_attn.{name}"
    for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj",
        "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip


def _latent_attention(config: ConfigReader, shape: Shape) -> list[Module]:
    """Queries and key/values through low-rank projections; `q_lora_rank` null: queries directly."""
    nope, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    kv_rank, heads, hidden = config.integer("kv_lora_rank", 512), shape.heads, shape.hidden
    has_bias = config.boolean("attention_bias", False)
    queries, values = heads * (nope + rope), shape.head_dim
    is_direct = config.values.get("q_lora_rank", 0) is None
    if is_direct:
        modules = [linear("self_attn.q_proj", hidden, queries)]
    else:
        rank = config.integer("q_lora_rank", 1536)
        modules = [
            linear("self_attn.q_a_proj", hidden, rank, bias=has_bias),
            rms_norm("self_attn.q_a_layernorm", rank),
            linear("self_attn.q_b_proj", rank, queries),
        ]
    core = Attention(heads, heads, nope + rope, values, dropout=shape.dropout)
    return [
        *modules,
        linear("self_attn.kv_a_proj_with_mqa", hidden, kv_rank + rope, bias=has_bias, shares_input=True),
        rms_norm("self_attn.kv_a_layernorm", kv_rank),
        linear("self_attn.kv_b_proj", kv_rank, heads * (nope + values)),
        Module("self_attn.core", core),
        linear("self_attn.o_proj", heads * values, hidden, bias=has_bias),
    ]


_CHOICE = Router(0, 0, 0)  # softmax in fp32 over the scores of a product in the activations' type


def _routed(
    config: ConfigReader, hidden: int, width: int, num_experts: int, top_k: int, choice: Router = _CHOICE
) -> list[Module]:
    """Router, which chooses like `choice`, and stacked experts."""
    if top_k > num_experts:
        raise config.error(
            f"'num_experts_per_tok' is {top_k}; expected at most the number of experts, {num_experts}"
        )
    parameters = (
        Parameter("gate_up_proj", (num_experts, 2 * width, hidden)),
        Parameter("down_proj", (num_experts, hidden, width)),
    )
    work = Experts(num_experts, top_k, hidden, width, config.string("hidden_act", "silu"))
    router = replace(choice, in_features=hidden, num_experts=num_experts, top_k=top_k)
    gate = Module("mlp.gate", router, (Parameter("weight", (num_experts, hidden)),))
    return [gate, Module("mlp.experts", work, parameters)]


def _mixed(
    config: ConfigReader,
    shape: Shape,
    kind: str,
    core: Sequence[Module],
    sparse: Sequence[Module],
    order: Sequence[str],
) -> ModelSpec:
    """The model with a dense MLP in the layers of `mlp_only_layers` and off `decoder_sparse_step`, else
    `sparse`."""
    dense_block = pre_norm_block(kind, shape, core)
    sparse_block = pre_norm_block(kind, shape, core, sparse, registration=_order(order))
    dense_layers = set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", 1)
    blocks = [
        dense_block if index in dense_layers or (index + 1) % step else sparse_block
        for index in range(shape.layers)
    ]
    return _finish(config, shape, blocks, 32768)


def _order(mlp: Sequence[str], attention: Sequence[str] = ()) -> tuple[str, ...]:
    """Order of registration: attention, MLP, norms."""
    first = attention or [name for name in REGISTRATION if name.startswith("self_attn.")]
    dense = [name for name in REGISTRATION if name.startswith("mlp.")]
    norms = [name for name in REGISTRATION if "layernorm" in name]
    return (*first, *dense, *mlp, *norms)


def _finish(config: ConfigReader, shape: Shape, blocks: Sequence[Block], max_positions: int) -> ModelSpec:
    return decoder(config, shape, blocks, max_positions=max_positions)
