"""A framework's own files imported among stubs of all its others, so that it needs not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_OPTIONAL = ("nemo", "transformer_engine")  # imported by Megatron where they are installed


def real_modules(root: Path, names: Sequence[str], given: Mapping[str, Any]) -> list[Any]:
    """The modules `names` from under `root`. Every other module of their package is a stub, whose names are
    those `given` or mocks."""
    sys.meta_path.insert(0, _Finder(root, names, given))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        del sys.meta_path[0]


class _Stub(ModuleType):
    """A module that has every name."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._given[name] if name in self._given else MagicMock()


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path, names: Sequence[str], given: Mapping[str, Any]) -> None:
        self.root, self.names, self.given = root, names, given
        self.stubbed = {names[0].split(".")[0], *_OPTIONAL}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.names:
            return PathFinder.find_spec(name, [str(self.root.joinpath(*name.split(".")[:-1]))])
        if name.split(".")[0] in self.stubbed:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name, self.given)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a stub's names are made when asked for."""
