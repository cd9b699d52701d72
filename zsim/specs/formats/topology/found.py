"""The result of reading a topology description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.dataclass import dataclass

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundTopology:
    """An imported topology: tables over the preset `base`, keys of the top level, and notes for the user."""

    base: str
    description: str
    tables: Tables
    top: Mapping[str, Any]
    notes: tuple[str, ...] = ()
