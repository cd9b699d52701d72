"""Choices of an experiment that name frameworks."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from zsim.resources import PRESETS


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


def default_workflow() -> str:
    """The framework of a reinforcement learning that names none."""
    name: str = _choices()["default_workflow"]
    return name
