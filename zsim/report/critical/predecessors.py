"""The ops that an op of a program waits for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.plan.columns import op_columns
from zsim.plan.ops import Program
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS


class Predecessors:
    """The ops with work that must end before an op may start, as positions among the ops with work
    (`numbers`).

    Ops without work (waits, hooks) are replaced by their predecessors. `previous_in_queue[position]` is the
    launch right before the one at `position` in a hardware queue that streams share.
    """

    def __init__(self, program: Program, connections: int = DEFAULT_CONNECTIONS) -> None:
        self.numbers: list[int] = []
        # of each place in turn: the previous op on its stream (-1 without one), then those in its `after`
        self._predecessors: list[int] = []
        self._firsts: list[int] = []
        ends_of: list[tuple[int, ...]] = []  # by op: the places that have ended when it has
        last_on_stream: dict[str, int] = {}
        columns = program.memoize(op_columns)
        for number, (stream, work, after) in enumerate(
            zip(columns.stream, columns.work, columns.after, strict=True)
        ):
            if work is None:
                ends_of.append(
                    tuple({position: None for predecessor in after for position in ends_of[predecessor]})
                )
                continue
            position = len(self.numbers)
            self.numbers.append(number)
            ends_of.append((position,))
            self._firsts.append(len(self._predecessors))
            self._predecessors.append(last_on_stream.get(stream, -1))
            last_on_stream[stream] = position
            for predecessor in after:
                self._predecessors += ends_of[predecessor]
        self._arrays: tuple[Ints, Ints] = (
            np.array(self._predecessors, np.int64),
            np.array(self._firsts, np.int64),
        )
        self._firsts.append(len(self._predecessors))
        self.previous_in_queue: dict[int, int] = {}
        next_in_queue = program.memoize(program_next_in_queue, connections)
        for number, next_launch in enumerate(next_in_queue or ()):
            if next_launch >= 0:
                self.previous_in_queue[ends_of[next_launch][0]] = ends_of[number][0]

    @cached_property
    def numbers_of(self) -> Ints:
        """`numbers` as an array."""
        return np.array(self.numbers, np.int64)

    @cached_property
    def _previous_in_queue_array(self) -> Ints:
        """By position, the launch right before it in its hardware queue. -1 without one."""
        previous = np.full(len(self.numbers), -1, np.int64)
        previous[list(self.previous_in_queue)] = list(self.previous_in_queue.values())
        return previous

    def predecessors_of(self, position: int) -> tuple[int, ...]:
        """The positions that the op at `position` waits for."""
        first, end = self._firsts[position], self._firsts[position + 1]
        return tuple(self._predecessors[first + (self._predecessors[first] < 0) : end])

    def last_ended(self, ends: Floats) -> Ints:
        """By position, the one of its predecessors that ended last, of equal ones the highest. -1 where it
        waits for none.

        `ends` gives, by position, when the op ended.
        """
        all_predecessors, firsts = self._arrays
        by_end = np.append(np.argsort(ends, kind="stable"), -1)
        ranks = np.empty(len(by_end), np.int64)
        ranks[by_end] = np.arange(len(by_end))
        ranks[-1] = -1  # of no place
        return by_end[np.maximum.reduceat(ranks[all_predecessors], firsts)] if len(firsts) else firsts

    def blocking_launches(self, start: Floats, ready: Floats, tolerance: float) -> Ints:
        """By position, the launch that held it up in their hardware queue, itself where none did.

        `start` is when it started. `ready` is when the host had issued it, and everything that it waits for
        had ended.
        """
        blocking = np.arange(len(start))
        if not self.previous_in_queue:
            return blocking
        unresolved = blocking
        while len(unresolved):
            launches, starts = blocking[unresolved], start[unresolved]
            previous = self._previous_in_queue_array[launches]
            is_blocked = (
                (previous >= 0)
                & (starts - ready[launches] > tolerance)
                & (starts - start[previous] <= tolerance)
            )
            unresolved = unresolved[is_blocked]
            blocking[unresolved] = previous[is_blocked]
        return blocking


def predecessors(program: Program, connections: int) -> Predecessors:
    """The predecessors of a program's ops, to be cached with the program."""
    return Predecessors(program, connections)


# -- A chain of work, link by link -------------------------------------------------------------------------


# In place of an op number: the host issuing work; a wait whose cause is not in this trace; the host in
# torch's allocator, which has run short and gets memory from the driver and gives it back.
HOST, OTHERS, ALLOCATOR = -1, -2, -3


class Link(NamedTuple):
    """One link of the chain: an op of the plan on a rank, or the rank's host (`HOST`, `ALLOCATOR`), or a wait
    of unknown cause (`OTHERS`)."""

    rank: int
    op: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class Chain:
    """Links in order, as columns with one entry per link."""

    def __init__(self, ranks: Ints, ops: Ints, starts: Floats, ends: Floats) -> None:
        self.ranks, self.ops, self.starts, self.ends = ranks, ops, starts, ends

    @staticmethod
    def of(links: Iterable[Link]) -> Chain:
        """The links as columns."""
        rows = np.fromiter(itertools.chain.from_iterable(links), np.float64).reshape(-1, len(Link._fields))
        ranks, ops, starts, ends = rows.T
        return Chain(ranks.astype(np.int64), ops.astype(np.int64), starts, ends)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Link]:
        columns = self.ranks, self.ops, self.starts, self.ends
        return map(Link._make, zip(*(column.tolist() for column in columns), strict=True))

    def __getitem__(self, index: int) -> Link:
        return Link(
            int(self.ranks[index]), int(self.ops[index]), float(self.starts[index]), float(self.ends[index])
        )
