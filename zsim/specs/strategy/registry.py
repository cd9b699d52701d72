"""The frameworks that zsim simulates, by the name that `strategy.kind` gives them, and what each is asked.

A framework is a folder of `zsim.frameworks` whose `__init__.py` has a table of its `ROLES`: the parts of zsim
that ask frameworks for something, with the module of the folder that answers each. Core looks a framework up
by its kind and names none.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zsim.files import preset_table

if TYPE_CHECKING:
    from zsim.specs.strategy.table import StrategyConfig, StrategyTable

Table = TypeVar("Table", bound="StrategyTable")  # by name: zsim --help asks for kinds and needs no pydantic
Config = TypeVar("Config", bound="StrategyConfig")

MODEL_PARALLEL_KEYS = frozenset(
    f"parallelism.{name}"
    for name in (
        "tensor", "sequence_parallel", "async_tensor", "gather_per_product", "context", "order",
        "expert", "expert_tensor", "dispatcher", "capacity_factor", "expert_imbalance",
    )
)  # fmt: skip
"""Keys of tensor, context and expert parallelism."""
PIPELINE_KEYS = frozenset(
    f"parallelism.{name}"
    for name in (
        "pipeline", "schedule", "virtual_stages", "first_stage_less_layers", "last_stage_less_layers",
        "layers_per_stage", "passes",
    )
)  # fmt: skip
"""Keys of pipelines."""


class Framework(Generic[Table, Config]):
    """A framework, as its folder in `zsim.frameworks` describes it.

    Each method is a question that resolving asks of every framework. Its answer here is that of a framework
    without anything special, and a framework's own class answers otherwise where it differs.
    """

    table: type[Table]
    """Its `[strategy]`."""
    title: str
    """The name that validated runs and sentences have for it."""
    order: int
    """Its place where frameworks are listed by how they build on each other."""
    other_names: Mapping[str, str] = {}
    """What people call it and its settings, in small letters and digits alone, with the keys that say it."""
    unread_keys: frozenset[str] = frozenset()
    """Dotted keys of an experiment beside `[strategy]` that it refuses, or tables of which it refuses all
    keys.
    """


_PACKAGE = "zsim.frameworks"


def kinds() -> tuple[str, ...]:
    """The values of `strategy.kind`, in the order of the alphabet."""
    return kinds_with("framework")


@cache
def kinds_with(role: str) -> tuple[str, ...]:
    """The kinds that have a role, in the order of the alphabet."""
    return tuple(kind for kind, roles in _roles_by_kind().items() if role in roles)


@cache
def _roles_by_kind() -> Mapping[str, Mapping[str, str]]:
    """The module of each role by kind, in the order of the alphabet. Folders without roles are shared."""
    return values_in_folders(_PACKAGE, "ROLES")


def values_in_folders(package: str, name: str) -> dict[str, Any]:
    """`name` of each folder of a package whose `__init__.py` has it, by folder in the order of the
    alphabet."""
    (path,) = importlib.import_module(package).__path__
    folders = sorted(file.parent.name for file in Path(path).glob("*/__init__.py"))
    modules = {folder: importlib.import_module(f"{package}.{folder}") for folder in folders}
    return {folder: getattr(module, name) for folder, module in modules.items() if hasattr(module, name)}


def workflow_names() -> tuple[str, ...]:
    """The values of `rl.framework`: folders with the role `workflow`, with hyphens for underscores."""
    return tuple(folder.replace("_", "-") for folder in kinds_with("workflow"))


@cache
def kinds_in_order() -> tuple[str, ...]:
    """The values of `strategy.kind`, in the order of `Framework.order`."""
    return tuple(sorted(kinds(), key=lambda kind: framework_of(kind).order))


def meant_strategies(name: str) -> tuple[str, ...]:
    """The keys of `[strategy]` that say what people call "ZeRO-3" or the like, by `Framework.order`."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    names = [framework_of(kind).other_names for kind in kinds_in_order()]
    return tuple(keys[letters] for keys in names if letters in keys)


def is_strategy(kind: object) -> bool:
    """Whether `kind`, which may be any value of a file, is a known strategy."""
    return isinstance(kind, str) and kind in kinds()


def role_of(kind: str, role: str, name: str, default: Any = None) -> Any:
    """`name` in the module that has a role of a framework, for the base class of that role to type.

    `default` is the answer for a framework that lacks the role, or this name in its module.
    """
    roles = _roles_by_kind()[kind]
    if default is not None and role not in roles:
        return default
    module = importlib.import_module(f"{_PACKAGE}.{kind}.{roles[role]}")
    return getattr(module, name) if default is None else getattr(module, name, default)


def framework_of(kind: str) -> Framework[Any, Any]:
    """The framework of a kind."""
    framework: Framework[Any, Any] = role_of(kind, "framework", "FRAMEWORK")
    return framework


class _Tables(Mapping[str, "type[StrategyTable]"]):
    """The table of each kind, which is imported when it is asked for."""

    def __getitem__(self, kind: str) -> type[StrategyTable]:
        if not is_strategy(kind):
            raise KeyError(kind)
        return framework_of(kind).table

    def __iter__(self) -> Iterator[str]:
        return iter(kinds())

    def __len__(self) -> int:
        return len(kinds())


STRATEGIES: Mapping[str, type[StrategyTable]] = _Tables()


_PRESET = "choices"


def default_kind() -> str:
    """The kind of an experiment that names none."""
    kind: str = preset_table(_PRESET)["default_kind"]
    return kind


def values_of(key: str) -> tuple[str, ...]:
    """The values of a key that names frameworks, or what is theirs."""
    return tuple(preset_table(_PRESET)["values"][key])


def default_workflow() -> str:
    """The framework of a reinforcement learning that names none."""
    name: str = preset_table(_PRESET)["default_workflow"]
    return name
