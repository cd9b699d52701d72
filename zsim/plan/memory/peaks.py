"""Bytes that a program holds, in the order of its host, without clock and allocator. See [Note: memory
follows the host] in zsim.plan.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, chain, compress
from typing import TypeVar

from zsim.plan.columns import memory_columns
from zsim.plan.ops import CATEGORIES, Category, Device, Memory, MemoryChange, Plan, Program

MemoryKey = tuple[Category, str]  # a category, and its owner ("" for shared pools)
_Key = TypeVar("_Key", bound=Hashable)


def select_device(device: Device, *sequences: Iterable[Memory | MemoryChange]) -> list[Memory | MemoryChange]:
    """The memory and changes of `sequences` that are on `device`, in order."""
    return [change for sequence in sequences for change in sequence if change.device == device]


def bytes_per_key(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Bytes of each key after all of `changes`, which include the resident memory."""
    levels: dict[_Key, int] = {}
    for change in changes:
        name = key(change)
        levels[name] = levels.get(name, 0) + change.bytes
    return levels


def peak_bytes_per_key(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Maximum bytes of each key over `changes` in order. Keys that never exceed 0 are left out."""
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


def memory_key(change: Memory | MemoryChange) -> MemoryKey:
    """Category and owner of a change. Resident memory has owner ""."""
    return change.category, change.owner if isinstance(change, MemoryChange) else ""


def device_peaks(program: Program) -> dict[Device, int]:
    """Maximum bytes of a rank on each device over the step. Devices that hold nothing are left out."""
    columns, resident = program.memoize(memory_columns), program.resident
    devices = [*(memory.device for memory in resident), *columns.device]
    counts = [*(memory.bytes for memory in resident), *columns.bytes]
    unique_devices = dict.fromkeys(devices)
    if len(unique_devices) == 1:
        peaks = {device: _highest(counts) for device in unique_devices}
    else:
        changes = list(zip(devices, counts, strict=True))
        peaks = {
            device: _highest([count for other_device, count in changes if other_device == device])
            for device in unique_devices
        }
    return {device: peak for device, peak in peaks.items() if peak > 0}


def pinned_peak(program: Program) -> int:
    """Maximum page-locked bytes of a rank over the step."""
    columns = program.memoize(memory_columns)
    pinned = [memory.bytes for memory in program.resident if memory.is_pinned]
    return _highest(chain(pinned, compress(columns.bytes, columns.is_pinned)))


def _highest(changes: Iterable[int]) -> int:
    """Maximum of the running sum of `changes`, at least 0."""
    return max(accumulate(changes, initial=0))


def fullest_program(plan: Plan) -> Program:
    """The program whose ranks have the highest GPU maximum over the step, the first of several equal ones."""
    if len(plan.programs) == 1:
        return plan.programs[0]
    return max(plan.programs, key=lambda program: device_peaks(program).get("gpu", 0))


def plan_peaks(plan: Plan) -> dict[str, int]:
    """Each category's maximum bytes on the fullest GPU over the step, and the maximum of their sum."""
    program = fullest_program(plan)
    changes = select_device("gpu", program.resident, program.memory)
    total = peak_bytes_per_key(changes, lambda _: "total")
    return {**dict.fromkeys((*CATEGORIES, "total"), 0), **peak_bytes_per_key(changes, category_of), **total}


def bytes_at_peak(plan: Plan) -> dict[str, int]:
    """Bytes of each category on the fullest GPU at the time of its maximum."""
    program = fullest_program(plan)
    changes = select_device("gpu", program.resident, program.memory)
    totals = list(accumulate(change.bytes for change in changes))
    end = totals.index(max(totals)) + 1 if totals else 0
    return {**dict.fromkeys(CATEGORIES, 0), **bytes_per_key(changes[:end], category_of)}


def bytes_before_update(plan: Plan, device: Device = "gpu") -> dict[str, int]:
    """Bytes of the fullest rank on `device` by category, after the last backward and before the optimizer's
    first op."""
    program = fullest_program(plan)
    end = next(number for number, op in enumerate(program.ops) if op.phase == "optimizer")
    earlier_changes = [
        change
        for change in program.memory
        if change.op < end or (change.op == end and change.bytes < 0)  # freed before the op is issued
    ]
    return {
        **dict.fromkeys(CATEGORIES, 0),
        **bytes_per_key(select_device(device, program.resident, earlier_changes), category_of),
    }
