"""DeepSeek-V3.2 and GLM-5: the blocks of DeepSeek-V3 with sparse attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_deepseek_v32.py`, `modeling_glm_moe_dsa.py` and
their `configuration_*.py`). `indexer_loss` is zsim's own key: what trains the indexer ("none", "sparse",
"full"), which transformers' code leaves untrained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

from zsim.operations.mixers.sparse_attention import IndexerLoss, SparseAttention
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import layer_norm, linear, replace_op_fields
from zsim.specs.model.families.latent import (
    LATENT,
    count_prediction_modules,
    latent_attention,
    read_shape,
    routed_and_shared,
)
from zsim.specs.model.families.llama import Shape, build_unique_blocks, decoder, pre_norm_block
from zsim.specs.model.families.moe import EXPERTS_FIRST, dense_layers, registration_order
from zsim.specs.model.spec import Block, ModelSpec, Module

_FULL, _SHARED = "full", "shared"
_INDEXER = tuple(f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "k_norm", "weights_proj"))


def deepseek_v32(config: ConfigReader) -> ModelSpec:
    """Every layer has an indexer."""
    config = config.add_defaults(index_n_heads=64, num_attention_heads=128)
    layers = config.num_blocks("num_hidden_layers")
    choice = _choice(config, 8, 4)
    return _model(config, "DeepseekV32DecoderLayer", [_FULL] * layers, choice, max_positions=163_840)


def glm_moe_dsa(config: ConfigReader) -> ModelSpec:
    """GLM-5, whose release 5.2 shares an indexer's choice among layers."""
    config = config.add_defaults(
        index_n_heads=32, num_attention_heads=64, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256
    )
    layers = config.num_blocks("num_hidden_layers")
    kinds = list(config.strings("indexer_types"))
    if not kinds:
        frequency = config.integer("index_topk_freq", 1)
        offset = config.integer("index_skip_topk_offset", 2, minimum=0)
        kinds = [_SHARED if max(index - offset + 1, 0) % frequency else _FULL for index in range(layers)]
    if len(kinds) != layers:
        raise config.error(f"'indexer_types' names {len(kinds)} layers; expected {layers}")
    choice = _choice(config, 1, 1)
    return _model(config, "GlmMoeDsaDecoderLayer", kinds, choice, max_positions=202_752)


def _choice(config: ConfigReader, groups: int, top_groups: int) -> Router:
    groups, top_groups = config.integer("n_group", groups), config.integer("topk_group", top_groups)
    return Router(0, 0, 0, "sigmoid", groups, top_groups, in_fp32=True, has_choice_bias=True)


def _model(
    config: ConfigReader, kind: str, indexers: Sequence[str], choice: Router, *, max_positions: int
) -> ModelSpec:
    shape, width = read_shape(config), config.integer("moe_intermediate_size", 2048)
    experts = config.integer("n_routed_experts", 256), config.integer("num_experts_per_tok", 8)
    sparse = routed_and_shared(config, shape, width, experts, choice)
    dense = dense_layers(config, shape.layers, config.integer("first_k_dense_replace", 3, minimum=0))
    order = registration_order(EXPERTS_FIRST, (*LATENT, *_INDEXER))

    def block(layer: tuple[str, bool]) -> Block:
        core = _attention(config, shape, has_indexer=layer[0] == _FULL)
        return pre_norm_block(kind, shape, core, None if layer[1] else sparse, registration=order)

    layers = [(indexer, index in dense) for index, indexer in enumerate(indexers)]
    model = decoder(config, shape, build_unique_blocks(layers, block), max_positions=max_positions)
    return count_prediction_modules(config, model, block((_FULL, False)))


def _attention(config: ConfigReader, shape: Shape, *, has_indexer: bool) -> list[Module]:
    """Latent attention with the indexer's products before its core."""
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim", 128)
    rank = config.integer("q_lora_rank", 1536)
    work = SparseAttention(
        shape.heads, config.integer("kv_lora_rank", 512), config.integer("qk_rope_head_dim", 64),
        config.integer("index_topk", 2048), heads, width, has_indexer, indexer_loss(config),
    )  # fmt: skip
    indexer = [
        _duplicated("wq_b", rank, heads * width),
        _duplicated("wk", shape.hidden, width),
        _duplicated("weights_proj", shape.hidden, heads),
        replace_op_fields(layer_norm("self_attn.indexer.k_norm", width), is_duplicated=True),
    ]
    modules: list[Module] = []
    for module in latent_attention(config, shape.hidden, shape.heads, shape.dropout):
        if module.role is Role.MIXER:
            modules += indexer if has_indexer else []
            modules.append(Module(module.name, work))
        else:
            modules.append(module)
    return modules


def indexer_loss(config: ConfigReader) -> IndexerLoss:
    """The loss that trains the indexer. Raises InputError for another word."""
    loss = config.string("indexer_loss", "none")
    if loss not in get_args(IndexerLoss):
        raise config.error(f"'indexer_loss' is '{loss}'; expected {', '.join(get_args(IndexerLoss))}")
    return cast(IndexerLoss, loss)


def _duplicated(name: str, in_features: int, out_features: int) -> Module:
    module = linear(f"self_attn.indexer.{name}", in_features, out_features, shares_input=True)
    return replace_op_fields(module, is_duplicated=True, reads_all_tokens=True)
