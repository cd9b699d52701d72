"""The result of reading a topology description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ImportedTopology:
    """An imported topology: tables over the preset `base`, keys of the top level, and notes for the user."""

    base: str
    description: str
    tables: Tables
    top: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts node9 before node10."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]


def gigabits(rate: float) -> str:
    """Gb/s as files have it."""
    return f"{rate:g} Gb/s"
