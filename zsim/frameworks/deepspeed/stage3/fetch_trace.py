"""The recorded order of ZeRO-3's modules and their parameters, which fetches follow.

The logic of DeepSpeed 0.19.8's `partitioned_param_coordinator.py`, for the complete trace of one forward and
backward (module_order.py). Sizes are elements of whole parameters.

# [Note: external parameters]
A weight that another module's forward reads without calling the owner of the weight (the head's, by a fused
loss) becomes a parameter of the reading module, here the model itself (`parameter_offload.py`,
`ZeROOrderedDict`). It is fetched when the model's forward begins and held to the end of backward, because the
model's inputs have no gradient and so no hook after backward. Without a backward it is not used again, and
the hook after the model's forward releases it.

# [Note: leaf modules]
By default every module that owns parameters is fetched by itself. `stage3_module_granularity_threshold` and
`leaf_module` make whole subtrees one unit (DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`,
`utils/z3_leaf_module.py`): the granularity of a module is its parameters' elements over the number of modules
with parameters in it, itself included. Lists do not count, and no module above 1e9 elements becomes a unit.

# [Note: weights that autograd holds]
A release empties the parameter, and what autograd saved of it, which is the parameter itself (torch 2.13
`saved_variable.cpp`). A view has the gathered storage still, and keeps it until its backward: a transposed
weight, which `memory_efficient_linear` therefore does not save, and experts stacked as [experts, out, in],
whose grouped product transposes them and whose loop takes slices (transformers 5.24 `integrations/moe.py`,
DeepSpeed 0.19.8 `moe/ep_experts.py`). Backward gathers them once more beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zsim.cost.memory import flat_numel
from zsim.frameworks.deepspeed.expert_libraries import AUTOEP
from zsim.frameworks.deepspeed.settings.config import ZeroConfig
from zsim.frameworks.deepspeed.settings.resolve import EXPERT_BLOCKS
from zsim.frameworks.deepspeed.stage3.module_order import (
    ROOT,
    HookedModules,
    calls_without_backward,
    expert_lists,
    hooked_modules,
)
from zsim.operations.operation import Role, operations_of
from zsim.operations.router import Router
from zsim.plan.workload.workload import Workload

_MAX_ELEMENTS = 1_000_000_000
# Families whose experts are [experts, in, out] (`is_transposed=True` in transformers 5.24). Before 5.0
# gpt-oss looped over copies of its experts, which autograd held (`GptOssExperts`): not simulated.
_STORED_AS_MULTIPLIED = frozenset({"gpt_oss"})


@dataclass(frozen=True, slots=True)
class ZeroParameter:
    """One partitioned parameter. Every rank holds ceil(numel / ranks) elements, and the last shards are
    padded. Elements of 4-bit weights are the 16-bit numbers that they are stored as.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    shard_numel: int
    padded_numel: int
    is_persistent: bool
    is_trained: bool = True
    belongs_to: str = ""
    """The kind of ranks that have the parameter if not all do (routed experts), else ""."""

    @property
    def trained_shard_numel(self) -> int:
        """Elements of the shard that the optimizer updates."""
        return self.shard_numel if self.is_trained else 0


@dataclass(frozen=True, slots=True)
class FetchTrace:
    """The order in which modules are entered, and their parameters.

    A unit is a module with parameters, or a leaf module.
    """

    parameters: tuple[ZeroParameter, ...]
    parameters_per_unit: dict[str, tuple[int, ...]]
    first: dict[str, str]
    """Maps the module call that begins a unit, of those with a backward, to the unit."""
    last: dict[str, str]
    """Maps the module call that ends a unit in forward order to the unit."""
    hooked: HookedModules
    """All hooked modules."""
    steps: tuple[tuple[int, ...], ...]
    """`steps[i]` are the parameters of the module entered at step i."""
    traversed: tuple[int, ...]
    """`traversed[i]` is the number of elements of all steps before i."""
    next_use: tuple[tuple[int, ...], ...]
    """`next_use[i][k]` is the next step after i that uses the k-th parameter of step i (`len(steps)` if there
    is none).
    """
    external: tuple[int, ...] = ()
    """The parameters of the model itself. See [Note: external parameters]."""
    viewed: frozenset[int] = frozenset()
    """The experts' weights that are read as views. See [Note: weights that autograd holds]."""


