"""MiniMax: lightning attention among layers of attention (Text-01, M1), attention over blocks of keys
(M3).

Names, shapes and defaults as in transformers 5.24 (`modeling_minimax.py`, `modeling_minimax_m2.py`,
`modeling_minimax_m3_vl.py` and their `configuration_*.py`). Text-01's residuals' fixed factors are left out.
The files published with Text-01 and M1 say
`attn_type_list` (0: lightning) and leave out what they share with Mixtral.
"""

from __future__ import annotations

from zsim.operations.mixers.lightning import Lightning
from zsim.operations.mixers.sparse_attention import BlockSparseAttention
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import activation, fused_mlp, linear, replace_op_fields, rms_norm
from zsim.specs.model.families.llama import (
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    pre_norm_block,
)
from zsim.specs.model.families.mixers import FULL, LINEAR, layer_kinds
from zsim.specs.model.families.moe import GATE_FIRST, dense_layers, registration_order, routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module

_LIGHTNING = tuple(f"self_attn.{name}" for name in ("norm", "qkv_proj", "out_proj", "output_gate"))


def minimax(config: ConfigReader) -> ModelSpec:
    """Lightning attention with a gated output, and attention in the layers that the file names."""
    shape = Shape.read(config, kv_default=8)
    default = [FULL if (index + 1) % 2 else LINEAR for index in range(shape.layers)]
    listed = config.integers("attn_type_list")
    if listed:
        default = [FULL if number else LINEAR for number in listed]
    kinds = layer_kinds(config, shape.layers, default, LINEAR, FULL)
    rotary = config.optional_integer("rotary_dim")
    attention = [
        replace_op_fields(module, rotary_width=rotary) if module.role is Role.MIXER and rotary else module
        for module in attention_modules(shape)
    ]
    experts = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    mlp = routed_mlp(config, shape.hidden, shape.ffn, *experts)

    def block(kind: str) -> Block:
        is_lightning = kind == LINEAR
        core = _lightning(config, shape) if is_lightning else attention
        order = registration_order(GATE_FIRST, _LIGHTNING if is_lightning else ())
        order = (*order[: len(_LIGHTNING)], *_NORMS, *order[len(_LIGHTNING) :])
        return pre_norm_block("MiniMaxDecoderLayer", shape, core, mlp, scales=True, registration=order)

    return decoder(config, shape, build_unique_blocks(kinds, block), max_positions=4096 * 32)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _lightning(config: ConfigReader, shape: Shape) -> list[Module]:
    root, width = "self_attn", shape.heads * shape.head_dim
    work = Lightning(shape.heads, shape.head_dim, config.integer("block_size", 256))
    return [
        linear(f"{root}.qkv_proj", shape.hidden, 3 * width),
        activation(f"{root}.act_fn", 3 * width, shape.act),
        linear(f"{root}.output_gate", shape.hidden, width, shares_input=True),
        Module(f"{root}.core", work),
        rms_norm(f"{root}.norm", width),
        activation(f"{root}.gate", width, "sigmoid", gated=True),
        linear(f"{root}.out_proj", width, shape.hidden),
    ]


def minimax_m3(config: ConfigReader) -> ModelSpec:
    """M3: a few dense layers of attention, then attention over blocks of keys, and experts with a shared one.
    The published file says both by lists of 0 and 1 (`sparse_attention_freq`, `moe_layer_freq`).
    """
    config = config.add_defaults(
        vocab_size=200_064, hidden_size=6144, intermediate_size=3072, num_hidden_layers=60,
        num_attention_heads=64,
    )  # fmt: skip
    shape, sparse = Shape.read(config, kv_default=4, head_dim=128), config.nested("sparse_attention_config")
    listed = sparse.integers("sparse_attention_freq") or [0] * shape.layers
    kinds = layer_kinds(
        config, shape.layers, [_SPARSE if number else FULL for number in listed], _SPARSE, FULL
    )
    routed = config.integers("moe_layer_freq") or [1] * shape.layers
    dense = dense_layers(config, shape.layers, 0) or {index for index, flag in enumerate(routed) if not flag}
    layers = [(kind == _SPARSE, index in dense) for index, kind in enumerate(kinds)]
    work = BlockSparseAttention(
        shape.heads, shape.head_dim, 0,
        config.integer("index_topk_blocks", sparse.integer("sparse_topk_blocks", 16))
        * (block_size := config.integer("index_block_size", sparse.integer("sparse_block_size", 128))),
        config.integer("index_n_heads", sparse.integer("sparse_num_index_heads", 4)),
        config.integer("index_head_dim", sparse.integer("sparse_index_dim", 128)),
        num_kv_heads=shape.kv_heads, block=block_size,
    )  # fmt: skip
    choice = Router(0, 0, 0, "sigmoid", has_choice_bias=True)
    experts = config.integer("num_local_experts", 128), config.integer("num_experts_per_tok", 4)

    def mlp(root: str, width: int) -> list[Module]:
        names = f"{root}.gate_up_proj", f"{root}.act_fn", f"{root}.down_proj"
        return fused_mlp(names, shape.hidden, width, "swiglu_oai")

    def block(layer: tuple[bool, bool]) -> Block:
        has_indexer, is_dense = layer
        branch = mlp("mlp", config.integer("dense_intermediate_size", 12_288))
        if not is_dense:
            branch = [
                *routed_mlp(config, shape.hidden, shape.ffn, *experts, choice, act="swiglu_oai"),
                *mlp("mlp.shared_experts", config.integer("shared_intermediate_size", 3072)),
            ]
        order = [module.name for module in branch if module.parameters]
        return pre_norm_block(
            "MiniMaxM3VLDecoderLayer", shape, _block_attention(config, shape, work if has_indexer else None),
            branch, norm="gemma_rms", registration=(*_M3_ATTENTION, *order, *_NORMS),
        )  # fmt: skip

    return decoder(config, shape, build_unique_blocks(layers, block), max_positions=524_288, norm="gemma_rms")


_SPARSE = "minimax_m3_sparse"
_M3_ATTENTION = (
    *(f"self_attn.{name}_proj" for name in "qkvo"), "self_attn.q_norm", "self_attn.k_norm",
    *(f"self_attn.indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")),
)  # fmt: skip


def _block_attention(config: ConfigReader, shape: Shape, work: BlockSparseAttention | None) -> list[Module]:
    """Attention with norms of heads. With `work` an indexer's products and norms come before its core."""
    modules: list[Module] = []
    for module in attention_modules(shape, qk_norm="each head", norm="gemma_rms"):
        if module.role is not Role.MIXER:
            modules.append(module)
        elif work is None:
            width = config.integer("rotary_dim", 64)
            modules.append(replace_op_fields(module, rotary_width=width))
        else:
            for name, heads in (("q", work.index_heads), ("k", 1)):
                root, width = "self_attn.indexer", work.index_dim
                modules += [
                    linear(f"{root}.{name}_proj", shape.hidden, heads * width, shares_input=True),
                    rms_norm(f"{root}.{name}_norm", width, rows_per_token=heads, kind="gemma_rms"),
                ]
            modules.append(Module(module.name, work))
    return modules
