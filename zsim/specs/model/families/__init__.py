"""Builders of models, one per family of config.json."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function of this package. Its module is imported when it is called."""

    name: str
    """Its module and its name, as in "classic.qwen"."""

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        module, _, function = self.name.partition(".")
        return cast(Callable[..., Any], getattr(importlib.import_module(f"{__name__}.{module}"), function))

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)
