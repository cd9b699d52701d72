"""Nemotron-H and Nemotron 3: blocks of one mixer each, Mamba-2, attention, an MLP or routed experts.

Names, shapes and defaults as in transformers 5.24 (`modeling_nemotron_h.py`, `configuration_nemotron_h.py`).
Attention has no positions. The width of Mamba-2 is that of its heads, and `expand` is not read. With
`moe_latent_size` a product brings tokens to the width of the experts before they are dispatched, and another
back behind their sum, while router and shared experts see the layer's own width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    embedding,
    language_model,
    linear,
    plain_mlp,
    rename_modules,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.llama import Shape, attention_modules, build_unique_blocks
from zsim.specs.model.families.mixers import FULL, LINEAR, state_space_layer
from zsim.specs.model.spec import Block, ModelSpec, Module, Parameter

EXPERTS, MLP = "moe", "mlp"
_PATTERN = ("hybrid_override_pattern", ("layers_block_type", "layer_types"))
_SYMBOLS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_NAMES = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in _SYMBOLS.values()}
_ORDER = ("norm", "mixer", *(
    f"mixer.{name}" for name in (
        "conv1d", "in_proj", "norm", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj",
        "down_proj", "experts", "gate", "shared_experts.up_proj", "shared_experts.down_proj",
        "fc1_latent_proj", "fc2_latent_proj",
    )
))  # fmt: skip


def nemotron_h(config: ConfigReader) -> ModelSpec:
    """Any pattern of the four kinds of blocks."""
    config = config.add_defaults(
        hidden_size=4096, vocab_size=131_072, num_attention_heads=32, head_dim=128, intermediate_size=21504
    )
    kinds = _pattern(config, *_PATTERN)
    shape = Shape.read(config.add_defaults(num_hidden_layers=len(kinds), hidden_act="relu2"), kv_default=8)
    if "num_hidden_layers" in config.values and config.integer("num_hidden_layers") != len(kinds):
        raise config.error(
            f"'num_hidden_layers' is {config.integer('num_hidden_layers')}, but the pattern has {len(kinds)} "
            "layers; expected as many"
        )

    def block(kind: str) -> Block:
        return _block(config, shape, kind)

    model = language_model(
        config,
        shape.hidden,
        [embedding("model.embeddings", shape.vocab, shape.hidden)],
        build_unique_blocks(kinds, block),
        config.optional_integer("max_position_embeddings"),
        root="model.layers",
        final=[rms_norm("model.norm_f", shape.hidden)],
        is_tied=None,
    )
    return _count_prediction(config, model, block)


def _pattern(config: ConfigReader, text_key: str, list_keys: Sequence[str]) -> list[str]:
    """The kinds of blocks in order, by symbols or by names."""
    text = config.string(text_key, "")
    if text:
        unknown = next((symbol for symbol in text if symbol not in _SYMBOLS), None)
        if unknown is not None:
            raise config.error(f"'{text_key}' has '{unknown}'; expected only {' '.join(_SYMBOLS)}")
        return [_SYMBOLS[symbol] for symbol in text]
    for key in list_keys:
        names = config.strings(key)
        unknown = next((name for name in names if name not in _NAMES), None)
        if unknown is not None:
            raise config.error(f"'{key}' has '{unknown}'; expected {', '.join(dict.fromkeys(_NAMES))}")
        if names:
            return [_NAMES[name] for name in names]
    raise config.error(f"no '{text_key}' and no '{list_keys[0]}', which say what each layer is")


def _block(config: ConfigReader, shape: Shape, kind: str) -> Block:
    mixers = {LINEAR: _state_space, FULL: _attention, MLP: _mlp, EXPERTS: _experts}
    mixer = mixers[kind](config, shape)
    modules = (rms_norm("norm", shape.hidden), *mixer, residual("mixer.residual", shape.hidden))
    return set_registration(Block("NemotronHBlock", modules), *_ORDER)


def _state_space(config: ConfigReader, shape: Shape) -> list[Module]:
    work = StateSpace(
        config.integer("mamba_num_heads", 128), config.integer("mamba_head_dim", 64),
        config.integer("ssm_state_size", 128), config.integer("n_groups", 8),
        config.integer("chunk_size", 128),
    )  # fmt: skip
    return state_space_layer(
        "mixer", shape.hidden, work, taps=config.integer("conv_kernel", 4),
        conv_bias=config.boolean("use_conv_bias", True), bias=config.boolean("use_bias", False),
    )  # fmt: skip


def _attention(config: ConfigReader, shape: Shape) -> list[Module]:
    return rename_modules(attention_modules(shape, rotary=False), "self_attn", "mixer")


def _mlp(config: ConfigReader, shape: Shape) -> list[Module]:
    return _plain(config, "mixer", shape.hidden, shape.ffn)


def _plain(config: ConfigReader, root: str, hidden: int, width: int) -> list[Module]:
    names = f"{root}.up_proj", f"{root}.act_fn", f"{root}.down_proj"
    act = config.activation("mlp_hidden_act", "relu2")
    return plain_mlp(names, hidden, width, act, bias=config.boolean("mlp_bias", False))


def _experts(config: ConfigReader, shape: Shape) -> list[Module]:
    count, top_k = config.integer("n_routed_experts", 8), config.integer("num_experts_per_tok", 2)
    width, shared = (
        config.integer(key, 7688) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    if top_k > count:
        raise config.error(f"'num_experts_per_tok' is {top_k}; expected at most the {count} experts")
    latent = config.optional_integer("moe_latent_size")
    rows = latent or shape.hidden
    router = Router(
        shape.hidden, count, top_k, "sigmoid", config.integer("n_group", 1), config.integer("topk_group", 1),
        in_fp32=True, has_choice_bias=True, normalizes=config.boolean("norm_topk_prob", True),
    )  # fmt: skip
    experts = Experts(count, top_k, rows, width, config.activation("mlp_hidden_act", "relu2"), is_gated=False)
    weights = (Parameter("up_proj", (count, width, rows)), Parameter("down_proj", (count, rows, width)))
    stacked = [Module("mixer.experts", experts, weights)]
    if latent:
        entry = _duplicated("mixer.fc1_latent_proj", shape.hidden, latent)
        stacked = [replace(entry, shares_input=True), *stacked]
        stacked.append(_duplicated("mixer.fc2_latent_proj", latent, shape.hidden))
    return [
        *_plain(config, "mixer.shared_experts", shape.hidden, shared),
        Module("mixer.gate", router, (Parameter("weight", (count, shape.hidden)),)),
        *stacked,
    ]


def _duplicated(name: str, in_features: int, out_features: int) -> Module:
    return replace_op_fields(linear(name, in_features, out_features), is_duplicated=True)


def _count_prediction(config: ConfigReader, model: ModelSpec, build: Callable[[str], Block]) -> ModelSpec:
    """The model with its modules for multi-token prediction counted: the blocks of a pattern of their own, a
    product of two hidden states to one, and three norms (`enorm`, `hnorm`, a last one).
    """
    depths = config.integer("num_nextn_predict_layers", 0, minimum=0)
    if not depths and EXPERTS not in _pattern(config, *_PATTERN):
        return model
    keys = ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    kinds = [FULL, EXPERTS]
    if any(key in config.values for key in (keys[0], *keys[1])):
        kinds = _pattern(config, *keys)
    blocks = tuple(build(kind) for kind in kinds)
    hidden, numel = model.hidden_size, sum(block.numel for block in blocks)
    total = depths * (numel + 2 * hidden * hidden + 3 * hidden)
    return replace(model, mtp_parameters=total, prediction_blocks=blocks)
