"""Adapters on routed experts, as PEFT and Megatron-Bridge have them, in a model as its file states it.

# [Note: adapters on experts]
PEFT 0.21.2 adapts a stacked parameter that `target_parameters` names (tuners/lora/layer.py `ParamWrapper`,
since 0.17): one A and one B with E times the rank for all E experts of a layer. In every forward the sum of
the weights and B A is made, complete, and the experts' product reads the sum, which autograd keeps. Its
gradient is made complete too, and multiplied by A and by B. Several parameters of one module are wrapped in
each other, the first innermost.

transformers before 5 had a `Linear` for every product of every expert. PEFT takes their names for the stacked
parameters (utils/transformers_weight_conversion.py), gate and up only together, with twice the rank.

In Megatron-Bridge 0.6.0 (peft/lora.py, peft/utils.py) experts whose products run together share one adapter
among all of a rank: A and B are products of all rows (`share_expert_adapters`), whose gradients are summed up
among the experts' ranks as they are made. Or they have one each (`GroupedExpertLinearAdapter`), as experts
that run one after the other always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.errors import InputError
from zsim.operations.experts import ExpertAdapterKind, ExpertAdapters, Experts
from zsim.operations.merged_weights import MergedWeights
from zsim.operations.router import Router
from zsim.specs.model.spec import Module, Parameter

FIRST, SECOND = "linear_fc1", "linear_fc2"
# PEFT 0.21.2 `_MOE_TARGET_MODULE_MAPPING`: products of an expert in transformers 4, by the parameter that
# they are a part of.
_NAMES = {
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "gate.weight": ("gate",)},
    "qwen2_moe": {
        "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",), "gate.weight": ("gate",),
    },
}  # fmt: skip
# Families that transformers 5.24 reads like one of these (conversion_mapping.py), as far as zsim has them.
_LIKE = {
    "mixtral": "mixtral", "qwen3_moe": "qwen2_moe", "deepseek_v2": "qwen2_moe", "deepseek_v3": "qwen2_moe",
    "glm4_moe": "qwen2_moe", "olmoe": "qwen2_moe",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """One product of a layer's experts that gets an adapter."""

    name: str
    """The full name of the product."""
    is_first: bool
    """Whether it is the first of an expert's products."""


def transformers_4_names(family: str) -> tuple[str, ...]:
    """Names that products of experts, and the router, had in transformers 4. Empty for other families."""
    return tuple(name for names in _NAMES.get(_LIKE.get(family, ""), {}).values() for name in names)


def split_stacked_targets(family: str, targets: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """The targets that are no names of transformers 4, and the stacked parameters for those that are.

    Each stacked parameter comes with the number of products that it has of the targets, by which PEFT
    multiplies the rank.

    Raises InputError for a part of a stacked parameter.
    """
    parameters: dict[str, int] = {}
    remaining = list(targets)
    for parameter, product_names in _NAMES.get(_LIKE.get(family, ""), {}).items():
        matches = [target for target in remaining if target.rpartition(".")[2] in product_names]
        present = {target.rpartition(".")[2] for target in matches}
        if not present:
            continue
        if lacking := [part for part in product_names if part not in present]:
            raise InputError(
                f"training.lora.targets: found {', '.join(sorted(present))} without {', '.join(lacking)}, "
                f"which transformers 5 keeps in one weight, {parameter}, with it; expected both or neither"
            )
        remaining = [target for target in remaining if target not in matches]
        parameters[parameter] = len(product_names)
    return remaining, parameters


def add_router_adapter(module: Module, rank: int, stored: str, *, casts: bool) -> list[Module]:
    """The module that merges an adapter into a router's weight, and then the router."""
    op_spec = module.op_spec
    assert isinstance(op_spec, Router)
    shapes = (("A", (rank, op_spec.in_features)), ("B", (op_spec.num_experts, rank)))
    adapter_parameters = tuple(
        Parameter(f"lora_{letter}.default.weight", shape, stored_dtype=stored) for letter, shape in shapes
    )
    sums = MergedWeights(1, op_spec.in_features, op_spec.num_experts, rank, casts)
    merge = Module(
        f"{module.name}.lora_sum",
        sums,
        adapter_parameters,
        token_shards=module.token_shards,
        parameter_owner=module.name,
    )
    return [merge, replace(module, op_spec=replace(op_spec, is_merged=True))]


def adaptable_products(module: Module, name: str, kind: ExpertAdapterKind) -> tuple[ExpertTarget, ...]:
    """The products of a layer's experts, of full name `name`, that adapters of this kind can be on.

    These are stacked weights, or Megatron's two products.
    """
    if kind != "merged":
        return ExpertTarget(f"{name}.{FIRST}", is_first=True), ExpertTarget(
            f"{name}.{SECOND}", is_first=False
        )
    return tuple(
        ExpertTarget(f"{name}.{parameter.name}", is_first="down" not in parameter.name)
        for parameter in module.parameters
        if len(parameter.shape) == 3
    )


def add_expert_adapters(
    module: Module,
    adapted: Sequence[tuple[ExpertTarget, int]],
    kind: ExpertAdapterKind,
    stored: str,
    *,
    casts: bool,
) -> Module:
    """The experts with adapters on `adapted` products, each with its rank. See [Note: adapters on experts].

    Raises InputError for a rank beyond a product's width.
    """
    op_spec = module.op_spec
    assert isinstance(op_spec, Experts)
    parameters, ranks = list(module.parameters), {True: 0, False: 0}
    for number, (product, rank) in enumerate(adapted):
        first_product_features = op_spec.expert_features * (2 if op_spec.is_gated else 1)
        in_features, out_features = (
            (op_spec.in_features, first_product_features)
            if product.is_first
            else (op_spec.expert_features, op_spec.in_features)
        )
        if rank > max(in_features, out_features):
            raise InputError(
                f"training.lora.rank: found {rank:,}, but '{product.name}' is a product of {in_features:,} x "
                f"{out_features:,}; expected at most {max(in_features, out_features):,}"
            )
        ranks[product.is_first] = rank
        wrappers = "base_layer." * (len(adapted) - 1 - number)
        prefix = wrappers if kind == "merged" else f"{product.name.rpartition('.')[2]}."
        shapes: tuple[tuple[int, ...], ...] = (rank, in_features), (out_features, rank)
        if kind == "merged":
            shapes = (op_spec.num_experts * rank, in_features), (out_features, op_spec.num_experts * rank)
        elif kind == "each":
            shapes = tuple((op_spec.num_experts, *shape) for shape in shapes)
        parameters += [
            Parameter(f"{prefix}lora_{letter}.default.weight", shape, stored_dtype=stored)
            for letter, shape in zip("AB", shapes, strict=True)
        ]
    adapters = ExpertAdapters(kind, ranks[True], ranks[False], casts=casts)
    return replace(module, op_spec=replace(op_spec, adapters=adapters), parameters=tuple(parameters))
