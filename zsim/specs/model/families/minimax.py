"""MiniMax: lightning attention among layers of attention (Text-01, M1), attention alone (M2).

Names, shapes and defaults as in transformers 5.24 (`modeling_minimax.py`, `modeling_minimax_m2.py` and their
`configuration_*.py`). Its residuals' fixed factors are left out. The files published with Text-01 and M1 say
`attn_type_list` (0: lightning) and leave out what they share with Mixtral.
"""

from __future__ import annotations

from zsim.operations.mixers.lightning import Lightning
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import activation, linear, replace_op_fields, rms_norm
from zsim.specs.model.families.llama import (
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    pre_norm_block,
)
from zsim.specs.model.families.mixers import FULL, LINEAR, layer_kinds
from zsim.specs.model.families.moe import GATE_FIRST, registration_order, routed_mlp
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


def minimax_m2(config: ConfigReader) -> ModelSpec:
    """Attention in every layer, with norms over all heads of queries and of keys, and many small experts."""
    config = config.add_defaults(head_dim=128)
    shape = Shape.read(config, kv_default=8)
    rotary = config.optional_integer("rotary_dim")
    core = [
        replace_op_fields(module, rotary_width=rotary or 64) if module.role is Role.MIXER else module
        for module in attention_modules(shape, qk_norm="all heads")
    ]
    choice = Router(0, 0, 0, "sigmoid", in_fp32=True, has_choice_bias=True)
    experts = config.integer("num_local_experts", 256), config.integer("num_experts_per_tok", 8)
    mlp = routed_mlp(config, shape.hidden, shape.ffn, *experts, choice)
    order = registration_order(GATE_FIRST)
    block = pre_norm_block("MiniMaxM2DecoderLayer", shape, core, mlp, registration=order)
    return decoder(config, shape, [block] * shape.layers, max_positions=196_608)
