"""DeepSeek V2 and V3, Kimi K2: multi-head latent attention, leading dense layers, shared experts.

Names, shapes and defaults are as in transformers 5.23 (`modeling_deepseek_v2.py`, `modeling_deepseek_v3.py`
and their `configuration_*.py`), which Kimi K2's own code follows. The module for multi-token prediction of a
published checkpoint is not a part of transformers' model. Its parameters are counted separately.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import linear, rms_norm
from zsim.specs.model.families.llama import Shape, decoder, gated_mlp, pre_norm_block
from zsim.specs.model.families.moe import EXPERTS_FIRST, registration_order, routed_mlp
from zsim.specs.model.spec import Attention, Block, ModelSpec, Module

LATENT = tuple(
    f"self_attn.{name}"
    for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj",
        "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip


def deepseek_v2(config: ConfigReader) -> ModelSpec:
    """V2 and V2-Lite: scores by a softmax, of groups of experts where the file says so.

    Without `q_lora_rank` queries come directly.
    """
    experts, width = config.integer("n_routed_experts", 64), config.integer("moe_intermediate_size", 1407)
    choice = Router(
        0, 0, 0, "softmax",
        config.optional_integer("n_group") or 1, config.optional_integer("topk_group") or 1,
        in_fp32=True, normalizes=config.boolean("norm_topk_prob", False),
    )  # fmt: skip
    top_k = config.optional_integer("num_experts_per_tok")
    if top_k is None:
        raise config.error("no 'num_experts_per_tok', which a deepseek_v2 model needs")
    shared = config.integer("n_shared_experts", 2)
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    kind = "DeepseekV2DecoderLayer"
    return _model(config, kind, choice, experts, top_k, width, shared, first, max_positions=2048)


def deepseek_v3(config: ConfigReader) -> ModelSpec:
    """Scores by a sigmoid, groups of experts, a bias that is added for the choice only."""
    experts, width = config.integer("n_routed_experts", 256), config.integer("moe_intermediate_size", 2048)
    choice = Router(
        0, 0, 0, "sigmoid", config.integer("n_group", 8), config.integer("topk_group", 4),
        in_fp32=True, has_choice_bias=True,
    )  # fmt: skip
    top_k, shared = config.integer("num_experts_per_tok", 8), config.integer("n_shared_experts", 1)
    first = config.integer("first_k_dense_replace", 3, minimum=0)
    kind = "DeepseekV3DecoderLayer"
    return _model(config, kind, choice, experts, top_k, width, shared, first, max_positions=4096)


def _model(
    config: ConfigReader,
    kind: str,
    choice: Router,
    experts: int,
    top_k: int,
    width: int,
    shared: int,
    first: int,
    *,
    max_positions: int,
) -> ModelSpec:
    """The model with `first` dense layers, and `shared` experts of `width` besides the routed ones."""
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
    core = latent_attention(config, hidden, heads, shape.dropout)
    sparse = [
        *routed_mlp(config, hidden, width, experts, top_k, choice),
        *gated_mlp("mlp.shared_experts", hidden, width * shared, shape.act),
    ]
    order = registration_order(EXPERTS_FIRST, LATENT)
    dense_block = pre_norm_block(kind, shape, core, registration=order)
    sparse_block = pre_norm_block(kind, shape, core, sparse, registration=order)
    first = min(first, shape.layers)
    blocks = [dense_block] * first + [sparse_block] * (shape.layers - first)
    model = decoder(config, shape, blocks, max_positions=max_positions)
    return count_prediction_modules(config, model, sparse_block)


def count_prediction_modules(
    config: ConfigReader, model: ModelSpec, block: Block, key: str = "num_nextn_predict_layers"
) -> ModelSpec:
    """The model with its modules for multi-token prediction counted.

    Each is a block like `block`, a product of two hidden states to one, and three norms. Embedding and head
    are the model's own.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2, and `enorm`,
    `hnorm`, `eh_proj`, `shared_head.norm` of the checkpoint's layer after the last.
    """
    modules = config.integer(key, 0, minimum=0)
    hidden = model.hidden_size
    return replace(model, mtp_parameters=modules * (block.numel + 2 * hidden * hidden + 3 * hidden))


def latent_attention(
    config: ConfigReader, hidden: int, heads: int, dropout: float, *, has_norms: bool = True
) -> list[Module]:
    """Queries and key/values through low-rank projections, or queries directly where `q_lora_rank` is null.

    Without `has_norms` there are no norms between the projections.
    """
    nope, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    kv_rank, values = config.integer("kv_lora_rank", 512), config.integer("v_head_dim", 128)
    has_bias = config.boolean("attention_bias", False)
    queries = heads * (nope + rope)
    if config.values.get("q_lora_rank", 0) is None:
        modules = [linear("self_attn.q_proj", hidden, queries)]
    else:
        rank = config.integer("q_lora_rank", 1536)
        modules = [
            linear("self_attn.q_a_proj", hidden, rank, bias=has_bias),
            *([rms_norm("self_attn.q_a_layernorm", rank)] if has_norms else []),
            linear("self_attn.q_b_proj", rank, queries),
        ]
    core = Attention(heads, heads, nope + rope, values, dropout=dropout, rotary_width=rope, is_latent=True)
    return [
        *modules,
        linear("self_attn.kv_a_proj_with_mqa", hidden, kv_rank + rope, bias=has_bias, shares_input=True),
        *([rms_norm("self_attn.kv_a_layernorm", kv_rank)] if has_norms else []),
        linear("self_attn.kv_b_proj", kv_rank, heads * (nope + values)),
        Module("self_attn.core", core),
        linear("self_attn.o_proj", heads * values, hidden, bias=has_bias),
    ]