def trace_of(workload: Workload, zero: ZeroConfig, world_size: int, expert_ranks: int = 0) -> FetchTrace:
    """The trace that DeepSpeed records: modules in the order in which their hooks fire. Shards are cut over
    `world_size` ranks, and those of experts that fewer ranks have over `expert_ranks`.
    """
    recorded = workload.memoize(_record_trace, zero)
    return replace(recorded, parameters=tuple(_parameters(workload, zero, world_size, expert_ranks)))


def _record_trace(workload: Workload, zero: ZeroConfig) -> FetchTrace:
    """The trace without its parameters: it is the same for any number of ranks."""
    named = list(workload.model.named_parameters())
    numels = [flat_numel(parameter) for _, parameter in named]
    parameters_per_module = parameters_of_calls(
        workload, {name: number for number, (name, _) in enumerate(named)}
    )
    external = parameters_per_module.pop(workload.fused_head, ()) if workload.fused_head else ()
    module_numels = {
        name: sum(numels[number] for number in module_parameters)
        for name, module_parameters in parameters_per_module.items()
        if module_parameters
    }
    products = [
        call
        for segment in workload.segments
        for call in segment.calls
        if call.module.role is Role.EXPERT_PRODUCT
    ]
    experts = list(dict.fromkeys(call.name.rpartition(".")[0] for call in products))
    family = _experts_family(workload)
    expert_modules = _expert_units(experts, expert_lists(workload), family, zero)
    unit_of = _unit_names(module_numels, workload.model.block_lists, zero, expert_modules)
    parameters_per_unit: dict[str, tuple[int, ...]] = {ROOT: external} if external else {}
    for name in module_numels:
        unit_parameters = (*parameters_per_unit.get(unit_of[name], ()), *parameters_per_module[name])
        parameters_per_unit[unit_of[name]] = tuple(sorted(set(unit_parameters)))
    last = {unit: name for name, unit in unit_of.items()}
    modules_without_backward = calls_without_backward(workload)
    first = {unit: name for name, unit in reversed(unit_of.items()) if name not in modules_without_backward}
    ends = ({name: unit for unit, name in first.items()}, {name: unit for unit, name in last.items()})
    hooked = hooked_modules(workload, unit_of)
    steps = tuple([parameters_per_unit.get(module, ()) for module in hooked.order(workload)])
    traversed, next_use = _distances(numels, steps)
    numbers = (
        [] if family in _STORED_AS_MULTIPLIED else [parameters_per_module[call.name] for call in products]
    )
    viewed = frozenset(number for used in numbers for number in used if len(named[number][1].shape) == 3)
    return FetchTrace((), parameters_per_unit, *ends, hooked, steps, traversed, next_use, external, viewed)


def _experts_family(workload: Workload) -> str:
    """The family whose class has router and experts, "" where AutoEP's class has replaced it."""
    modules = (call.module for segment in workload.segments for call in segment.calls)
    is_replaced = any(router.library == AUTOEP.kernels for router in operations_of(modules, Router))
    return "" if is_replaced else workload.model.family


