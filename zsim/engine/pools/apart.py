"""An allocator's pools in two groups, each simulated by itself as if the driver had room for anything.

# [Note: pools apart]
As long as the driver has room, an allocator's pools are independent of each other. A pool whose blocks can be
reused at once does the same whatever the times of a run, and whatever the GPU's capacity. So pools without
blocks that `record_stream` protects are brought to their steady state once for all runs of a program. Pools
with protected blocks are simulated for every run. Each of their blocks is free before the first request of
any pool at which its last use has ended (`process_events`). Segments are never given back meanwhile: the
driver had room for all if it has room for what both groups reserve at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import compress

import numpy as np

from zsim.arrays import Ints
from zsim.dataclass import dataclass
from zsim.devices.allocator import Allocator, Changes
from zsim.devices.caching_allocator import UNLIMITED, CachingAllocator, PoolName
from zsim.engine.pools.part import FREE, PartRun, PoolsPart, by_tensor


@dataclass(frozen=True)
class ChangesApart:
    """The changes of one run of a program, partitioned by whether their pools have blocks that are protected
    when freed.
    """

    timed: PoolsPart
    """The changes in pools with protected blocks."""
    others: PoolsPart
    """The changes in the other pools."""
    timed_pools: frozenset[PoolName]
    ops: Ints
    requests: Ints
    """The positions of all requests."""
    request_ops: Ints
    """The ops before which the requests are made."""
    given_back: Ints
    """The indices in `protected` of frees of protected blocks."""
    uses: Ints
    """The ops that use these blocks last."""

    def timed_places(self, issue: Sequence[float], ended: Sequence[float]) -> Ints:
        """The positions of the changes in pools with protected blocks.

        The free of a block in use is just before the first request at which its last use has ended. If there
        is none it is after all changes.
        """
        places = self.timed.places.copy()
        if len(self.given_back):
            times = np.append(np.asarray(issue), max(ended))[np.minimum(self.request_ops, len(issue))]
            first = np.searchsorted(times, np.asarray(ended)[self.uses])
            first = np.maximum(first, np.searchsorted(self.requests, places[self.given_back]))
            places[self.given_back] = np.append(self.requests, 2 * len(self.ops))[first] - 1
        return places

    def place_of_op(self, op: int) -> int:
        """Twice the index of the first change from `op` on. It is 0 if there is none."""
        number = int(np.searchsorted(self.ops, op))
        return 2 * number if number < len(self.ops) else 0


def changes_apart(changes: Changes) -> ChangesApart:
    """The changes of one run, split into pools with protected blocks and other pools."""
    ops, tensors, counts, streams, until_ops, stream_names = changes.columns
    asking = counts > 0
    asked = (counts * len(stream_names) + streams)[asking]
    known, number = np.unique(asked, return_inverse=True)
    sizes, of_stream = (column.tolist() for column in np.divmod(known, max(len(stream_names), 1)))
    requests = tuple((size, stream_names[place]) for size, place in zip(sizes, of_stream, strict=True))
    of_tensor = by_tensor(tensors)
    of_tensor[tensors[asking]] = number
    pools = [CachingAllocator.pool_of(*request) for request in requests]
    place_of = {name: place for place, name in enumerate(pools)}
    pool = np.array([place_of[name] for name in pools], dtype=np.int64)[of_tensor[tensors]]
    is_protected = ~asking & (until_ops >= 0)
    is_timed_pool = np.zeros(len(pools), dtype=bool)
    is_timed_pool[pool[is_protected]] = True
    is_timed = is_timed_pool[pool]
    kinds = np.full(len(tensors), FREE)
    kinds[asking] = number
    timed, others = (
        PoolsPart(tensors[places], kinds[places], requests, 2 * places)
        for places in (np.flatnonzero(is_timed), np.flatnonzero(~is_timed))
    )
    protected = is_protected[is_timed]
    return ChangesApart(
        timed,
        others,
        frozenset(compress(pools, is_timed_pool.tolist())),
        ops,
        2 * np.flatnonzero(asking),
        ops[asking],
        np.flatnonzero(protected),
        until_ops[is_timed][protected],
    )


@dataclass(frozen=True)
class Pass:
    """The result of one run of some pools."""

    reserved: int
    """Bytes reserved at the end of the run, more than before the first run."""
    segments: int
    """Number of segments requested in the last step of the run."""
    has_grown: bool
    """Whether the run requested any segment in any of its steps."""
    places: Ints
    """The position of each change."""
    active: Ints
    """By change, its difference of active bytes."""
    active_before: int
    """Active bytes before the first change."""
    pools: dict[PoolName, int] = field(default_factory=dict)
    """Reserved bytes by pool of the memory it ran in. Empty if the memory has grown."""


@dataclass
class PoolPasses:
    """Runs of some pools through a program, one after the other: the first run, and then later runs that are
    all alike.

    The input of a run is its events, the positions of its changes, and the position from which on segments
    are counted.
    """

    memory: CachingAllocator
    """The memory before the next run, of unlimited capacity."""
    first: tuple[PoolsPart, Ints, int]
    later: tuple[PoolsPart, Ints, int]
    come_back: bool = False
    """Whether the blocks of one of a model's equal blocks are free again before the next ones, or soon after,
    so that repeats are looked for.
    """
    done: list[Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reserved = self.memory.reserved_bytes

    def number(self, number: int) -> Pass:
        """Run `number`, counted from 0. A run that does not grow equals all later runs with the same
        changes."""
        while len(self.done) <= number:
            last = self.done[-1] if self.done else None
            is_known = last is not None and not last.has_grown
            if last is not None and is_known and (len(self.done) > 1 or self.first is self.later):
                self.done.append(last)
            else:
                self._run(*(self.later if self.done else self.first))
        return self.done[number]

    def _run(self, part: PoolsPart, places: Ints, counted_from: int) -> None:
        memory = self.memory
        segments, before = memory.num_segments, memory.active_bytes
        order = np.argsort(places, kind="stable")
        cut = int(np.searchsorted(places[order], counted_from))
        run = PartRun(memory, part, order, cut, finds_repeats=self.come_back)
        began = run.state() if run.half else None
        run.make(0, cut)
        counted, place = memory.num_segments, cut
        if run.half:  # see [Note: a period that changes nothing] of repeats.py
            run.make(cut, run.half)
            place = run.half
            if run.state() == began:
                run.sizes *= 2
                place = len(order)
        for repeat in run.repeats if place < len(order) else ():
            run.make(place, repeat.first)
            run.make_repeat(repeat)
            place = repeat.end
        run.make(place, len(order))
        run.free_the_rest()
        has_grown = memory.num_segments > segments
        size_of = by_tensor(run.tensors)
        size_of[run.tensors[run.is_asking]] = run.sizes
        self.done.append(
            Pass(
                memory.reserved_bytes - self._reserved,
                memory.num_segments - counted,
                has_grown,
                places[order],
                np.where(run.is_asking, 1, -1) * size_of[run.tensors],
                before,
                {} if has_grown else memory.reserved_by_pool(),
            )
        )


def peak_active_bytes(timed: Pass, others: Pass, resident: int) -> int:
    """Maximum active bytes in one run of all pools. `resident` bytes are active in both groups."""
    order = np.argsort(np.concatenate([timed.places, others.places]), kind="stable")
    change = np.concatenate([timed.active, others.active])[order]
    before = timed.active_before + others.active_before - resident
    return before + int(np.cumsum(change).max(initial=0))


class ProgramApart:
    """The changes that all runs of a program with one allocator have in common. The allocator is `initial`
    before the first step.
    """

    def __init__(self, empty: Allocator) -> None:
        self.later = changes_apart(empty.changes)
        self.first = self.later if empty.first_changes is None else changes_apart(empty.first_changes)
        self.counts_from = empty.counts_from

    def others(self, empty: Allocator) -> PoolPasses:
        """The runs of the pools whose blocks can be reused at once."""
        later = self._part(self.later, self.later.others, self.later.others.places)
        first = later
        if self.first is not self.later:
            first = self._part(self.first, self.first.others, self.first.others.places)
        return PoolPasses(empty.memory.copy(UNLIMITED), first, later, come_back=True)

    def places(self, issue: Sequence[float], ended: Sequence[float]) -> tuple[Ints, Ints]:
        """The positions of the changes in pools with protected blocks, in the first run and in later runs, at
        the times of one run.
        """
        later = self.later.timed_places(issue, ended)
        return later if self.first is self.later else self.first.timed_places(issue, ended), later

    def timed(self, empty: Allocator, places: tuple[Ints, Ints]) -> PoolPasses:
        """The runs of the pools with protected blocks, at `positions`."""
        later = self._part(self.later, self.later.timed, places[1])
        first = later
        if self.first is not self.later:
            first = self._part(self.first, self.first.timed, places[0])
        return PoolPasses(empty.memory.copy(UNLIMITED), first, later, come_back=True)

    def _part(self, run: ChangesApart, part: PoolsPart, places: Ints) -> tuple[PoolsPart, Ints, int]:
        return part, places, run.place_of_op(self.counts_from)
