"""Qwen 2 and 3 MoE, and parts of other mixtures of experts.

The routed experts are one module with two stacked weights, as transformers 5.23 registers them
(`MixtralExperts` and its kin). Names, shapes and defaults are as in its `modeling_qwen2_moe.py`,
`modeling_qwen3_moe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import linear
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    decoder,
    gated_mlp,
    pre_norm_block,
)
from zsim.specs.model.spec import ModelSpec, Module, Parameter

_SHARED = tuple(
    f"mlp.{name}.{part}"
    for name in ("shared_expert", "shared_experts")
    for part in ("gate_proj", "up_proj", "down_proj")
)
GATE_FIRST = ("mlp.gate", "mlp.experts", *_SHARED, "mlp.shared_expert_gate")
EXPERTS_FIRST = ("mlp.experts", "mlp.gate", *_SHARED)


def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Qwen 2 MoE has routed experts and a gated shared expert. Some layers are dense."""
    shape = Shape.read(config)
    has_bias = config.boolean("qkv_bias", True)
    width = config.integer("moe_intermediate_size", 1408)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    num_experts, top_k = config.integer("num_experts", 60), config.integer("num_experts_per_tok", 4)
    core = attention_modules(shape, qkv_bias=has_bias)
    sparse = [
        *gated_mlp("mlp.shared_expert", shape.hidden, shared, shape.act),
        *routed_mlp(config, shape.hidden, width, num_experts, top_k),
        linear("mlp.shared_expert_gate", shape.hidden, 1, shares_input=True),
    ]
    return _mixed(config, shape, "Qwen2MoeDecoderLayer", core, sparse, GATE_FIRST)


def qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Qwen 3 MoE has routed experts, and norms on query and key heads. Some layers are dense."""
    shape = Shape.read(config, kv_default=4)
    has_bias = config.boolean("attention_bias", False)
    width = config.integer("moe_intermediate_size", 768)
    num_experts, top_k = config.integer("num_experts", 128), config.integer("num_experts_per_tok", 8)
    core = attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, qk_norm="each head")
    sparse = routed_mlp(config, shape.hidden, width, num_experts, top_k)
    return _mixed(config, shape, "Qwen3MoeDecoderLayer", core, sparse, EXPERTS_FIRST)


_CHOICE = Router(0, 0, 0)  # softmax in fp32 over the scores of a product in the activations' type


def routed_mlp(
    config: ConfigReader,
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    choice: Router = _CHOICE,
    *,
    gate: str = "mlp.gate",
    act: str = "",
    bias: bool = False,
    is_transposed: bool = False,
) -> list[Module]:
    """A router, which chooses like `choice`, and stacked experts.

    `bias` is of the router's and all experts' products. With `is_transposed` experts' weights are [in, out].
    """
    if top_k > num_experts:
        raise config.error(
            f"'num_experts_per_tok' is {top_k}; expected at most the number of experts, {num_experts}"
        )
    up, down = (2 * width, hidden), (hidden, width)
    if is_transposed:
        up, down = (up[1], up[0]), (down[1], down[0])
    parameters = [Parameter("gate_up_proj", (num_experts, *up)), Parameter("down_proj", (num_experts, *down))]
    scores = [Parameter("weight", (num_experts, hidden))]
    if bias:
        parameters.insert(1, Parameter("gate_up_proj_bias", (num_experts, 2 * width)))
        parameters.append(Parameter("down_proj_bias", (num_experts, hidden)))
        scores.append(Parameter("bias", (num_experts,)))
    op_spec = Experts(num_experts, top_k, hidden, width, act or config.string("hidden_act", "silu"))
    router = replace(choice, in_features=hidden, num_experts=num_experts, top_k=top_k)
    experts = f"{gate.rpartition('.')[0]}.experts"
    return [Module(gate, router, tuple(scores)), Module(experts, op_spec, tuple(parameters))]


def _mixed(
    config: ConfigReader,
    shape: Shape,
    kind: str,
    core: Sequence[Module],
    sparse: Sequence[Module],
    order: Sequence[str],
) -> ModelSpec:
    """The model with `sparse` layers, and with a dense MLP in those of `mlp_only_layers` and off
    `decoder_sparse_step`.
    """
    dense_block = pre_norm_block(kind, shape, core)
    sparse_block = pre_norm_block(kind, shape, core, sparse, registration=registration_order(order))
    dense_layers = set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", 1)
    blocks = [
        dense_block if index in dense_layers or (index + 1) % step else sparse_block
        for index in range(shape.layers)
    ]
    return decoder(config, shape, blocks, max_positions=32768)


def registration_order(mlp: Sequence[str], attention: Sequence[str] = ()) -> tuple[str, ...]:
    """Order of registration: attention, MLP, norms."""
    first = attention or [name for name in REGISTRATION if name.startswith("self_attn.")]
    dense = [name for name in REGISTRATION if name.startswith("mlp.")]
    norms = [name for name in REGISTRATION if "layernorm" in name]
    return (*first, *dense, *mlp, *norms)


def dense_layers(config: ConfigReader, layers: int, first: int, end: int | None = None) -> frozenset[int]:
    """Numbers of the layers without experts: those that `mlp_layer_types` calls dense, or without that key
    the `first` ones and those from `end` on.
    """
    kinds = config.strings("mlp_layer_types")
    if not kinds:
        return frozenset((*range(min(first, layers)), *range(layers if end is None else end, layers)))
    if len(kinds) != layers:
        raise config.error(f"'mlp_layer_types' names {len(kinds)} layers; expected {layers}")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "dense")
