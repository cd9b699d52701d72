"""The frameworks that zsim simulates, by the name that `strategy.kind` gives them.

A framework is a folder of `zsim.frameworks` with a module `framework`. Its other modules have the names of
the rooms that ask for them. Core looks a framework up by its kind and names none.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.resources import PRESETS

if TYPE_CHECKING:
    from zsim.specs.strategy.framework import Framework
    from zsim.specs.strategy.table import StrategyTable

_PACKAGE = "zsim.frameworks"


@cache
def kinds() -> tuple[str, ...]:
    """The values of `strategy.kind`, in the order of the alphabet."""
    (folder,) = importlib.import_module(_PACKAGE).__path__
    return tuple(sorted(path.parent.name for path in Path(folder).glob("*/framework.py")))


@cache
def _choices() -> Mapping[str, Any]:
    return tomllib.loads((PRESETS / "choices.toml").read_text())


def default_kind() -> str:
    """The kind of an experiment that names none."""
    kind: str = _choices()["default_kind"]
    return kind


def values_of(key: str) -> tuple[str, ...]:
    """The values of a key that names frameworks, or what is theirs."""
    return tuple(_choices()["values"][key])


def is_strategy(kind: object) -> bool:
    """Whether `kind`, which may be any value of a file, is a known strategy."""
    return isinstance(kind, str) and kind in kinds()


def role_of(kind: str, module: str, name: str) -> Any:
    """`name` in `module` of a framework's folder, for the base class of that role to type."""
    return getattr(importlib.import_module(f"{_PACKAGE}.{kind}.{module}"), name)


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
