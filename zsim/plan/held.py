"""Bytes that a plan holds, as the host allocates: no clock, no allocator."""

from __future__ import annotations

from zsim.plan.ops import CATEGORIES, Device, Plan


def plan_peaks(plan: Plan) -> dict[str, int]:
    """Each category's maximum on the GPU over the step, and the maximum of the sum."""
    now, peaks = dict.fromkeys(CATEGORIES, 0), dict.fromkeys((*CATEGORIES, "total"), 0)
    resident = [(memory.device, memory.category, memory.bytes) for memory in plan.resident]
    for device, category, size in [*resident, *((m.device, m.category, m.bytes) for m in plan.memory)]:
        if device == "gpu":
            now[category] += size
            peaks[category] = max(peaks[category], now[category])
            peaks["total"] = max(peaks["total"], sum(now.values()))
    return peaks


def held_before_update(plan: Plan, device: Device = "gpu") -> dict[str, int]:
    """Bytes of one device by category when the last backward has ended and nothing is under way."""
    end = next(number for number, op in enumerate(plan.ops) if op.phase == "optimizer")
    held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for resident in plan.resident:
        held[resident.category] += resident.bytes if resident.device == device else 0
    for change in plan.memory:
        is_before = change.op < end or (change.op == end and change.bytes < 0)  # freed before it is issued
        if is_before and change.device == device:
            held[change.category] += change.bytes
    return held
