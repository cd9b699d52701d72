"""Memory over time: levels, peaks, and the first op that does not fit.

Peaks are taken in the order of the events, which is the host's order (as the allocator sees them). Timelines
draw the same levels at the time when the compute stream reached them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from zsim.arrays import Floats, Ints, factorize
from zsim.plan.ops import CATEGORIES
from zsim.trace.trace import Labels, MemoryEvents

DEVICES = ("gpu", "host", "nvme")


@dataclass(frozen=True, slots=True)
class Peak:
    """Maximum bytes of one device."""

    total: int
    """The maximum of the sum."""
    by_category: dict[str, int]
    """The maximum of each category at any time."""
    at_total: dict[str, int]
    """Bytes of each category when the total was at its maximum."""
    seconds: float
    """When that was."""


@dataclass(frozen=True)
class MemoryLevels:
    """One memory over time: by event its times on the host and on the compute stream, and its `changes` in
    bytes of `categories[columns[event]]`."""

    categories: tuple[str, ...]
    host_seconds: Floats
    stream_seconds: Floats
    columns: Ints
    changes: Ints
    events: Ints  # the events' places among all of the trace
    event_names: Sequence[str]  # by place; empty where the trace has no names

    @cached_property
    def levels(self) -> Ints:
        """Bytes after each event: `levels[event, category]`."""
        count = len(self.changes)
        changes = np.zeros((count, len(self.categories)), dtype=np.int64, order="F")  # summed by category
        changes[np.arange(count), self.columns] = self.changes
        return np.cumsum(changes, axis=0)

    @cached_property
    def totals(self) -> Ints:
        """Bytes of all categories after each event."""
        return np.cumsum(self.changes)

    def name(self, event: int) -> str:
        """The name of an event's op. Empty where the trace has no names."""
        return self.event_names[self.events[event]] if self.event_names else ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a job fit."""

    overrides: Mapping[str, Any]
    """The overrides of the experiment."""
    words: str
    """The overrides in words."""
    gpu_peak_bytes: int
    """The fullest GPU's peak with the change."""
    step_seconds: float
    """The step with the change."""
    script_changes: tuple[str, ...] = ()
    """Changes that the training script needs, where no file has the setting."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The first op that does not fit, `seconds` into the step (0 where the host issued it ahead of the step):
    `missing_bytes` when it ran, `peak_missing_bytes` at the peak. Where changes that make the job fit have
    been looked for, it `is_advised`."""

    op: str
    pool: str
    rank: int
    seconds: float
    missing_bytes: int
    peak_missing_bytes: int
    capacity_bytes: int
    least_gpus: int | None = None
    remedy: Remedy | None = None
    is_advised: bool = False


START_UP = "start-up"  # the `op` of an OutOfMemory before the first step
PINNED = "pinned"  # the `pool` of an OutOfMemory of page-locked memory


def over_limit(op: str, pool: str, needed: int, limit: int) -> OutOfMemory:
    """The finding that `needed` bytes exceed a `limit` from the start on."""
    return OutOfMemory(op, pool, 0, 0.0, needed - limit, needed - limit, limit)


Pool = Mapping[int, int]  # ranks that share one memory: {traced rank: number of ranks like it in the pool}


@dataclass(frozen=True)
class Ledger:
    """MemoryEvents sorted for look-up: the events of each device and rank, in order."""

    events: MemoryEvents
    categories: tuple[str, ...]
    columns: Ints
    by_rank: Mapping[str, Mapping[int, Ints]]

    @staticmethod
    def of(events: MemoryEvents | None) -> Ledger:
        if events is None:
            no_floats = np.zeros(0)
            no_ints = no_floats.astype(np.int64)
            events = MemoryEvents(no_ints, no_floats, no_floats, (), (), no_ints)
        names, indices = _factorize(events.categories)
        categories = (*CATEGORIES, *sorted(set(names) - set(CATEGORIES)))
        columns = np.array([categories.index(name) for name in names], dtype=np.int64)[indices]
        devices, indices = _factorize(events.devices)
        by_rank: dict[str, dict[int, Ints]] = {}
        for device in DEVICES:
            device_events = (
                np.flatnonzero(indices == devices.index(device)) if device in devices else indices[:0]
            )
            device_events = device_events[np.argsort(events.ranks[device_events], kind="stable")]
            ranks, firsts = np.unique(events.ranks[device_events], return_index=True)
            events_per_rank = np.split(device_events, firsts[1:]) if len(ranks) else []
            by_rank[device] = dict(zip(ranks.tolist(), events_per_rank, strict=True))
        return Ledger(events, categories, columns, by_rank)

    def pools(self, device: str, gpus_per_node: int, nodes: Sequence[Pool] | None) -> list[Pool]:
        """The memories of `device`.

        These are one GPU per traced rank. For host and NVMe they are the `nodes`, by default one node per
        traced rank with `gpus_per_node` ranks like it.
        """
        if device != "gpu" and nodes is not None:
            return list(nodes)
        return [{rank: 1 if device == "gpu" else gpus_per_node} for rank in self.by_rank[device]]

    def usage(self, device: str, pool: Pool) -> MemoryLevels:
        """Levels of `pool` over time."""
        events, no_events = self.events, np.zeros(0, np.int64)
        events_per_rank = [self.by_rank[device].get(rank, no_events) for rank in pool]
        pool_events = np.concatenate([no_events, *events_per_rank])
        members = np.repeat(
            list(pool.values()), [len(rank_events) for rank_events in events_per_rank]
        ).astype(np.int64)
        if len(pool) > 1:
            order = np.argsort(events.host_seconds[pool_events], kind="stable")
            pool_events, members = pool_events[order], members[order]
        return MemoryLevels(
            self.categories,
            events.host_seconds[pool_events],
            np.maximum.accumulate(events.stream_seconds[pool_events]),
            self.columns[pool_events],
            events.deltas[pool_events] * members,
            pool_events,
            events.names,
        )

    def fullest(
        self,
        device: str,
        gpus_per_node: int = 1,
        nodes: Sequence[Pool] | None = None,
        capacities: Mapping[str, Mapping[int, int]] | None = None,
    ) -> MemoryLevels:
        """Levels of the memory with the highest total: the fullest rank, or the fullest node.

        With `capacities` of the ranks by device, it is the one with the least room left.
        """
        pools = self.pools(device, gpus_per_node, nodes)
        usages = [self.usage(device, pool) for pool in pools]
        if len(usages) < 2:
            return usages[0] if usages else self.usage(device, {})
        limits = [_capacity_of(device, pool, capacities) or 0 for pool in pools]
        pool_indices = range(len(usages))
        return usages[max(pool_indices, key=lambda n: int(usages[n].totals.max(initial=0)) - limits[n])]


