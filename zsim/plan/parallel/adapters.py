"""Adapters under parallelism: of products that tensor parallelism has cut, and on routed experts.

Of the latter see [Note: adapters on experts] of `zsim.specs.model.expert_adapters`.

# [Note: adapters in parts]
Megatron-Bridge 0.6.0 peft/utils.py, `ParallelLinearAdapter`. On a column the first weight is cut along the
rank, reads what the column has gathered (Transformer Engine returns it), and its output is gathered. The
second is cut along its outputs. On a row the first is cut along its inputs, and its output reduced. The
second's output is gathered, and with sequence parallelism each rank goes on with its tokens, whose gradient
is gathered. The gradient of the second's input is reduced beneath the product for its weight. That of the
first's is reduced so too without sequence parallelism, with which it is a part of what the column scatters.

With `sums_adapters_partially` (NeMo AutoModel 0.5 components/distributed/parallel_styles.py
`translate_to_lora`) the first weight is cut alike, and on a row the second along the rank. What a row's first
puts out is scattered along the rank, and its gradient gathered. The second's output is a part of the row's
sum. So is on a column the gradient of the first's input. Nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.grouped_linear import GroupedKernel, GroupedLinear
from zsim.operations.merged_weights import MergedWeights
from zsim.operations.operation import Role
from zsim.specs.model.spec import (
    AdapterInput,
    AdapterSum,
    Exchange,
    ExchangeKind,
    Linear,
    Module,
    OverlappedCollectives,
    Parameter,
)
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import EXPERT, EXPERT_DATA, ParallelismConfig


def shard_adapter(module: Module, parallelism: ParallelismConfig, *, is_row: bool) -> list[Module]:
    """Shard one module of an adapter on the product before it, a column or a row, among the tensor-parallel
    ranks. See [Note: adapters in parts].
    """
    work, ranks, stream = module.op_spec, parallelism.tensor, parallelism.sequence_parallel
    sums_partially = parallelism.style.sums_adapters_partially
    if isinstance(work, AdapterInput):
        return [replace(module, op_spec=replace(work, width=work.width // ranks)) if is_row else module]
    if isinstance(work, AdapterSum):
        width = work.width if is_row else work.width // ranks
        is_scattered = is_row and stream and not sums_partially
        scatter = [_exchange(module.name, None, "all_gather", work.width, ranks)] if is_scattered else []
        token_shards = ranks if is_scattered else 1
        return [*scatter, replace(module, op_spec=replace(work, width=width), token_shards=token_shards)]
    assert isinstance(work, Linear)
    if is_row and (work.is_adapter or sums_partially):
        cut = _shard(module, replace(work, in_features=-(-work.in_features // ranks)), 1, ranks)
        if not work.is_adapter:
            return [cut]
        kinds: tuple[ExchangeKind, ExchangeKind | None] = ("all_reduce", None)
        if sums_partially:
            kinds = "reduce_scatter", "all_gather"
        return [cut, _exchange(module.name, *kinds, work.out_features, ranks)]
    overlaps = not (sums_partially or (work.is_adapter and stream))
    beneath = OverlappedCollectives("all_reduce") if overlaps else None
    local = replace(work, out_features=-(-work.out_features // ranks), overlapped_collectives=beneath)
    gradient: ExchangeKind | None = "reduce_scatter" if sums_partially else None
    gather = _exchange(module.name, "all_gather", gradient, work.out_features, ranks)
    return [_shard(module, local, 0, ranks), *([gather] if is_row or work.is_adapter else [])]


def _shard(module: Module, work: Linear, dimension: int, ranks: int) -> Module:
    """A product cut along a dimension of its weight."""
    parameters = tuple(
        resize_parameter(parameter, dimension, -(-parameter.shape[dimension] // ranks))
        for parameter in module.parameters
    )
    return replace(module, op_spec=work, parameters=parameters)


def _exchange(
    name: str, forward: ExchangeKind | None, backward: ExchangeKind | None, width: int, ranks: int
) -> Module:
    return Module(f"{name} {forward or backward}", Exchange(forward, backward, width, ranks))


def add_adapters(products: Sequence[Module], experts: Module, split: ExpertSplit) -> list[Module]:
    """The products of a rank's experts, with the adapters that the model's `experts` have."""
    work = experts.op_spec
    assert isinstance(work, Experts)
    if work.adapters is None:
        return list(products)
    last = max(n for n, product in enumerate(products) if product.role is Role.EXPERT_PRODUCT)
    modules: list[Module] = []
    for number, module in enumerate(products):
        rank = work.adapters.second if number == last else work.adapters.first
        if not isinstance(module.op_spec, GroupedLinear) or not rank:
            modules.append(module)
        elif work.adapters.kind == "merged":
            modules += _merge_adapters(module, module.op_spec, experts, rank, is_last=number == last)
        elif work.adapters.kind == "shared":
            modules += _add_shared_adapter(module, module.op_spec, rank, split)
        else:
            modules += _add_adapter_per_expert(module, module.op_spec, rank)
    return modules


def _merge_adapters(
    module: Module, work: GroupedLinear, experts: Module, rank: int, *, is_last: bool
) -> list[Module]:
    """The sum of weights and adapters before the product. Its two parameters are the model's."""
    assert isinstance(experts.op_spec, Experts)
    assert experts.op_spec.adapters is not None
    adapters = [parameter for parameter in experts.parameters if "lora_" in parameter.name]
    parameters = tuple(adapters[-2:] if is_last else adapters[:2])
    casts = experts.op_spec.adapters.casts
    sums = MergedWeights(work.num_experts, work.in_features, work.out_features, rank, casts)
    merge = Module(f"{module.name}.lora_sum", sums, parameters, parameter_owner=experts.name)
    return [merge, replace(module, op_spec=replace(work, is_merged=True))]


