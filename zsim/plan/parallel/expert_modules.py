"""The modules of a layer of routed experts: its router, and experts that run one after the other.

Experts of their own are those of `deepspeed.moe.layer.MoE` (DeepSpeed 0.19.8 moe/experts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from zsim.specs.model.experts import Experts, ExpertsLibrary, GroupedLinear, Rearrange, Router
from zsim.specs.model.spec import Activation, Linear, Module, Parameter
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.mesh import EXPERT_DATA


def router_of(module: Module, split: ExpertSplit) -> Module:
    """The model's router as a framework's code runs it."""
    work = module.work
    assert isinstance(work, Router)
    in_fp32 = work.in_fp32 if split.gate_in_fp32 is None else split.gate_in_fp32
    own = replace(
        work,
        library=split.library,
        in_fp32=in_fp32 and not split.is_megatron,
        has_fp32_output=in_fp32,
        has_auxiliary_loss=work.has_auxiliary_loss or split.has_auxiliary_loss,
    )
    return replace(module, work=own)


def map_of_rows(experts: Module, split: ExpertSplit, rows: float) -> list[Module]:
    """The module that maps a rank's rows, `rows` per token of the layer, to its experts after DeepEP's
    dispatch. Other dispatchers have none. The host waits for the lengths of masks forward and backward.
    """
    if split.dispatcher != "deepep":
        return []
    assert isinstance(experts.work, Experts)
    library: ExpertsLibrary = "megatron" if split.masks_map else "megatron-fused"
    work = Rearrange("map", experts.work.in_features, 0.0, library)
    return [
        Module(
            f"{experts.name}.map",
            work,
            token_shards=experts.token_shards * split.token_ranks,
            rows_per_token=rows,
            host_waits=split.masks_map,
            backward_waits=split.masks_map,
        )
    ]


def part_of(stacked: Sequence[Parameter], name: str, shape: tuple[int, ...], belongs_to: str) -> Parameter:
    """A parameter that is a part of the model's `stacked` ones. It is trained where all of them are, and kept
    in the type that frozen ones are kept in.
    """
    trainable = all(one.trainable for one in stacked)
    stored = next((one.stored for one in stacked if one.stored), "")
    return Parameter(name, shape, trainable=trainable, belongs_to=belongs_to, stored=stored)


def experts_one_by_one(experts: Module, count: int, rows: float, *, is_apart: bool) -> list[Module]:
    """`count` of the model's `experts`, each on `rows` rows per token. With `has_separate_inputs` both of its
    first products read a copy of their own.
    """
    work, found = experts.work, []
    assert isinstance(work, Experts)
    hidden, features = work.in_features, work.expert_features
    has_bias = any(len(one.shape) == 2 for one in experts.parameters)
    parts = [("up_proj", hidden, features), ("down_proj", features, hidden)]
    if work.is_gated:
        parts.insert(0, ("gate_proj", hidden, features))
    for number in range(count):
        name = f"{experts.name}.deepspeed_experts.{number}"
        made = []
        for place, (part, given, out) in enumerate(parts):
            shapes: dict[str, tuple[int, ...]] = {"weight": (out, given)}
            shapes |= {"bias": (out,)} if has_bias else {}
            owned = tuple(
                part_of(experts.parameters, one, shape, EXPERT_DATA) for one, shape in shapes.items()
            )
            shares = place > 0 and part == "up_proj" and not is_apart
            made.append(Module(f"{name}.{part}", Linear(given, out), owned, shares_input=shares))
        made.insert(-1, Module(f"{name}.act_fn", Activation(features, work.is_gated, work.act)))
        found += made
    cut = experts.token_shards
    return [replace(one, token_shards=cut, rows_per_token=float(rows)) for one in found]


def padded_when_quantised(products: Sequence[Module], split: ExpertSplit) -> list[Module]:
    """Megatron's products, of which quantised ones pad every expert's rows. They do so once, before the first
    product, and the padding is taken off again after the last.
    """
    found = list(products)
    grouped = [n for n, one in enumerate(found) if isinstance(one.work, GroupedLinear)]
    places: tuple[tuple[int, Literal["first", "last"]], ...] = ((grouped[0], "first"), (grouped[-1], "last"))
    for n, place in places if split.quantised_padding else ():
        work = found[n].work
        assert isinstance(work, GroupedLinear)
        found[n] = replace(found[n], work=replace(work, pads=split.quantised_padding, place=place))
    return found
