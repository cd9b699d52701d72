"""The memory check: the peak and what is left at the end of the step, per category; who did not free it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from zsim.report.meanings import MEMORY
from zsim.report.memory import DEVICES, Ledger
from zsim.report.verdict import Metric, Tolerances, judge
from zsim.trace.spans import MemoryEvents, Trace
from zsim.units import format_bytes

_FRAMEWORK = "framework"  # the CUDA context and communicators: torch's allocator does not see them


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Figures of each device, and what could not be compared."""

    metrics: tuple[Metric, ...]
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    """One device of one side: highest and last bytes by category, and of the sum."""

    peaks: dict[str, int]
    lasts: dict[str, int]


def check_memory(simulated: Trace, recorded: Trace, tolerances: Tolerances) -> MemoryCheck:
    """Compare the peaks of the fullest rank, and what it holds when the step ends.

    Bytes are judged whatever the clock did. Categories are compared where both sides know them, else the
    sums.
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
    best: _Held | None = None
    for pool in ledger.pools(device, 1, None):
        levels = ledger.usage(device, pool).levels[:, kept]
        totals = levels.sum(axis=1)
        names = [ledger.categories[index] for index in kept]
        highest, last = levels.max(axis=0).tolist(), levels[-1].tolist()
        peaks = dict(zip(names, highest, strict=True)) | {"total": int(totals.max())}
        held = _Held(peaks, dict(zip(names, last, strict=True)) | {"total": int(totals[-1])})
        if best is None or held.peaks["total"] > best.peaks["total"]:
            best = held
    assert best is not None
    return best


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
                why = _who_kept(simulated.memory, recorded.memory, device, name)
                metric = replace(metric, reason=why)
            yield metric


def _who_kept(simulated: MemoryEvents, recorded: MemoryEvents, device: str, category: str) -> str:
    """The op whose changes of memory differ most between the sides: the one that did not free, or kept."""
    mine, theirs = _by_op(simulated, device, category), _by_op(recorded, device, category)
    if not mine or not theirs:
        return ""
    differences = {name: theirs.get(name, 0) - mine.get(name, 0) for name in [*mine, *theirs]}
    name = max(differences, key=lambda name: abs(differences[name]))
    more = differences[name]
    if not more:
        return ""
    what = "holds back" if more > 0 else "frees"
    return f"'{name}' {what} {format_bytes(abs(more))} {'' if more > 0 else 'more '}in the recording"


def _by_op(events: MemoryEvents, device: str, category: str) -> dict[str, int]:
    """Net bytes of each op's changes; {} where ops are not known."""
    net: dict[str, int] = {}
    for name, on, what, change in zip(
        events.names, events.devices, events.categories, np.asarray(events.deltas).tolist(), strict=False
    ):
        if (on, what) == (device, category):
            net[name] = net.get(name, 0) + change
    return net
