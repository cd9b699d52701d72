"""Adapters on routed experts as what runs: see [Note: adapters on experts] of
`zsim.specs.model.expert_adapters`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.specs.model.experts import Experts, GroupedKernel, GroupedLinear, MergedWeights
from zsim.specs.model.spec import AdapterSum, Exchange, Linear, Module, Parameter
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.mesh import EXPERT, EXPERT_DATA


def with_adapters_on(products: Sequence[Module], experts: Module, split: ExpertSplit) -> list[Module]:
    """The products of a rank's experts, with the adapters that the model's `experts` have."""
    work = experts.work
    assert isinstance(work, Experts)
    if work.adapters is None:
        return list(products)
    last = max(n for n, one in enumerate(products) if isinstance(one.work, GroupedLinear))
    found: list[Module] = []
    for number, module in enumerate(products):
        rank = work.adapters.second if number == last else work.adapters.first
        if not isinstance(module.work, GroupedLinear) or not rank:
            found.append(module)
        elif work.adapters.kind == "merged":
            found += _merged(module, module.work, experts, rank, is_last=number == last)
        elif work.adapters.kind == "shared":
            found += _shared(module, module.work, rank, split)
        else:
            found += _each(module, module.work, rank)
    return found


def _merged(
    module: Module, work: GroupedLinear, experts: Module, rank: int, *, is_last: bool
) -> list[Module]:
    """The sum of weights and adapters before the product. Its two parameters are the model's."""
    assert isinstance(experts.work, Experts)
    assert experts.work.adapters is not None
    adapters = [one for one in experts.parameters if "lora_" in one.name]
    owned = tuple(adapters[-2:] if is_last else adapters[:2])
    casts = experts.work.adapters.casts
    sums = MergedWeights(work.num_experts, work.in_features, work.out_features, rank, casts)
    merge = Module(f"{module.name}.lora_sum", sums, owned, owner=experts.name)
    return [merge, replace(module, work=replace(work, is_merged=True))]


def _shared(module: Module, work: GroupedLinear, rank: int, split: ExpertSplit) -> list[Module]:
    """Two products of all rows of the rank, and the sum with the experts' own."""
    down = Linear(work.in_features, rank, is_adapter=True)
    up = Linear(rank, work.out_features)
    found = [module]
    for name, product in (("lora_A.default", down), ("lora_B.default", up)):
        shape = (product.out_features, product.in_features)
        if split.ranks > 1:
            numel = product.out_features * product.in_features
            among = Exchange(None, "all_reduce", 0, split.ranks, EXPERT, numel=numel)
            found.append(Module(f"{module.name}.{name} all_reduce", among))
        found.append(_beside(module, name, product, _owned(module, shape)))
    return [*found, _sum(module, work)]


def _each(module: Module, work: GroupedLinear, rank: int) -> list[Module]:
    """Two products of every expert's rows, and the sum with the expert's own."""
    count = work.num_experts
    kernel: GroupedKernel = "loop" if work.kernel == "loop" else "grouped"
    down = GroupedLinear(count, work.in_features, rank, kernel, is_adapter=True)
    up = GroupedLinear(count, rank, work.out_features, kernel)
    pairs = (("lora_A.default", down), ("lora_B.default", up))
    parts = [
        _beside(module, name, one, _owned(module, (count, one.out_features, one.in_features)))
        for name, one in pairs
    ]
    return [module, *parts, _sum(module, work)]


def _owned(module: Module, shape: tuple[int, ...]) -> Parameter:
    is_spread = any(one.belongs_to for one in module.parameters)
    return Parameter("weight", shape, belongs_to=EXPERT_DATA if is_spread else "")


def _sum(module: Module, work: GroupedLinear) -> Module:
    """The adapter's output added to the product's."""
    return replace(module, name=f"{module.name}.sum", work=AdapterSum(work.out_features), parameters=())


def _beside(module: Module, name: str, work: Linear | GroupedLinear, weight: Parameter) -> Module:
    """A module that sees the rows that the product sees."""
    return replace(module, name=f"{module.name}.{name}", work=work, parameters=(weight,), shares_input=False)
