"""What a reader of a topology description found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundTopology:
    """What an importer read: tables over `base`, and what a person should know."""

    base: str
    description: str
    tables: Tables
    top: Mapping[str, Any]
    notes: tuple[str, ...] = ()
