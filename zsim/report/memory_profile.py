"""The holders of a GPU's memory over a step: the plan's memory changes, added up by module, unit and phase.

No simulation: see [Note: memory follows the host] in zsim.plan.ops. Activations belong to modules (a
checkpoint to its block), FSDP's gathered parameters and FSDP2's unreduced gradients to units. Memory that a
framework pools for all modules (DeepSpeed's buckets and fetches, FSDP1's gradients, sharded states) belongs
to none, and is listed under its category or a separate name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zsim.dataclass import dataclass
from zsim.plan.memory.peaks import Owned, category_of, fullest_program, held, maxima, on_device, owner_of
from zsim.plan.ops import CATEGORIES, Memory, MemoryChange, Plan, Program

_NUMBER = re.compile(r"(?<=\.)\d+(-\d+)?(?=\.| |$)")


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes by category just before the host issues op `op`, at the maximum of a phase or of the step."""

    op: int
    name: str
    phase: str
    by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True)
class Holder:
    """`count` owners of one kind that hold `total_bytes` in sum, each at most `each_bytes`."""

    owner: str
    category: str
    count: int
    each_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """One GPU's step."""

    num_ops: int
    peak: Moment
    phases: tuple[Moment, ...]
    """The peak of every phase."""
    at_peak: Mapping[Owned, int]
    """Bytes by owner at the peak."""
    kept: Mapping[Owned, int]
    """Bytes by owner when the first forward ends."""
    highest: Mapping[Owned, int]
    """The maximum of every owner at any time."""

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data, every owner by its full name."""
        return {
            "peak": _moment(self.peak),
            "phases": [_moment(moment) for moment in self.phases],
            "held_at_peak": _rows(self.at_peak),
            "kept_for_backward": _rows(self.kept),
            "highest": _rows(self.highest),
        }


def memory_profile(plan: Plan, more: Iterable[Memory] = ()) -> MemoryProfile:
    """The profile of the fullest rank. `extra_memory` is memory that the plan does not have (the CUDA
    context).
    """
    program = fullest_program(plan)
    start = on_device("gpu", program.resident, more)
    changes = [change for change in program.memory if change.device == "gpu"]
    last = len(program.ops) - 1
    total = sum(memory.bytes for memory in start)
    tops: dict[str, tuple[int, int]] = {}  # by phase: maximum, and the number of changes made until then
    for place, change in enumerate(changes):
        phase = program.ops[min(change.op, last)].phase
        if phase not in tops:  # the level at which the phase begins
            tops[phase] = (total, place)
        total += change.bytes
        if total > tops[phase][0]:
            tops[phase] = (total, place + 1)
    tops = tops or {"forward": (total, 0)}
    moments = {phase: _moment_of(program, start, changes, phase, count) for phase, (_, count) in tops.items()}
    _, at_peak = max(tops.values(), key=lambda top: top[0])
    first_backward = next((i for i, op in enumerate(program.ops) if op.phase != "forward"), last + 1)
    after = (
        place for place, change in enumerate(changes) if change.op >= first_backward and change.bytes > 0
    )
    forward_ends = next(after, None)
    kept = {} if forward_ends is None else held([*start, *changes[:forward_ends]], owner_of)
    return MemoryProfile(
        num_ops=len(program.ops),
        peak=max(moments.values(), key=lambda moment: moment.total),
        phases=tuple(moments.values()),
        at_peak=_above_nothing(held([*start, *changes[:at_peak]], owner_of)),
        kept=_above_nothing(kept),
        highest=maxima([*start, *changes], owner_of),
    )


def _moment_of(
    program: Program,
    start: Sequence[Memory | MemoryChange],
    changes: Sequence[MemoryChange],
    phase: str,
    count: int,
) -> Moment:
    """The levels after `count` changes, and the op before which the last of them is made."""
    levels: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    levels |= {str(name): size for name, size in held([*start, *changes[:count]], category_of).items()}
    op = min(changes[max(count - 1, 0)].op if changes else 0, len(program.ops) - 1)
    return Moment(op, program.ops[op].name, phase, levels)


def holders(owned: Mapping[Owned, int], *categories: str) -> list[Holder]:
    """The owners of `categories` (by default all), with the blocks of one kind in one row, largest first."""
    found: dict[Owned, list[int]] = {}
    for (category, owner), size in owned.items():
        if not categories or category in categories:
            found.setdefault((category, _NUMBER.sub("*", owner)), []).append(size)
    rows = [
        Holder(owner, category, len(sizes), max(sizes), sum(sizes))
        for (category, owner), sizes in found.items()
    ]
    return sorted(rows, key=lambda row: -row.total_bytes)


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
