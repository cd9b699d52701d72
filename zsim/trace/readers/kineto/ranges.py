"""Ranges of a profile that name the unit of the model that a framework works on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import cast

from zsim.specs.strategy.registry import kinds, role_of


@dataclass(frozen=True)
class UnitRanges:
    """The ranges that a framework's hooks write.

    `RANGES` in the module `ranges` of the framework's folder.
    """

    unit: re.Pattern[str]
    """The name of a range of a unit, whose group `unit`, or else `next`, is the unit."""
    root_names: frozenset[str]
    """Names of ranges of the root, which has no name."""

    def module_of(self, name: str) -> str:
        """The unit of a range, "root" for the root. Empty for a range of another kind."""
        match = self.unit.match(name)
        if match:
            return match["unit"] or match["next"]
        return "root" if name in self.root_names else ""


_NONE = UnitRanges(re.compile(r"(?!)"), frozenset())


@cache
def _all_ranges() -> tuple[UnitRanges, ...]:
    """The ranges of all frameworks."""
    ranges = (cast(UnitRanges, role_of(kind, "ranges", "RANGES", _NONE)) for kind in kinds())
    return tuple(of_kind for of_kind in ranges if of_kind is not _NONE)


def module_of(name: str) -> str:
    """The unit that a range names, "root" for the root, or "" if none."""
    return next((unit for ranges in _all_ranges() if (unit := ranges.module_of(name))), "")
