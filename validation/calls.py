"""A collective call as a value, and lists of them as short text. No torch needed.

A step of an 80-block model has hundreds of calls and little to say, so a list is written with its repeats
folded: `{"times": 79, "calls": [[...], [...]]}` stands for these two calls 79 times over. Block numbers in
unit names become `*`, or nothing would repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call of one rank.

    `bytes` is the full tensor: output of an all-gather, input of a reduce-scatter or all-to-all, buffer of an
    all-reduce or broadcast. Group member i is `group_stride` ranks after member i - 1. `unit` is the module
    it was made for, where that is known.
    """

    kind: str
    bytes: int
    dtype: str
    group_size: int
    group_stride: int = 1
    unit: str = ""

    @property
    def wire(self) -> tuple[str, int, str, int, int]:
        """What goes over the wire: everything but the unit."""
        return self.kind, self.bytes, self.dtype, self.group_size, self.group_stride

    @property
    def generic(self) -> Call:
        """The same call with block numbers in the unit replaced by `*`."""
        return replace(self, unit=re.sub(r"\b\d+\b", "*", self.unit))


def fold(calls: Iterable[Call]) -> list[Any]:
    """Calls as JSON rows `[kind, bytes, dtype, group size, group stride, unit]`, repeats folded."""
    from zsim.study.call_lists import fold_rows  # not where ranks start, which only make calls

    return fold_rows([[*call.wire, call.unit] for call in (call.generic for call in calls)])


def unfold(folded: Iterable[Any]) -> list[Call]:
    """The calls that `fold` was given, with generic units."""
    calls: list[Call] = []
    for entry in folded:
        if isinstance(entry, dict):
            calls.extend([Call(*row) for row in entry["calls"]] * entry["times"])
        else:
            calls.append(Call(*entry))
    return calls
