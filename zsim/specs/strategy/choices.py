"""Choices of an experiment that name frameworks (`presets/choices.toml`)."""

from __future__ import annotations

from zsim.resources import preset_table

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
