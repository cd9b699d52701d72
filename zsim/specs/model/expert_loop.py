"""Routed experts that the host runs one after the other, each three Linear modules of its own.

# [Note: experts one by one]
Up to 4.57 transformers has an MLP for every expert, in a ModuleList (read in 4.51.3 and 4.57.1:
`MixtralSparseMoeBlock`, `Qwen2MoeSparseMoeBlock`, `Qwen3MoeSparseMoeBlock`, `OlmoeSparseMoeBlock`,
`PhimoeSparseMoeBlock`, `DeepseekV2MoE`, `DeepseekV3MoE`, `Glm4MoeMoE`). Python goes through them: a mask of
the tokens of each (one_hot, made once), torch.where of it, for whose length the host waits, a gather of these
rows, the MLP, a product with the scores, and index_add_ into the output.

From 5.0 on the experts of a layer are two stacked weights and their products one kernel each. gpt-oss,
Granite and Llama 4 have been so from their beginning. Nothing here depends on the sizes that a router gives
to experts: one rank runs all of them, one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.moved_rows import TRANSFORMERS_4_KERNELS, MoveKind
from zsim.operations.experts import Experts
from zsim.operations.operation import Role
from zsim.operations.rearrange import Rearrange, SharedOutput
from zsim.specs.model.expert_layer import (
    expert_module_range,
    has_experts,
    share_layer_input,
    shared_output,
    stacked_experts,
)
from zsim.specs.model.spec import Activation, Block, Linear, ModelSpec, Module, Parameter

# Families whose experts were modules, with the names of gate, up and down.
_LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")
_NAMES = {
    "mixtral": ("w1", "w3", "w2"), "phimoe": ("w1", "w3", "w2"), "qwen2_moe": _LLAMA_NAMES,
    "qwen3_moe": _LLAMA_NAMES, "olmoe": _LLAMA_NAMES, "deepseek_v2": _LLAMA_NAMES,
    "deepseek_v3": _LLAMA_NAMES, "glm4_moe": _LLAMA_NAMES,
}  # fmt: skip
# What their layer was called, where it is another name now.
_LAYERS = {"mixtral": "block_sparse_moe", "phimoe": "block_sparse_moe"}
_ROUTERS = {"phimoe": "gate"}
# Those whose router was a linear layer too, not a module with a weight of its own.
_LINEAR_ROUTERS = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe")


def has_looped_form(family: str) -> bool:
    """Whether experts of this family were modules of their own in transformers 4."""
    return family in _NAMES


def has_linear_experts(model: ModelSpec) -> bool:
    """Whether the model's routed experts are linear layers, which libraries adapt and quantise like others.

    False where they are stacked, or where it has none.
    """
    return has_experts(model) and stacked_experts(model) is None


def has_linear_routers(model: ModelSpec) -> bool:
    """Whether the routers of such experts are linear layers as well."""
    return has_linear_experts(model) and model.family in _LINEAR_ROUTERS


def unstack_experts(model: ModelSpec) -> ModelSpec:
    """The model with the experts of transformers 4. See [Note: experts one by one].

    It is the model itself where it has no experts or they were stacked then too.
    """
    if not has_looped_form(model.family):
        return model
    return model.map_blocks(lambda block: _unstack_block(block, model.family))


def _unstack_block(block: Block, family: str) -> Block:
    run = expert_module_range(block)
    if not run:
        return block
    before, expert_layer, after = (
        block.modules[: run.start], block.modules[run.start : run.stop], block.modules[run.stop :],
    )  # fmt: skip
    stacked = next(module for module in expert_layer if module.role is Role.EXPERTS)
    layer = stacked.name.rpartition(".")[0]
    unstacked: list[Module] = []
    for module in expert_layer:
        unstacked += _expert_modules(module, family) if module.role is Role.EXPERTS else [module]
    shared = shared_output(expert_layer)
    if shared != "none":
        unstacked.append(_rearrange(stacked, "add", 0.0, shared=shared))
    unstacked = share_layer_input(unstacked, f"{stacked.name}.")
    registration = block.registration
    if registration is not None:
        experts = _registration_names(stacked, family)
        registration = tuple(
            registered_name
            for name in registration
            for registered_name in (experts if name == stacked.name else (name,))
        )
    names = {module.name: _old_name(module.name, layer, family) for module in unstacked}
    return replace(
        block,
        modules=(*before, *(replace(module, name=names[module.name]) for module in unstacked), *after),
        registration=None
        if registration is None
        else tuple(names.get(registered_name, registered_name) for registered_name in registration),
    )


def _old_name(name: str, layer: str, family: str) -> str:
    """The name that transformers 4 gives a module of the layer."""
    inside = name.removeprefix(f"{layer}.")
    inside = _ROUTERS.get(family, inside) if inside == "router" else inside
    return f"{_LAYERS.get(family, layer)}.{inside}"


def _expert_modules(stacked: Module, family: str) -> list[Module]:
    """The modules in place of stacked experts: the mask, and for each expert its rows, its products,
    its sum.
    """
    op_spec = stacked.op_spec
    assert isinstance(op_spec, Experts)
    rows = op_spec.top_k / op_spec.num_experts
    modules = [_rearrange(stacked, "loop", 0.0)]
    for number in range(op_spec.num_experts):
        name = f"{stacked.name}.{number}"
        products = _products(stacked, name, family)
        scaled_products = [
            replace(product, token_shards=stacked.token_shards, rows_per_token=rows) for product in products
        ]
        modules += [
            _rearrange(stacked, "select", rows, number),
            *scaled_products,
            _rearrange(stacked, "put", rows, number),
        ]
    return modules


def _products(stacked: Module, name: str, family: str) -> list[Module]:
    op_spec = stacked.op_spec
    assert isinstance(op_spec, Experts)
    hidden, features = op_spec.in_features, op_spec.expert_features
    gate, up, down = _NAMES[family]
    trainable = all(parameter.trainable for parameter in stacked.parameters)

    def product(suffix: str, in_features: int, out_features: int, *, shares_input: bool = False) -> Module:
        weight = Parameter("weight", (out_features, in_features), trainable=trainable)
        return Module(
            f"{name}.{suffix}", Linear(in_features, out_features), (weight,), shares_input=shares_input
        )

    return [
        product(gate, hidden, features),
        product(up, hidden, features, shares_input=True),
        Module(f"{name}.act_fn", Activation(features, op_spec.is_gated, op_spec.act)),
        product(down, features, hidden),
    ]


def _registration_names(stacked: Module, family: str) -> tuple[str, ...]:
    """Names of the products in the order of `named_parameters()`: w1, w2, w3, and gate, up, down."""
    op_spec = stacked.op_spec
    assert isinstance(op_spec, Experts)
    suffixes = sorted(_NAMES[family]) if family in _LAYERS else _NAMES[family]
    return tuple(
        f"{stacked.name}.{number}.{suffix}" for number in range(op_spec.num_experts) for suffix in suffixes
    )


def _rearrange(
    stacked: Module, kind: MoveKind, rows: float, number: int | None = None, *, shared: SharedOutput = "none"
) -> Module:
    op_spec = stacked.op_spec
    assert isinstance(op_spec, Experts)
    name = stacked.name if number is None else f"{stacked.name}.{number}"
    rearrangement = Rearrange(
        kind, op_spec.in_features, rows, TRANSFORMERS_4_KERNELS, shared, op_spec.num_experts
    )
    return Module(
        f"{name}.{kind}", rearrangement, token_shards=stacked.token_shards, host_waits=kind == "select"
    )