def _add_shared_adapter(module: Module, work: GroupedLinear, rank: int, split: ExpertSplit) -> list[Module]:
    """Two products of all rows of the rank, and the sum with the experts' own."""
    down = Linear(work.in_features, rank, is_adapter=True)
    up = Linear(rank, work.out_features)
    modules = [module]
    for name, product in (("lora_A.default", down), ("lora_B.default", up)):
        shape = (product.out_features, product.in_features)
        if split.ranks > 1:
            numel = product.out_features * product.in_features
            reduction = Exchange(None, "all_reduce", 0, split.ranks, EXPERT, numel=numel)
            modules.append(Module(f"{module.name}.{name} all_reduce", reduction))
        modules.append(_adapter_module(module, name, product, _adapter_weight(module, shape)))
    return [*modules, _sum(module, work)]


def _add_adapter_per_expert(module: Module, work: GroupedLinear, rank: int) -> list[Module]:
    """Two products of every expert's rows, and the sum with the expert's own."""
    count = work.num_experts
    kernel: GroupedKernel = "loop" if work.kernel == "loop" else "grouped"
    down = GroupedLinear(count, work.in_features, rank, kernel, work.has_even_rows, is_adapter=True)
    up = GroupedLinear(count, rank, work.out_features, kernel, work.has_even_rows)
    pairs = (("lora_A.default", down), ("lora_B.default", up))
    adapter_products = [
        _adapter_module(
            module, name, product, _adapter_weight(module, (count, product.out_features, product.in_features))
        )
        for name, product in pairs
    ]
    return [module, *adapter_products, _sum(module, work)]


def _adapter_weight(module: Module, shape: tuple[int, ...]) -> Parameter:
    is_expert_parallel = any(parameter.rank_kind for parameter in module.parameters)
    return Parameter("weight", shape, rank_kind=EXPERT_DATA if is_expert_parallel else "")


def _sum(module: Module, work: GroupedLinear) -> Module:
    """The adapter's output added to the product's."""
    return replace(module, name=f"{module.name}.sum", op_spec=AdapterSum(work.out_features), parameters=())


def _adapter_module(module: Module, name: str, work: Linear | GroupedLinear, weight: Parameter) -> Module:
    """A module that sees the rows that the product sees."""
    return replace(
        module, name=f"{module.name}.{name}", op_spec=work, parameters=(weight,), shares_input=False
    )


def output_dimension(parameter: Parameter, work: Linear) -> int:
    """The dimension of a weight or bias that its product's outputs are in: the first, in GPT-2's Conv1D the
    last."""
    is_transposed = parameter.shape == (work.in_features, work.out_features)
    return 1 if is_transposed and work.in_features != work.out_features else 0


def shard_parameter(parameter: Parameter, dimension: int, ranks: int) -> Parameter:
    """The parameter cut along a dimension."""
    return resize_parameter(parameter, dimension, parameter.shape[dimension] // ranks)


def resize_parameter(parameter: Parameter, dimension: int, size: int) -> Parameter:
    """The parameter with `size` rows along a dimension."""
    shape = list(parameter.shape)
    shape[dimension] = size
    return replace(parameter, shape=tuple(shape))
