"""Multi-head latent attention, and the modules for multi-token prediction that come with it.

Names, shapes and defaults are as in transformers 5.23 (`modeling_deepseek_v3.py`). The module for multi-token
prediction of a published checkpoint is not a part of transformers' model. Its parameters are counted
separately.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import linear, rms_norm
from zsim.specs.model.families.llama import Shape, gated_mlp
from zsim.specs.model.families.moe import routed_mlp
from zsim.specs.model.spec import Attention, Block, ModelSpec, Module

LATENT = tuple(
    f"self_attn.{name}"
    for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj",
        "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip


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


def read_shape(config: ConfigReader) -> Shape:
    """The dimensions of a file whose heads all have keys of their own, with values of `v_head_dim`."""
    heads, width = config.integer("num_attention_heads"), config.integer("v_head_dim", 128)
    return Shape.read(config.override(num_key_value_heads=heads, head_dim=width))


def routed_and_shared(
    config: ConfigReader, shape: Shape, width: int, experts: tuple[int, int], choice: Router
) -> list[Module]:
    """So many routed experts, so many for a token, and the shared ones beside them."""
    shared = width * config.integer("n_shared_experts", 1)
    routed = routed_mlp(config, shape.hidden, width, *experts, choice)
    return [*routed, *gated_mlp("mlp.shared_experts", shape.hidden, shared, shape.act)]


def latent_attention(
    config: ConfigReader, hidden: int, heads: int, dropout: float, *, has_norms: bool = True
) -> list[Module]:
    """Queries and key/values through low-rank projections, or queries directly where `q_lora_rank` is null or
    0.

    Without `has_norms` there are no norms between the projections.
    """
    nope, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    kv_rank, values = config.integer("kv_lora_rank", 512), config.integer("v_head_dim", 128)
    has_bias = config.boolean("attention_bias", False)
    queries = heads * (nope + rope)
    if config.values.get("q_lora_rank", 1536) in (None, 0):
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
