"""The holders of a GPU's memory over a step: the plan's memory changes, added up by module, unit and phase.

No simulation: see [Note: memory follows the host] in zsim.plan.ops. Activations belong to modules (a
checkpoint to its block), FSDP's gathered parameters and FSDP2's unreduced gradients to units. Memory that a
framework pools for all modules (DeepSpeed's buckets and fetches, FSDP1's gradients, sharded states) belongs
to none, and is listed under its category or a separate name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.plan.memory.tensors import (
    MemoryKey,
    bytes_per_key,
    category_of,
    fullest_program,
    memory_key,
    peak_bytes_per_key,
    select_device,
)
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
    at_peak: Mapping[MemoryKey, int]
    """Bytes by owner at the peak."""
    kept_for_backward: Mapping[MemoryKey, int]
    """Bytes by owner when the first forward ends."""
    highest: Mapping[MemoryKey, int]
    """The maximum of every owner at any time."""

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data, every owner by its full name."""
        return {
            "peak": _moment(self.peak),
            "phases": [_moment(moment) for moment in self.phases],
            "held_at_peak": _rows(self.at_peak),
            "kept_for_backward": _rows(self.kept_for_backward),
            "highest": _rows(self.highest),
        }


def memory_profile(plan: Plan, extra_memory: Iterable[Memory] = ()) -> MemoryProfile:
    """The profile of the fullest rank. `extra_memory` is memory that the plan does not have (the CUDA
    context).
    """
    program = fullest_program(plan)
    start = select_device("gpu", program.resident, extra_memory)
    changes = [change for change in program.memory if change.device == "gpu"]
    last = len(program.ops) - 1
    total = sum(memory.bytes for memory in start)
    maximum_of_phase: dict[
        str, tuple[int, int]
    ] = {}  # by phase: maximum, and the number of changes made until then
    for index, change in enumerate(changes):
        phase = program.ops[min(change.op, last)].phase
        if phase not in maximum_of_phase:  # the level at which the phase begins
            maximum_of_phase[phase] = (total, index)
        total += change.bytes
        if total > maximum_of_phase[phase][0]:
            maximum_of_phase[phase] = (total, index + 1)
    maximum_of_phase = maximum_of_phase or {"forward": (total, 0)}
    moments = {
        phase: _moment_of(program, start, changes, phase, count)
        for phase, (_, count) in maximum_of_phase.items()
    }
    _, at_peak = max(maximum_of_phase.values(), key=lambda maximum: maximum[0])
    first_backward = next((i for i, op in enumerate(program.ops) if op.phase != "forward"), last + 1)
    backward_allocations = (
        index for index, change in enumerate(changes) if change.op >= first_backward and change.bytes > 0
    )
    forward_ends = next(backward_allocations, None)
    kept = {} if forward_ends is None else bytes_per_key([*start, *changes[:forward_ends]], memory_key)
    return MemoryProfile(
        num_ops=len(program.ops),
        peak=max(moments.values(), key=lambda moment: moment.total),
        phases=tuple(moments.values()),
        at_peak=_drop_zeros(bytes_per_key([*start, *changes[:at_peak]], memory_key)),
        kept_for_backward=_drop_zeros(kept),
        highest=peak_bytes_per_key([*start, *changes], memory_key),
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
    levels |= {
        str(name): size for name, size in bytes_per_key([*start, *changes[:count]], category_of).items()
    }
    op = min(changes[max(count - 1, 0)].op if changes else 0, len(program.ops) - 1)
    return Moment(op, program.ops[op].name, phase, levels)


def holders(owned: Mapping[MemoryKey, int], *categories: str) -> list[Holder]:
    """The owners of `categories` (by default all), with the blocks of one kind in one row, largest first."""
    sizes_of_owner: dict[MemoryKey, list[int]] = {}
    for (category, owner), size in owned.items():
        if not categories or category in categories:
            sizes_of_owner.setdefault((category, _NUMBER.sub("*", owner)), []).append(size)
    rows = [
        Holder(owner, category, len(sizes), max(sizes), sum(sizes))
        for (category, owner), sizes in sizes_of_owner.items()
    ]
    return sorted(rows, key=lambda row: -row.total_bytes)


def _drop_zeros(bytes_of_owner: Mapping[MemoryKey, int]) -> dict[MemoryKey, int]:
    return {key: size for key, size in bytes_of_owner.items() if size > 0}


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase,
        "op": moment.op,
        "op_name": moment.name,
        "total_bytes": moment.total,
        "bytes": dict(moment.by_category),
    }


def _rows(owned: Mapping[MemoryKey, int]) -> list[dict[str, Any]]:
    rows = [
        {"owner": owner, "category": category, "bytes": size} for (category, owner), size in owned.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], row["owner"]))
