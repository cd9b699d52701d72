"""A collective call as a value, and lists of them as short text. No torch needed.

A step of an 80-block model has hundreds of calls and little to say, so a list is written with its repeats
folded: `{"times": 79, "calls": [[...], [...]]}` stands for these two calls 79 times over. Block numbers in
unit names become `*`, or nothing would repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

LONGEST_PERIOD = 6


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
    rows = [[*call.wire, call.unit] for call in (call.generic for call in calls)]
    folded: list[Any] = []
    start = 0
    while start < len(rows):
        period, times = _best_repeat(rows, start)
        part = rows[start : start + period]
        folded.extend(part if times == 1 else [{"times": times, "calls": part}])
        start += period * times
    return folded


def unfold(folded: Iterable[Any]) -> list[Call]:
    """The calls that `fold` was given, with generic units."""
    calls: list[Call] = []
    for entry in folded:
        if isinstance(entry, dict):
            calls.extend([Call(*row) for row in entry["calls"]] * entry["times"])
        else:
            calls.append(Call(*entry))
    return calls


def _best_repeat(rows: Sequence[list[Any]], start: int) -> tuple[int, int]:
    """(period, times) of the repeat at `start` that spares most rows; (1, 1) where none does."""
    best = (1, 1)
    for period in range(1, LONGEST_PERIOD + 1):
        part, times = rows[start : start + period], 1
        while rows[start + times * period : start + (times + 1) * period] == part:
            times += 1
        if period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best