def _parameters(
    workload: Workload, zero: ZeroConfig, world_size: int, expert_ranks: int
) -> list[ZeroParameter]:
    """The parameters in the order of `named_parameters()`, by which DeepSpeed numbers them."""
    parameters = []
    persistent_left = zero.model_persistence_threshold
    for name, parameter in workload.model.named_parameters():
        numel = flat_numel(parameter)
        is_persistent = numel <= zero.param_persistence_threshold and numel <= persistent_left
        persistent_left -= numel if is_persistent else 0
        ranks = expert_ranks if parameter.rank_kind else world_size
        shard = -(-numel // ranks)
        padded, is_trained = shard * ranks, parameter.trainable
        parameters.append(
            ZeroParameter(
                name, parameter.shape, numel, shard, padded, is_persistent, is_trained, parameter.rank_kind
            )
        )
    return parameters


def parameters_of_calls(workload: Workload, numbers: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The parameters that each module call uses. A tied head uses the embedding's weight, and a layer that
    shares a block the parameters of the block's first layer.
    """
    lent: dict[str, tuple[int, ...]] = {}
    parameters_per_module: dict[str, tuple[int, ...]] = {}
    embedding: tuple[int, ...] = ()
    for segment in workload.segments:
        for call in segment.calls:
            used_parameters = tuple(numbers[call.parameter_name(parameter)] for parameter in call.parameters)
            if call.module.lender:
                used_parameters = lent[call.module.lender]
            lent[call.name] = used_parameters
            if call.module.is_idle:
                used_parameters = ()
            elif call.module.role is Role.EMBEDDING and not embedding:
                embedding = used_parameters
            elif call.module.role is Role.PRODUCT and not used_parameters and segment.kind == "after":
                used_parameters = embedding
            parameters_per_module[call.name] = used_parameters
    return parameters_per_module


def _distances(
    numels: Sequence[int], steps: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    lengths = [sum([numels[number] for number in step]) if step else 0 for step in steps]
    traversed = accumulate(lengths, initial=0)
    next_step: dict[int, int] = {}
    next_use: list[tuple[int, ...]] = [()] * len(steps)
    never = len(steps)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step:
            next_use[index] = tuple([next_step.get(number, never) for number in step])
            next_step.update(dict.fromkeys(step, index))
    return tuple(traversed), tuple(next_use)


def _expert_units(stacked: Sequence[str], lists: Sequence[str], family: str, zero: ZeroConfig) -> list[str]:
    """The units of routed experts.

    They are the modules of `stacked` weights. Where the class of the modules around these and around `lists`
    of experts is a leaf, they are the modules of that class, with their routers. Experts of a list that is in
    no leaf are fetched product by product.
    """
    if EXPERT_BLOCKS.get(family) not in zero.leaf_module.classes:
        return list(stacked)
    return [name.rpartition(".")[0] for name in (*stacked, *lists)]


def _unit_names(
    numels: Mapping[str, int], lists: Sequence[str], zero: ZeroConfig, unit_parents: Sequence[str] = ()
) -> dict[str, str]:
    """The unit of every module in `numels` (full dotted name -> elements): the module, or a parent.

    `lists` are the ModuleLists, which are never called and so never units. `unit_parents` are parents that
    are units.
    """
    leaf = zero.leaf_module
    chosen = _parents_below_threshold(numels, lists, zero.module_granularity_threshold) | set(unit_parents)
    for parent in _parents(numels):
        if parent in leaf.names or any(parent.endswith(suffix) for suffix in leaf.name_suffixes):
            chosen.add(parent)
    chosen -= set(lists)
    return {name: next((parent for parent in _ancestors(name) if parent in chosen), name) for name in numels}


def _ancestors(name: str) -> list[str]:
    """The parents of module `name`, outermost first. "" is the model."""
    components = name.split(".")
    return ["", *(".".join(components[:count]) for count in range(1, len(components)))]


def _parents(numels: Mapping[str, int]) -> list[str]:
    owners = [name for name, numel in numels.items() if numel]
    return list(dict.fromkeys(parent for name in owners for parent in _ancestors(name)))


def _parents_below_threshold(numels: Mapping[str, int], lists: Sequence[str], threshold: int) -> set[str]:
    """The parents whose granularity is at most `threshold`."""
    if threshold <= 0:
        return set()
    elements: dict[str, int] = {}
    modules: dict[str, int] = {}
    for parent in _parents(numels):
        modules[parent] = 0 if parent in lists else 1
        elements[parent] = 0
    for name, numel in numels.items():
        if not numel:
            continue
        for parent in _ancestors(name):
            elements[parent] += numel
            modules[parent] += 1
    for inner in list(modules):
        if inner and inner not in lists:
            for parent in _ancestors(inner):
                modules[parent] += 1
    return {
        parent
        for parent in elements
        if parent not in lists
        and elements[parent] <= _MAX_ELEMENTS
        and elements[parent] // modules[parent] <= threshold
    }
