"""Modules of a layer of routed experts that do not depend on its dispatch: DeepEP's map of rows, experts that
run one by one, padded products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from zsim.cost.kernels.moved_rows import FUSED_MAP, MASKED_MAP
from zsim.operations.experts import Experts
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.operation import Role
from zsim.operations.rearrange import Rearrange
from zsim.specs.model.spec import Activation, Exchange, Linear, Module, Parameter
from zsim.specs.strategy.expert_library import ExpertLibrary
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import EXPERT_DATA, TENSOR


def row_map_modules(experts: Module, split: ExpertSplit, rows: float) -> list[Module]:
    """The module that maps a rank's rows, `rows` per token of the layer, to its experts after DeepEP's
    dispatch. Other dispatchers have none. The host waits for the lengths of masks forward and backward.
    """
    if split.dispatcher != "deepep":
        return []
    assert isinstance(experts.op_spec, Experts)
    library = MASKED_MAP if split.builds_map_with_masks else FUSED_MAP
    work = Rearrange("map", experts.op_spec.in_features, 0.0, library)
    return [
        Module(
            f"{experts.name}.map",
            work,
            token_shards=experts.token_shards * split.token_ranks,
            rows_per_token=rows,
            host_waits=split.builds_map_with_masks,
            backward_waits=split.builds_map_with_masks,
        )
    ]


def part_of_stacked(
    stacked: Sequence[Parameter], name: str, shape: tuple[int, ...], belongs_to: str
) -> Parameter:
    """A parameter that is a part of the model's `stacked` ones. It is trained where all of them are, and kept
    in the type that frozen ones are kept in.
    """
    trainable = all(parameter.trainable for parameter in stacked)
    stored = next((parameter.stored_dtype for parameter in stacked if parameter.stored_dtype), "")
    return Parameter(name, shape, trainable=trainable, rank_kind=belongs_to, stored_dtype=stored)


def sequential_experts(
    experts: Module,
    library: ExpertLibrary,
    count: int,
    rows: float,
    *,
    has_separate_inputs: bool,
    ranks: int = 1,
) -> list[Module]:
    """`count` of the model's `experts` as a library has them, each on `rows` rows per token. With
    `has_separate_inputs` both of its first products read a copy of their own. `ranks` of tensor parallelism
    share its products.
    """
    work, modules = experts.op_spec, []
    assert isinstance(work, Experts)
    hidden, features = work.in_features, work.expert_features // ranks
    has_bias = any(len(parameter.shape) == 2 for parameter in experts.parameters)
    products = [("up_proj", hidden, features), ("down_proj", features, hidden)]
    if work.is_gated:
        products.insert(0, ("gate_proj", hidden, features))
    for number in range(count):
        name = f"{experts.name}.{library.expert_list}.{number}"
        expert_modules = []
        for index, (product_name, in_features, out_features) in enumerate(products):
            shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
            shapes |= {"bias": (out_features,)} if has_bias else {}
            parameters = tuple(
                part_of_stacked(experts.parameters, parameter_name, shape, EXPERT_DATA)
                for parameter_name, shape in shapes.items()
            )
            shares = index > 0 and product_name == "up_proj" and not has_separate_inputs
            expert_modules.append(
                Module(
                    f"{name}.{product_name}",
                    Linear(in_features, out_features),
                    parameters,
                    shares_input=shares,
                )
            )
        expert_modules.insert(-1, Module(f"{name}.act_fn", Activation(features, work.is_gated, work.act)))
        if ranks > 1:
            sums = [
                Module(f"{name} all_reduce {label}", exchange)
                for label, exchange in (
                    ("input's gradient", Exchange(None, "all_reduce", hidden, ranks, TENSOR)),
                    ("output", Exchange("all_reduce", None, hidden, ranks, TENSOR)),
                )
            ]
            expert_modules = [sums[0], *expert_modules, sums[1]]
        modules += expert_modules
    cut = experts.token_shards
    return [replace(module, token_shards=cut, rows_per_token=float(rows)) for module in modules]


def pad_quantised_products(products: Sequence[Module], split: ExpertSplit) -> list[Module]:
    """Megatron's products, of which quantised ones pad every expert's rows. They do so once, before the first
    product, and the padding is taken off again after the last.
    """
    padded = list(products)
    grouped = [n for n, product in enumerate(padded) if product.role is Role.EXPERT_PRODUCT]
    positions: tuple[tuple[int, Literal["first", "last"]], ...] = (
        (grouped[0], "first"),
        (grouped[-1], "last"),
    )
    for n, position in positions if split.quantised_padding else ():
        work = padded[n].op_spec
        assert isinstance(work, GroupedLinear)
        padded[n] = replace(padded[n], op_spec=replace(work, pads=split.quantised_padding, position=position))
    return padded