def _factorize(words: tuple[str, ...]) -> tuple[list[str], Ints]:
    return words.memoize(factorize) if isinstance(words, Labels) else factorize(words)


def _capacity_of(device: str, pool: Pool, capacities: Mapping[str, Mapping[int, int]] | None) -> int | None:
    """The capacity of this pool. None where all pools of the device have the same."""
    rank_capacities = None if capacities is None else capacities.get(device)
    return None if rank_capacities is None else rank_capacities[next(iter(pool))]


def peak(usage: MemoryLevels) -> Peak:
    """The maximum of the levels. Zeros where nothing was ever held."""
    if not len(usage.changes):
        return Peak(0, dict.fromkeys(usage.categories, 0), dict.fromkeys(usage.categories, 0), 0.0)
    totals = usage.totals
    top = int(totals.argmax())
    highest, at_top = usage.levels.max(axis=0).tolist(), usage.levels[top].tolist()
    return Peak(
        total=int(totals[top]),
        by_category=dict(zip(usage.categories, highest, strict=True)),
        at_total=dict(zip(usage.categories, at_top, strict=True)),
        seconds=float(usage.stream_seconds[top]),
    )


def memory_peaks(
    events: MemoryEvents | Ledger | None,
    gpus_per_node: int = 1,
    nodes: Sequence[Pool] | None = None,
    capacities: Mapping[str, Mapping[int, int]] | None = None,
) -> dict[str, Peak]:
    """The peak of the fullest GPU, host and NVMe. `capacities` are those of `Ledger.fullest`."""
    ledger = events if isinstance(events, Ledger) else Ledger.of(events)
    return {device: peak(ledger.fullest(device, gpus_per_node, nodes, capacities)) for device in DEVICES}


def first_over_capacity(
    events: MemoryEvents | Ledger | None,
    capacity: Mapping[str, int | None],
    gpus_per_node: int = 1,
    nodes: Sequence[Pool] | None = None,
    capacities: Mapping[str, Mapping[int, int]] | None = None,
) -> OutOfMemory | None:
    """The earliest op after which a memory holds more than its `capacity` (None or absent: unlimited).

    `capacities` are, by device, those of traced ranks, if they differ.
    """
    ledger = events if isinstance(events, Ledger) else Ledger.of(events)
    findings: list[tuple[float, OutOfMemory]] = []
    for device in DEVICES:
        common = capacity.get(device)
        if common is None:
            continue
        for pool in ledger.pools(device, gpus_per_node, nodes):
            pool_capacity = _capacity_of(device, pool, capacities)
            limit = common if pool_capacity is None else pool_capacity
            usage = ledger.usage(device, pool)
            events_over_limit = np.flatnonzero(usage.totals > limit)
            if not len(events_over_limit):
                continue
            first, totals = int(events_over_limit[0]), usage.totals
            issued = float(usage.host_seconds[first])
            finding = OutOfMemory(
                op=usage.name(first),
                pool=device,
                rank=next(iter(pool)),
                seconds=max(0.0, issued),
                missing_bytes=int(totals[first]) - limit,
                peak_missing_bytes=int(totals.max()) - limit,
                capacity_bytes=limit,
            )
            findings.append((issued, finding))
    return min(findings, key=itemgetter(0), default=(0.0, None))[1]
