"""Ranges of a profile that name the unit of the model that a framework works on.

Phase (forward, backward, optimizer) and module at a time of a host thread, from the ranges that torch
writes around its work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import cast

from zsim.specs.strategy.registry import kinds, role_of
from zsim.trace.readers.kineto.file import KinetoFile, Thread
from zsim.trace.readers.recording import Ranges


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


class Context:
    """Phase and module at a time of a thread, to be called in the order of time."""

    def __init__(self, file: KinetoFile) -> None:
        self._annotations = file.annotations
        self._main = file.step_thread or file.optimizer_thread
        self._backward: dict[Thread, Ranges[str]] = {}
        for thread, ranges in file.backward.items():
            self._backward[thread] = Ranges()
            for start, end in ranges:
                self._backward[thread].add(start, end, "backward")

    def at(self, thread: Thread, moment: int) -> tuple[str, str]:
        """(phase, module), each "" if not known."""
        ranges = self._annotations.get(thread)
        names = ranges.containing(moment) if ranges is not None else []
        module = next((unit for name in reversed(names) if (unit := module_of(name))), "")
        phase = next((phase for name in reversed(names) if (phase := phase_of(name))), "")
        return phase or self._phase_by_autograd(thread, moment), module

    def _phase_by_autograd(self, thread: Thread, moment: int) -> str:
        backward = self._backward.get(thread)
        if backward is None:
            return "forward" if self._backward else ""
        if self._main is not None and thread != self._main:
            return "backward"  # autograd's own thread
        return "backward" if backward.containing(moment) else "forward"


def phase_of(name: str) -> str:
    """The phase that a range names, as in `FSDP::pre_backward (layers.3)`, `## forward ##`, or "" if none."""
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    lower = name.lower()
    is_forward, is_backward = "forward" in lower, "backward" in lower
    if is_forward != is_backward:
        return "forward" if is_forward else "backward"
    return "optimizer" if lower.strip("# ") in ("optimizer", "optimizer step", "update") else ""
