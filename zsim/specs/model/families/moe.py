"""Parts of mixtures of experts.

The routed experts are one module with two stacked weights, as transformers 5.23 registers them
(`MixtralExperts` and its kin). Names, shapes and defaults are as in its `modeling_qwen2_moe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.llama import REGISTRATION
from zsim.specs.model.spec import Module, Parameter

_SHARED = tuple(
    f"mlp.{name}.{part}"
    for name in ("shared_expert", "shared_experts")
    for part in ("gate_proj", "up_proj", "down_proj")
)
GATE_FIRST = ("mlp.gate", "mlp.experts", *_SHARED, "mlp.shared_expert_gate")
EXPERTS_FIRST = ("mlp.experts", "mlp.gate", *_SHARED)
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
    op_spec = Experts(num_experts, top_k, hidden, width, act or config.activation("hidden_act", "silu"))
    router = replace(choice, in_features=hidden, num_experts=num_experts, top_k=top_k)
    experts = f"{gate.rpartition('.')[0]}.experts"
    return [Module(gate, router, tuple(scores)), Module(experts, op_spec, tuple(parameters))]


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
