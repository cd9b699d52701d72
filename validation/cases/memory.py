"""Memory in the span logs of a recorded run: bytes that are allocated and never freed, against the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from zsim.plan.ops import Plan
from zsim.report.views.meanings import MEMORY
from zsim.study.check.baseline import CheckRow
from zsim.trace.trace import MemoryEvents, Trace
from zsim.units import format_bytes

_MAX_UNITS = 3  # units named in a sentence, at most
_Held = Counter[str]  # unit -> increase of its bytes over the recorded steps


def memory_rows(name: str, plan: Plan, recorded: Trace) -> Iterator[CheckRow]:
    """A row for each category that both the logs and the plan contain: every unit on every rank must match
    exactly.

    Peaks are not judged: the logs' buffers are gathered parameters, while a plan's also include gradients
    under reduction."""
    if recorded.memory is None:
        return
    changed = {(change.device, change.category) for change in plan.memory}
    for device, category in dict.fromkeys(
        zip(recorded.memory.devices, recorded.memory.categories, strict=True)
    ):
        if (device, category) in changed:
            planned = _planned(plan, device, category, len(recorded.steps))
            held = _recorded(recorded.memory, device, category)
            label = MEMORY[category].label if category in MEMORY else category
            yield _row(name, f"{device} {label} after {len(recorded.steps)} steps", planned, held)


def _planned(plan: Plan, device: str, category: str, steps: int) -> _Held:
    held: _Held = Counter()
    for change in plan.memory:
        if (change.device, change.category) == (device, category):
            held[change.owner] += steps * change.bytes
    return held


def _recorded(events: MemoryEvents, device: str, category: str) -> dict[int, _Held]:
    """The increase of each unit's bytes, by rank; all ranks that log memory."""
    held: dict[int, _Held] = {rank: Counter() for rank in sorted(set(events.ranks.tolist()))}
    rows = zip(events.ranks.tolist(), events.names, events.devices, events.categories, strict=True)
    for (rank, unit, *kind), change in zip(rows, events.deltas.tolist(), strict=True):
        if kind == [device, category]:
            held[rank][unit] += change
    return held


def _row(name: str, title: str, planned: _Held, held: Mapping[int, _Held]) -> CheckRow:
    on: dict[tuple[str, int], list[int]] = {}  # (unit, excess bytes) -> ranks
    for rank, own in held.items():
        for unit in dict.fromkeys([*planned, *own]):
            if own[unit] != planned[unit]:
                on.setdefault((unit, own[unit] - planned[unit]), []).append(rank)
    expected = planned.total()
    measured = max((own.total() for own in held.values()), key=lambda count: abs(count - expected))
    sentence = _sentence(on, len(held))
    return CheckRow(name, title, "fail" if on else "pass", sentence, expected, measured, tolerance=0.0)


def _sentence(on: Mapping[tuple[str, int], list[int]], num_ranks: int) -> str:
    """Sentences such as `'root' holds back 1.05 MB on rank 1`, the largest first; "" if all match."""
    found = sorted(on.items(), key=lambda row: -abs(row[0][1]))
    texts = []
    for (unit, more), ranks in found[:_MAX_UNITS]:
        what = "holds back" if more > 0 else "frees too much:"
        some = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        place = "every rank" if len(ranks) == num_ranks else some
        texts.append(f"'{unit}' {what} {format_bytes(abs(more))} on {place}")
    rest = len(found) - _MAX_UNITS
    return "; ".join(texts) + (f"; and {rest} more" if rest > 0 else "")
