"""The modules that ZeRO-3 fetches at once with everything inside: DeepSpeed's "leaf modules".

By default every module that owns parameters is fetched by itself. `stage3_module_granularity_threshold` and
`leaf_module` make whole subtrees one unit (DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`,
`utils/z3_leaf_module.py`): the granularity of a module is its parameters' elements over the number of modules
with parameters in it, itself included. Lists do not count, and no module above 1e9 elements becomes a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.frameworks.deepspeed.settings.config import ZeroConfig
from zsim.frameworks.deepspeed.settings.resolve import EXPERT_BLOCKS

_MAX_ELEMENTS = 1_000_000_000


def expert_units(stacked: Sequence[str], lists: Sequence[str], family: str, zero: ZeroConfig) -> list[str]:
    """The units of routed experts.

    They are the modules of `stacked` weights. Where the class of the modules around these and around `lists`
    of experts is a leaf, they are the modules of that class, with their routers. Experts of a list that is in
    no leaf are fetched product by product.
    """
    if EXPERT_BLOCKS.get(family) not in zero.leaf_module.classes:
        return list(stacked)
    return [name.rpartition(".")[0] for name in (*stacked, *lists)]


def unit_names(
    numels: Mapping[str, int], lists: Sequence[str], zero: ZeroConfig, unit_parents: Sequence[str] = ()
) -> dict[str, str]:
    """The unit of every module in `numels` (full dotted name -> elements): the module, or a parent.

    `lists` are the ModuleLists, which are never called and so never units. `unit_parents` are parents that
    are units.
    """
    leaf = zero.leaf_module
    if (
        zero.module_granularity_threshold <= 0
        and not leaf.names
        and not leaf.name_suffixes
        and not unit_parents
    ):
        return {name: name for name in numels}
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
