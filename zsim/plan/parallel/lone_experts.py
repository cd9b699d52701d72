"""Routed experts as modules of their own that run one after the other, as in `deepspeed.moe.layer.MoE`
(DeepSpeed 0.19.8 moe/experts.py)."""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.experts import Experts
from zsim.specs.model.spec import Activation, Linear, Module, Parameter
from zsim.specs.strategy.mesh import EXPERT_DATA


def experts_one_by_one(experts: Module, count: int, rows: float, *, is_apart: bool) -> list[Module]:
    """`count` of the model's `experts`, each on `rows` rows per token; `is_apart`: both of its first products
    read a copy of their own."""
    work, found = experts.work, []
    assert isinstance(work, Experts)
    hidden, features = work.in_features, work.expert_features
    has_bias = any(len(one.shape) == 2 for one in experts.parameters)
    trainable = all(one.trainable for one in experts.parameters)
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
                Parameter(one, shape, trainable=trainable, belongs_to=EXPERT_DATA)
                for one, shape in shapes.items()
            )
            shares = place > 0 and part == "up_proj" and not is_apart
            made.append(Module(f"{name}.{part}", Linear(given, out), owned, shares_input=shares))
        made.insert(-1, Module(f"{name}.act_fn", Activation(features, work.is_gated, work.act)))
        found += made
    cut = experts.token_shards
    return [replace(one, token_shards=cut, rows_per_token=float(rows)) for one in found]
