"""The units of parameters that are gathered and reduced together: one per block, and the root for the
rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn as nn


@dataclass
class Member:
    """A parameter and all its places in the model (more than one: tied weights)."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class Part:
    """The parameters of one unit, in `named_parameters()` order."""

    name: str
    module: nn.Module
    trained: list[Member] = field(default_factory=list)
    frozen: list[Member] = field(default_factory=list)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Every member of the outermost ModuleLists, where transformers usually have their blocks."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks.extend(child if isinstance(child, nn.ModuleList) else find_blocks(child))
    return blocks


def partition(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Part]:
    """The root first, then one part per block.

    A parameter that two blocks share belongs to the root, which is gathered whenever a block computes.
    """
    names = {module: name for name, module in model.named_modules()}
    parts = [Part("root", model), *(Part(names[block], block) for block in blocks)]
    part_of: dict[nn.Module, Part] = dict.fromkeys(model.modules(), parts[0])
    for part in parts[1:]:
        for module in part.module.modules():
            if part_of[module] is not parts[0]:
                raise ValueError(f"blocks must not contain each other: '{names[module]}' is in two of them")
            part_of[module] = part
    members: dict[nn.Parameter, Member] = {}
    homes: dict[nn.Parameter, set[str]] = {}
    for module, module_name in names.items():
        for attribute, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{attribute}" if module_name else attribute
            member = members.setdefault(parameter, Member(full_name, parameter))
            member.places.append((module, attribute))
            homes.setdefault(parameter, set()).add(part_of[module].name)
    by_name = {part.name: part for part in parts}
    for parameter, member in members.items():
        home = homes[parameter]
        part = by_name[next(iter(home))] if len(home) == 1 else parts[0]
        (part.trained if parameter.requires_grad else part.frozen).append(member)
    return parts
