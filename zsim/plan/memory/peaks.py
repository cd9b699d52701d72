"""Bytes that a program holds, as its host allocates: no clock, no allocator; see [Note: memory follows the
host] in zsim.plan.ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import TypeVar

from zsim.plan.ops import CATEGORIES, Category, Device, Memory, MemoryChange, Plan, Program

Owned = tuple[Category, str]  # a category, and who holds it ("" for what is pooled)
_Key = TypeVar("_Key", bound=Hashable)


def on_device(device: Device, *parts: Iterable[Memory | MemoryChange]) -> list[Memory | MemoryChange]:
    """What stands in `parts` of one device's memory, in order."""
    return [one for part in parts for one in part if one.device == device]


def held(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Bytes of each key once all of `changes` are made, the resident among them."""
    levels: dict[_Key, int] = {}
    for change in changes:
        name = key(change)
        levels[name] = levels.get(name, 0) + change.bytes
    return levels


def maxima(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Maximum bytes of each key, none below 0, as `changes` are made one after the other."""
    levels: dict[_Key, int] = {}
    highest: dict[_Key, int] = {}
    for change in changes:
        name = key(change)
        level = levels[name] = levels.get(name, 0) + change.bytes
        if level > highest.get(name, 0):
            highest[name] = level
    return highest


def category_of(change: Memory | MemoryChange) -> Category:
    return change.category


def owner_of(change: Memory | MemoryChange) -> Owned:
    """What is resident has no owner."""
    return change.category, change.owner if isinstance(change, MemoryChange) else ""


def device_peaks(program: Program) -> dict[Device, int]:
    """Maximum bytes of a rank on each device over the step."""
    changes: list[Memory | MemoryChange] = [*program.resident, *program.memory]
    devices = dict.fromkeys([change.device for change in changes])
    peaks = {device: _highest([c.bytes for c in changes if c.device == device]) for device in devices}
    return {device: peak for device, peak in peaks.items() if peak > 0}


def pinned_peak(program: Program) -> int:
    """Maximum page-locked bytes of a rank over the step."""
    changes: list[Memory | MemoryChange] = [*program.resident, *program.memory]
    return _highest([change.bytes for change in changes if change.is_pinned])


def _highest(changes: Iterable[int]) -> int:
    """Maximum of what there is, not below 0, as `changes` are made one after the other."""
    return max(accumulate(changes, initial=0))


def fullest_program(plan: Plan) -> Program:
    """The program whose ranks hold most on their GPU over the step; the first of several."""
    if len(plan.programs) == 1:
        return plan.programs[0]
    return max(plan.programs, key=lambda program: device_peaks(program).get("gpu", 0))


def plan_peaks(plan: Plan) -> dict[str, int]:
    """Each category's maximum on the fullest GPU over the step, and the maximum of the sum."""
    program = fullest_program(plan)
    changes = on_device("gpu", program.resident, program.memory)
    total = maxima(changes, lambda _: "total")
    return {**dict.fromkeys((*CATEGORIES, "total"), 0), **maxima(changes, category_of), **total}


def held_at_peak(plan: Plan) -> dict[str, int]:
    """Bytes of each category on the fullest GPU when their sum is highest."""
    program = fullest_program(plan)
    changes = on_device("gpu", program.resident, program.memory)
    totals = list(accumulate(change.bytes for change in changes))
    end = totals.index(max(totals)) + 1 if totals else 0
    return {**dict.fromkeys(CATEGORIES, 0), **held(changes[:end], category_of)}


def held_before_update(plan: Plan, device: Device = "gpu") -> dict[str, int]:
    """Bytes of one device of the fullest rank by category when the last backward has ended and nothing is
    under way."""
    program = fullest_program(plan)
    end = next(number for number, op in enumerate(program.ops) if op.phase == "optimizer")
    before = [
        change
        for change in program.memory
        if change.op < end or (change.op == end and change.bytes < 0)  # freed before it is issued
    ]
    return {**dict.fromkeys(CATEGORIES, 0), **held(on_device(device, program.resident, before), category_of)}
