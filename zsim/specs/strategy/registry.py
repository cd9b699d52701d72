"""The frameworks that zsim simulates, by the name that `strategy.kind` gives them.

A framework is a folder of `zsim.frameworks` with a module `framework`. Its other modules have the names of
the rooms that ask for them. Core looks a framework up by its kind and names none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zsim.specs.strategy.framework import Framework
    from zsim.specs.strategy.table import StrategyTable

_PACKAGE = "zsim.frameworks"


@cache
def folders_with(*modules: str) -> tuple[str, ...]:
    """The folders of `zsim.frameworks` with modules of all these names, in the order of the alphabet."""
    (path,) = importlib.import_module(_PACKAGE).__path__
    folders = sorted(path.parent for path in Path(path).glob(f"*/{modules[0]}.py"))
    return tuple(
        folder.name for folder in folders if all((folder / f"{name}.py").exists() for name in modules)
    )


def kinds() -> tuple[str, ...]:
    """The values of `strategy.kind`, in the order of the alphabet."""
    return kinds_with("framework")


def kinds_with(module: str) -> tuple[str, ...]:
    """The kinds whose folder has a module of this name, in the order of the alphabet."""
    return folders_with("framework", module)


def workflow_names() -> tuple[str, ...]:
    """The values of `rl.framework`: folders with a module `workflow`, with hyphens for underscores."""
    return tuple(folder.replace("_", "-") for folder in folders_with("workflow"))


@cache
def kinds_in_order() -> tuple[str, ...]:
    """The values of `strategy.kind`, in the order of `Framework.order`."""
    return tuple(sorted(kinds(), key=lambda kind: framework_of(kind).order))


def is_strategy(kind: object) -> bool:
    """Whether `kind`, which may be any value of a file, is a known strategy."""
    return isinstance(kind, str) and kind in kinds()


def role_of(kind: str, module: str, name: str, default: Any = None) -> Any:
    """`name` in `module` of a framework's folder, for the base class of that role to type.

    `default` is the answer for a framework that lacks the module.
    """
    path = f"{_PACKAGE}.{kind}.{module}"
    if default is not None and importlib.util.find_spec(path) is None:
        return default
    return getattr(importlib.import_module(path), name)


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
