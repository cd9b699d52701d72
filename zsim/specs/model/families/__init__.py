"""Builders of models, one per family of config.json."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def builder(name: str) -> Callable[..., Any]:
    """The function `name`, "module.function", whose module of this package is imported when it is called."""
    module, _, function = name.partition(".")
    return lambda *arguments: getattr(importlib.import_module(f"{__name__}.{module}"), function)(*arguments)
