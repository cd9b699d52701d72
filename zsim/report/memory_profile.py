"""Who holds a GPU's memory, and when: the plan's own changes, added up by module, unit and phase.

No simulation: see [Note: memory follows the host] in zsim.plan.ops. Activations belong to modules (a
checkpoint to its block), FSDP's gathered parameters and FSDP2's unreduced gradients to its units; what a
framework pools for all (DeepSpeed's buckets and fetches, FSDP1's gradients, sharded states) belongs to none
and stands under its category or a name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.plan.ops import CATEGORIES, Category, Memory, Plan

_NUMBER = re.compile(r"(?<=\.)\d+(-\d+)?(?=\.| |$)")
Owned = tuple[Category, str]  # a category, and who holds it ("" for what is pooled)


@dataclass(frozen=True, slots=True)
class Moment:
    """The levels just before the host issues op `op`: the highest of its phase, or of the step."""

    op: int
    name: str
    phase: str
    by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True)
class Holder:
    """`count` owners of one kind that hold `total_bytes` together, none more than `each_bytes`."""

    owner: str
    category: str
    count: int
    each_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """One GPU's step: `peak`, the highest `phases`, who holds what at the peak, what is `kept` when the first
    forward ends, and the most that anyone holds at any time (`highest`)."""

    num_ops: int
    peak: Moment
    phases: tuple[Moment, ...]
    at_peak: Mapping[Owned, int]
    kept: Mapping[Owned, int]
    highest: Mapping[Owned, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every owner by its whole name."""
        return {
            "peak": _moment(self.peak),
            "phases": [_moment(moment) for moment in self.phases],
            "held_at_peak": _rows(self.at_peak),
            "kept_for_backward": _rows(self.kept),
            "highest": _rows(self.highest),
        }


def memory_profile(plan: Plan, more: Iterable[Memory] = ()) -> MemoryProfile:
    """Add up the plan's changes; `more` is what is held beside it (the CUDA context)."""
    changes = [change for change in plan.memory if change.device == "gpu"]
    resident = [memory for memory in (*plan.resident, *more) if memory.device == "gpu"]
    levels: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    held: dict[Owned, int] = {}
    for memory in resident:
        levels[memory.category] += memory.bytes
        held[memory.category, ""] = held.get((memory.category, ""), 0) + memory.bytes
    start, highest, total = dict(held), dict(held), sum(levels.values())
    tops: dict[str, tuple[int, int, dict[str, int]]] = {}  # phase: total, place, levels
    first_backward = next((i for i, op in enumerate(plan.ops) if op.phase != "forward"), len(plan.ops))
    kept: dict[Owned, int] | None = None
    for place, change in enumerate(changes):
        if kept is None and change.op >= first_backward and change.bytes > 0:
            kept = _above_nothing(held)
        phase = plan.ops[min(change.op, len(plan.ops) - 1)].phase
        if phase not in tops:  # what it begins with
            tops[phase] = (total, place - 1, dict(levels))
        key = (change.category, change.owner)
        levels[change.category] += change.bytes
        held[key] = held.get(key, 0) + change.bytes
        highest[key] = max(highest.get(key, 0), held[key])
        total += change.bytes
        if total > tops[phase][0]:
            tops[phase] = (total, place, dict(levels))
    if not tops:
        tops = {"forward": (total, -1, levels)}
    moments = {phase: _at(plan, changes[max(place, 0)].op if changes else 0, phase, found)
               for phase, (_, place, found) in tops.items()}  # fmt: skip
    _, place, _ = max(tops.values(), key=lambda top: top[0])
    for change in changes[: place + 1]:
        key = (change.category, change.owner)
        start[key] = start.get(key, 0) + change.bytes
    return MemoryProfile(
        num_ops=len(plan.ops),
        peak=max(moments.values(), key=lambda moment: moment.total),
        phases=tuple(moments.values()),
        at_peak=_above_nothing(start),
        kept=kept or {},
        highest=_above_nothing(highest),
    )


def holders(owned: Mapping[Owned, int], *categories: str) -> list[Holder]:
    """The owners of these categories (all without any), blocks of one kind as one, the largest first."""
    found: dict[Owned, list[int]] = {}
    for (category, owner), size in owned.items():
        if not categories or category in categories:
            found.setdefault((category, _NUMBER.sub("*", owner)), []).append(size)
    rows = [
        Holder(owner, category, len(sizes), max(sizes), sum(sizes))
        for (category, owner), sizes in found.items()
    ]
    return sorted(rows, key=lambda row: -row.total_bytes)


def _at(plan: Plan, op: int, phase: str, levels: Mapping[str, int]) -> Moment:
    op = min(op, len(plan.ops) - 1)
    return Moment(op, plan.ops[op].name, phase, levels)


def _above_nothing(held: Mapping[Owned, int]) -> dict[Owned, int]:
    return {key: size for key, size in held.items() if size > 0}


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase,
        "op": moment.op,
        "op_name": moment.name,
        "total_bytes": moment.total,
        "bytes": dict(moment.by_category),
    }


def _rows(owned: Mapping[Owned, int]) -> list[dict[str, Any]]:
    rows = [
        {"owner": owner, "category": category, "bytes": size} for (category, owner), size in owned.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], row["owner"]))
