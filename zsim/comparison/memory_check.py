"""The memory check: bytes per category at the peak and at the end of the step, and the op that kept them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from zsim.comparison.verdict import Metric, Tolerances, judge
from zsim.dataclass import dataclass
from zsim.report.memory import DEVICES, Ledger
from zsim.report.views.meanings import MEMORY
from zsim.trace.trace import MemoryEvents, Trace
from zsim.units import format_bytes

_FRAMEWORK = "framework"  # the CUDA context and communicators: torch's allocator does not see them


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Figures of each device, and words for what could not be compared."""

    metrics: tuple[Metric, ...]
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    """One device of one side."""

    peaks: dict[str, int]
    """Maximum bytes by category and of the total, on the rank with the highest total."""
    lasts: dict[str, int]
    """Bytes at the end of the step on `last_rank`, which then holds most."""
    last_rank: int


def check_memory(simulated: Trace, recorded: Trace, tolerances: Tolerances) -> MemoryCheck:
    """Compare the peaks of the fullest rank, and the bytes of the rank that is fullest when the step ends.

    Bytes are judged even where times are in doubt. Categories are compared where both sides know them, else
    the totals.
    """
    if simulated.memory is None or recorded.memory is None:
        missing = " and ".join(
            side for side, trace in (("simulated", simulated), ("recorded", recorded)) if trace.memory is None
        )
        return MemoryCheck((), (f"memory (no {missing} memory events)",))
    metrics: list[Metric] = []
    not_checked: list[str] = []
    for device in DEVICES:
        one, other = _categories(simulated.memory, device), _categories(recorded.memory, device)
        if not one or not other:
            if one or other:
                not_checked.append(f"{device} memory (known to one side only)")
            continue
        are_shared = bool((one & other) - {_FRAMEWORK})
        left_out = {_FRAMEWORK} - (one & other)
        if left_out & (one | other):
            not_checked.append(f"{device} memory of the framework (known to one side only)")
        mine = _held(simulated.memory, device, left_out)
        theirs = _held(recorded.memory, device, left_out)
        metrics += _metrics(simulated, recorded, device, mine, theirs, are_shared, tolerances)
        if not are_shared:
            not_checked.append(f"categories of {device} memory (not recorded)")
    return MemoryCheck(tuple(metrics), tuple(not_checked))


def _categories(events: MemoryEvents, device: str) -> set[str]:
    return {name for name, on in zip(events.categories, events.devices, strict=True) if on == device}


def _held(events: MemoryEvents, device: str, left_out: set[str]) -> _Held:
    ledger = Ledger.of(events)
    kept = [index for index, name in enumerate(ledger.categories) if name not in left_out]
    names = [*(ledger.categories[index] for index in kept), "total"]
    peaks: list[dict[str, int]] = []
    lasts: list[tuple[dict[str, int], int]] = []
    for pool in ledger.pools(device, 1, None):
        levels = ledger.usage(device, pool).levels[:, kept]
        levels = np.column_stack([levels, levels.sum(axis=1)])
        peaks.append(dict(zip(names, levels.max(axis=0).tolist(), strict=True)))
        lasts.append((dict(zip(names, levels[-1].tolist(), strict=True)), next(iter(pool))))
    last, rank = max(lasts, key=lambda held: held[0]["total"])
    return _Held(max(peaks, key=lambda held: held["total"]), last, rank)


def _metrics(
    simulated: Trace,
    recorded: Trace,
    device: str,
    mine: _Held,
    theirs: _Held,
    are_shared: bool,
    tolerances: Tolerances,
) -> Iterator[Metric]:
    whole = theirs.peaks["total"]
    assert simulated.memory is not None
    assert recorded.memory is not None
    names = [name for name in dict.fromkeys([*mine.peaks, *theirs.peaks]) if are_shared or name == "total"]
    for when, left, right in (("peak", mine.peaks, theirs.peaks), ("at the end", mine.lasts, theirs.lasts)):
        for name in sorted(names, key=lambda name: name != "total"):
            one, other = left.get(name, 0), right.get(name, 0)
            if not one and not other:
                continue
            label = MEMORY[name].label if name in MEMORY else name
            title = f"{device} {label}, {when}"
            metric = judge(title, one, other, unit="bytes", whole=whole, tolerance=tolerances.memory)
            if metric.verdict == "fail" and when == "at the end" and name != "total":
                ranks = mine.last_rank, theirs.last_rank
                why = _who_kept(simulated.memory, recorded.memory, device, name, ranks)
                metric = replace(metric, reason=why)
            yield metric


def _who_kept(
    simulated: MemoryEvents, recorded: MemoryEvents, device: str, category: str, ranks: tuple[int, int]
) -> str:
    """Words for the op whose net change of memory differs most between the sides. Where the sides share no
    names (ops, units), for the op with the largest net change in the recording."""
    mine = _by_op(simulated, device, category, ranks[0])
    theirs = _by_op(recorded, device, category, ranks[1])
    if not mine or not theirs:
        return ""
    if mine.keys().isdisjoint(theirs):
        mine = {}
    differences = {name: theirs.get(name, 0) - mine.get(name, 0) for name in [*mine, *theirs]}
    name = max(differences, key=lambda name: abs(differences[name]))
    more = differences[name]
    if not more:
        return ""
    what = "holds back" if more > 0 else "frees"
    return f"'{name}' {what} {format_bytes(abs(more))} {'' if more > 0 else 'more '}in the recording"


def _by_op(events: MemoryEvents, device: str, category: str, rank: int) -> dict[str, int]:
    """Net bytes of each op's changes on one rank, or {} where ops are not known."""
    net: dict[str, int] = {}
    rows = zip(events.names, events.ranks.tolist(), events.devices, events.categories, strict=False)
    for (name, *where), change in zip(rows, events.deltas.tolist(), strict=False):
        if where == [rank, device, category]:
            net[name] = net.get(name, 0) + change
    return net
