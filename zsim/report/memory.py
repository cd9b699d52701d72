"""Memory over time: levels, peaks, and the first op that does not fit.

Peaks are taken in the order of the events, which is the host's order (as the allocator sees them). Timelines
draw the same levels at the time when the compute stream reached them.

The holders of a GPU's memory over a step: the plan's memory changes, added up by module, unit and phase.

No simulation: see [Note: memory follows the host] in zsim.plan.ops. Activations belong to modules (a
checkpoint to its block), FSDP's gathered parameters and FSDP2's unreduced gradients to units. Memory that a
framework pools for all modules (DeepSpeed's buckets and fetches, FSDP1's gradients, sharded states) belongs
to none, and is listed under its category or a separate name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from zsim.arrays import Floats, Ints, factorize
from zsim.cost.rates.host_calls import MEASURED_RANKS
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
from zsim.report.framework import allocator_warnings
from zsim.trace.trace import Labels, MemoryEvents
from zsim.units import format_seconds

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
    fits_probability: float | None = None
    """The probability that the job fits with the change. None where it is sure enough not to be said."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The first op that does not fit, `seconds` into the step (0 where the host issued it ahead of the step):
    `missing_bytes` when it ran, `peak_missing_bytes` at the peak. Where changes that make the job fit have
    been looked for, `tried` names them."""

    op: str
    pool: str
    rank: int
    seconds: float
    missing_bytes: int
    peak_missing_bytes: int
    capacity_bytes: int
    least_gpus: int | None = None
    remedy: Remedy | None = None
    tried: tuple[str, ...] = ()


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
    gpus_per_node: int
    """Ranks like each traced one on a node, where `nodes` do not say which ranks share one."""
    nodes: Sequence[Pool] | None
    capacities: Mapping[str, Mapping[int, int]] | None
    """By device those of traced ranks, if they differ."""

    @staticmethod
    def of(
        events: MemoryEvents | None,
        gpus_per_node: int = 1,
        nodes: Sequence[Pool] | None = None,
        capacities: Mapping[str, Mapping[int, int]] | None = None,
    ) -> Ledger:
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
        return Ledger(events, categories, columns, by_rank, gpus_per_node, nodes, capacities)

    def pools(self, device: str) -> list[Pool]:
        """The memories of `device`: one GPU per traced rank, for host and NVMe the nodes."""
        if device != "gpu" and self.nodes is not None:
            return list(self.nodes)
        return [{rank: 1 if device == "gpu" else self.gpus_per_node} for rank in self.by_rank[device]]

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

    def fullest(self, device: str) -> MemoryLevels:
        """Levels of the memory with the highest total: the fullest rank, or the fullest node. Where
        capacities differ, it is the one with the least room left.
        """
        pools = self.pools(device)
        usages = [self.usage(device, pool) for pool in pools]
        if len(usages) < 2:
            return usages[0] if usages else self.usage(device, {})
        limits = [self._capacity_of(device, pool) or 0 for pool in pools]
        pool_indices = range(len(usages))
        return usages[max(pool_indices, key=lambda n: int(usages[n].totals.max(initial=0)) - limits[n])]

    def _capacity_of(self, device: str, pool: Pool) -> int | None:
        """The capacity of this pool. None where all pools of the device have the same."""
        rank_capacities = None if self.capacities is None else self.capacities.get(device)
        return None if rank_capacities is None else rank_capacities[next(iter(pool))]

    def peaks(self) -> dict[str, Peak]:
        """The peak of the fullest GPU, host and NVMe."""
        return {device: peak(self.fullest(device)) for device in DEVICES}

    def first_over_capacity(self, capacity: Mapping[str, int | None]) -> OutOfMemory | None:
        """The earliest op after which a memory holds more than its `capacity` (None or absent: unlimited).

        What is missing at the peak is that of the memory of the same kind which lacks most, as in `peaks`.
        """
        findings: list[tuple[float, OutOfMemory]] = []
        for device in DEVICES:
            common = capacity.get(device)
            if common is None:
                continue
            for pool in self.pools(device):
                pool_capacity = self._capacity_of(device, pool)
                limit = common if pool_capacity is None else pool_capacity
                usage = self.usage(device, pool)
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
        if not findings:
            return None
        earliest = min(findings, key=itemgetter(0))[1]
        fullest = max((each for _, each in findings if each.pool == earliest.pool), key=_load)
        return replace(
            earliest, peak_missing_bytes=fullest.peak_missing_bytes, capacity_bytes=fullest.capacity_bytes
        )


def _factorize(words: tuple[str, ...]) -> tuple[list[str], Ints]:
    return words.memoize(factorize) if isinstance(words, Labels) else factorize(words)


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
    events: MemoryEvents | None, gpus_per_node: int = 1, nodes: Sequence[Pool] | None = None
) -> dict[str, Peak]:
    """The peak of the fullest GPU, host and NVMe."""
    return Ledger.of(events, gpus_per_node, nodes).peaks()


def _load(finding: OutOfMemory) -> float:
    """The bytes that are missing at the peak, as a part of the capacity."""
    return finding.peak_missing_bytes / max(1, finding.capacity_bytes)


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


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """torch's caching allocator in a steady step, on the rank where it runs short most, or reserves most."""

    reserved_bytes: int
    """The maximum (`torch.cuda.max_memory_reserved`), without the CUDA context and NCCL's buffers."""
    limit_bytes: int
    """The bytes that the GPU has without these."""
    retries: int
    """Times per step that it ran short and gave its cache back to the driver (torch's
    `num_alloc_retries`).
    """
    extra_seconds: float
    """The seconds that the retries add to the step."""
    released_segments: int
    """The number of segments given back."""
    failures: int
    """Requests that did not fit even then (out of memory in torch), in this step or in an earlier one."""
    step_seconds_without_retries: float
    """The step as it is while the allocator has room."""

    @property
    def may_run_out(self) -> bool:
        """Whether torch may stop with an out-of-memory error though all tensors fit."""
        return self.failures > 0


def allocator_notes(row: AllocatorRow | None, *, is_expandable: bool) -> Iterator[str]:
    """Notes on an allocator that ran short. There are none where it did not."""
    if row is None:
        return
    remedy = "" if is_expandable else "; training.expandable_segments shows the step without such pieces"
    if row.retries:
        times = {1: "once", 2: "twice"}.get(row.retries, f"{row.retries:,} times")
        yield (
            f"torch's allocator runs short about {times} a step, waits for the GPU and gives "
            f"{row.released_segments:,} cached segments back to the driver "
            f"(num_alloc_retries{allocator_warnings()}): memory is asked for in pieces that do not fit "
            f"what was freed, or what was freed is still in use on another stream{remedy}"
        )
        yield (
            f"the step takes {format_seconds(row.extra_seconds)} longer because the allocator runs short "
            '("torch\'s allocator" in the breakdown, of which something else may have taken a part), and '
            f"{format_seconds(row.step_seconds_without_retries)} if it does not; this is the least certain "
            "part of a prediction, so the step's range spans both. What a retry takes was measured on 1 to "
            f"{MEASURED_RANKS} GPUs and is taken to be the same on more (docs/accuracy.md)"
        )
    if row.failures:
        requests = "one request" if row.failures == 1 else f"about {row.failures:,} requests"
        yield (
            "torch may stop with an out-of-memory error that names memory reserved but unallocated: "
            f"{requests} of the steady step, or of one before it, cannot be met even when its allocator has "
            f"given its cache back{remedy}"
        )
