"""The memory check: bytes per category at the peak and at the end of the step, and the op that kept them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from zsim.comparison.verdict import Metric, Tolerances, judge
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
class _DeviceUsage:
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
        simulated_categories, recorded_categories = (
            _categories(simulated.memory, device),
            _categories(recorded.memory, device),
        )
        if not simulated_categories or not recorded_categories:
            if simulated_categories or recorded_categories:
                not_checked.append(f"{device} memory (known to one side only)")
            continue
        are_shared = bool((simulated_categories & recorded_categories) - {_FRAMEWORK})
        excluded = {_FRAMEWORK} - (simulated_categories & recorded_categories)
        if excluded & (simulated_categories | recorded_categories):
            not_checked.append(f"{device} memory of the framework (known to one side only)")
        simulated_usage = _device_usage(simulated.memory, device, excluded)
        recorded_usage = _device_usage(recorded.memory, device, excluded)
        metrics += _metrics(
            simulated, recorded, device, simulated_usage, recorded_usage, are_shared, tolerances
        )
        if not are_shared:
            not_checked.append(f"categories of {device} memory (not recorded)")
    return MemoryCheck(tuple(metrics), tuple(not_checked))


def _categories(events: MemoryEvents, device: str) -> set[str]:
    return {
        name
        for name, event_device in zip(events.categories, events.devices, strict=True)
        if event_device == device
    }


def _device_usage(events: MemoryEvents, device: str, excluded: set[str]) -> _DeviceUsage:
    ledger = Ledger.of(events)
    kept_indices = [index for index, name in enumerate(ledger.categories) if name not in excluded]
    names = [*(ledger.categories[index] for index in kept_indices), "total"]
    peaks: list[dict[str, int]] = []
    lasts: list[tuple[dict[str, int], int]] = []
    for pool in ledger.pools(device):
        levels = ledger.usage(device, pool).levels[:, kept_indices]
        levels = np.column_stack([levels, levels.sum(axis=1)])
        peaks.append(dict(zip(names, levels.max(axis=0).tolist(), strict=True)))
        lasts.append((dict(zip(names, levels[-1].tolist(), strict=True)), next(iter(pool))))
    last_levels, rank = max(lasts, key=lambda levels_and_rank: levels_and_rank[0]["total"])
    return _DeviceUsage(max(peaks, key=lambda category_peaks: category_peaks["total"]), last_levels, rank)


def _metrics(
    simulated: Trace,
    recorded: Trace,
    device: str,
    simulated_usage: _DeviceUsage,
    recorded_usage: _DeviceUsage,
    are_shared: bool,
    tolerances: Tolerances,
) -> Iterator[Metric]:
    peak_total = recorded_usage.peaks["total"]
    assert simulated.memory is not None
    assert recorded.memory is not None
    names = [
        name
        for name in dict.fromkeys([*simulated_usage.peaks, *recorded_usage.peaks])
        if are_shared or name == "total"
    ]
    for moment, simulated_levels, recorded_levels in (
        ("peak", simulated_usage.peaks, recorded_usage.peaks),
        ("at the end", simulated_usage.lasts, recorded_usage.lasts),
    ):
        for name in sorted(names, key=lambda name: name != "total"):
            simulated_bytes, recorded_bytes = simulated_levels.get(name, 0), recorded_levels.get(name, 0)
            if not simulated_bytes and not recorded_bytes:
                continue
            label = MEMORY[name].label if name in MEMORY else name
            title = f"{device} {label}, {moment}"
            metric = judge(
                title,
                simulated_bytes,
                recorded_bytes,
                unit="bytes",
                total=peak_total,
                tolerance=tolerances.memory,
            )
            if metric.verdict == "fail" and moment == "at the end" and name != "total":
                ranks = simulated_usage.last_rank, recorded_usage.last_rank
                reason = _leaking_op(simulated.memory, recorded.memory, device, name, ranks)
                metric = replace(metric, reason=reason)
            yield metric


def _leaking_op(
    simulated: MemoryEvents, recorded: MemoryEvents, device: str, category: str, ranks: tuple[int, int]
) -> str:
    """Words for the op whose net change of memory differs most between the sides. Where the sides share no
    names (ops, units), for the op with the largest net change in the recording."""
    simulated_net = _net_bytes_per_op(simulated, device, category, ranks[0])
    recorded_net = _net_bytes_per_op(recorded, device, category, ranks[1])
    if not simulated_net or not recorded_net:
        return ""
    if simulated_net.keys().isdisjoint(recorded_net):
        simulated_net = {}
    differences = {
        name: recorded_net.get(name, 0) - simulated_net.get(name, 0)
        for name in [*simulated_net, *recorded_net]
    }
    name = max(differences, key=lambda name: abs(differences[name]))
    difference = differences[name]
    if not difference:
        return ""
    verb = "holds back" if difference > 0 else "frees"
    return (
        f"'{name}' {verb} {format_bytes(abs(difference))} {'' if difference > 0 else 'more '}in the recording"
    )


def _net_bytes_per_op(events: MemoryEvents, device: str, category: str, rank: int) -> dict[str, int]:
    """Net bytes of each op's changes on one rank, or {} where ops are not known."""
    net: dict[str, int] = {}
    rows = zip(events.names, events.ranks.tolist(), events.devices, events.categories, strict=False)
    for (name, *event_key), change in zip(rows, events.deltas.tolist(), strict=False):
        if event_key == [rank, device, category]:
            net[name] = net.get(name, 0) + change
    return net
