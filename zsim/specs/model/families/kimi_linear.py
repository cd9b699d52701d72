"""Kimi-Linear and Ling 3.0: Kimi delta attention among layers of multi-head latent attention.

Names, shapes and defaults as in transformers 5.24 (`modeling_kimi_linear.py`, `modeling_bailing_hybrid.py`
and their `configuration_*.py`). Kimi's checkpoints number layers from one in `linear_attn_config`. Its latent
attention has no positions, Ling's has, and a gate of a number per head.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import NotSimulatedError
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import activation, linear, replace_op_fields
from zsim.specs.model.families.latent import LATENT, latent_attention, read_shape, routed_and_shared
from zsim.specs.model.families.llama import Shape, build_unique_blocks, decoder, pre_norm_block
from zsim.specs.model.families.mixers import (
    FULL,
    LINEAR,
    KimiShape,
    kimi_layer,
    kimi_registration,
    layer_kinds,
)
from zsim.specs.model.families.moe import EXPERTS_FIRST, registration_order
from zsim.specs.model.spec import Block, ModelSpec, Module

_DENSE, _SPARSE = "dense", "sparse"
_OF_KIMI_K3 = ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate")


def kimi_linear(config: ConfigReader) -> ModelSpec:
    """Three layers of Kimi delta attention to one of latent attention, a dense MLP in the first."""
    config = config.add_defaults(
        vocab_size=163_840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27,
        num_attention_heads=32,
    )  # fmt: skip
    for key in _OF_KIMI_K3:
        if config.values.get(key):
            raise NotSimulatedError(f"{config.where}: '{key}', a key of Kimi K3, is not simulated")
    shape = read_shape(config)
    nested = config.nested("linear_attn_config")
    default = [FULL if index and not index % 4 else LINEAR for index in range(shape.layers)]
    listed = set(nested.integers("full_attn_layers"))
    if listed:
        default = [FULL if index + 1 in listed else LINEAR for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, LINEAR, FULL)
    kimi = KimiShape(
        nested.integer("num_heads", config.integer("linear_num_heads", 32)),
        nested.integer("head_dim", config.integer("linear_head_dim", 128)),
        nested.integer("short_conv_kernel_size", config.integer("linear_conv_kernel_dim", 4)),
    )
    latent = latent_attention(config.add_defaults(q_lora_rank=None), shape.hidden, shape.heads, shape.dropout)
    latent = [
        replace_op_fields(module, rotary=False, rotary_width=None) if module.role is Role.MIXER else module
        for module in latent
    ]
    choice = Router(
        0, 0, 0, "sigmoid", config.integer("num_expert_group", 1), config.integer("topk_group", 1),
        in_fp32=True, has_choice_bias=True,
    )  # fmt: skip
    count, top_k = config.integer("num_local_experts", 256), config.integer("num_experts_per_tok", 8)
    return _model(
        config, shape, "KimiLinearDecoderLayer", kinds, kimi, latent, choice, (count, top_k, 1024, 1)
    )


def bailing_hybrid(config: ConfigReader) -> ModelSpec:
    """Ling 3.0: five layers of Kimi delta attention to one of gated latent attention."""
    config = config.add_defaults(
        vocab_size=157_184, hidden_size=2560, intermediate_size=6144, num_hidden_layers=42,
        num_attention_heads=32,
    )  # fmt: skip
    shape = read_shape(config)
    group = config.integer("layer_group_size", 6)
    default = [LINEAR if (index + 1) % group else FULL for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, LINEAR, FULL)
    kimi = KimiShape(
        config.integer("linear_num_heads", shape.heads),
        config.integer("linear_head_dim", config.integer("head_dim", 128)),
        config.integer("short_conv_kernel_size", 4),
        has_low_rank_gates=False,
    )  # fmt: skip
    latent: list[Module] = []
    for module in latent_attention(
        config.add_defaults(q_lora_rank=None), shape.hidden, shape.heads, shape.dropout
    ):
        if module.role is Role.MIXER:
            latent.append(linear("self_attn.g_proj", shape.hidden, shape.heads, shares_input=True))
        latent.append(module)
        if module.role is Role.MIXER:
            values = config.integer("v_head_dim", 128)
            latent.append(activation("self_attn.gate", shape.heads * values, "sigmoid", gated=True))
    choice = Router(
        0, 0, 0, "sigmoid", config.integer("n_group", 8), config.integer("topk_group", 4),
        in_fp32=True, has_choice_bias=True,
    )  # fmt: skip
    count, top_k = config.integer("num_local_experts", 512), config.integer("num_experts_per_tok", 8)
    return _model(
        config, shape, "BailingHybridDecoderLayer", kinds, kimi, latent, choice, (count, top_k, 768, 2)
    )


def _model(
    config: ConfigReader,
    shape: Shape,
    kind: str,
    kinds: Sequence[str],
    kimi: KimiShape,
    latent: Sequence[Module],
    choice: Router,
    experts: tuple[int, int, int, int],
) -> ModelSpec:
    """The model with `experts`: how many, how many for a token, and the defaults of their width and of the
    number of dense layers.
    """
    count, top_k, width, dense = experts
    width = config.integer("moe_intermediate_size", width)
    sparse = routed_and_shared(config, shape, width, (count, top_k), choice)
    first = config.integer("first_k_dense_replace", dense, minimum=0)
    mlps = list(config.strings("mlp_layer_types")) or [
        _DENSE if index < first else _SPARSE for index in range(shape.layers)
    ]
    if len(mlps) != shape.layers:
        raise config.error(f"'mlp_layer_types' names {len(mlps)} layers; expected {shape.layers}")

    def block(layer: tuple[str, str]) -> Block:
        is_kimi, is_sparse = layer[0] == LINEAR, layer[1] == _SPARSE
        order = registration_order(
            EXPERTS_FIRST, kimi_registration(kimi) if is_kimi else (*LATENT, "self_attn.g_proj")
        )
        core = kimi_layer(shape.hidden, kimi) if is_kimi else latent
        return pre_norm_block(kind, shape, core, sparse if is_sparse else None, registration=order)

    blocks = build_unique_blocks(list(zip(kinds, mlps, strict=True)), block)
    return decoder(config, shape, blocks, max_positions=1_048_576, is_tied=None)
