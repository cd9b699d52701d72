"""The ops that an op of a program waits for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.plan.columns import op_columns
from zsim.plan.ops import Program
from zsim.plan.passes.queues import queued_behind
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
        self._before: list[int] = []
        self._firsts: list[int] = []
        ends_of: list[tuple[int, ...]] = []  # by op: the places that have ended when it has
        last_on_stream: dict[str, int] = {}
        columns = program.once(op_columns)
        for number, (stream, work, after) in enumerate(
            zip(columns.stream, columns.work, columns.after, strict=True)
        ):
            if work is None:
                ends_of.append(tuple({place: None for other in after for place in ends_of[other]}))
                continue
            place = len(self.numbers)
            self.numbers.append(number)
            ends_of.append((place,))
            self._firsts.append(len(self._before))
            self._before.append(last_on_stream.get(stream, -1))
            last_on_stream[stream] = place
            for other in after:
                self._before += ends_of[other]
        self._arrays: tuple[Ints, Ints] = np.array(self._before, np.int64), np.array(self._firsts, np.int64)
        self._firsts.append(len(self._before))
        self.ahead: dict[int, int] = {}
        behind = program.once(queued_behind, connections)
        for number, held in enumerate(behind or ()):
            if held >= 0:
                self.ahead[ends_of[held][0]] = ends_of[number][0]

    @cached_property
    def numbers_of(self) -> Ints:
        """`numbers` as an array."""
        return np.array(self.numbers, np.int64)

    @cached_property
    def _ahead_of(self) -> Ints:
        """By position, the launch right before it in its hardware queue. -1 without one."""
        found = np.full(len(self.numbers), -1, np.int64)
        found[list(self.ahead)] = list(self.ahead.values())
        return found

    def of(self, place: int) -> tuple[int, ...]:
        """The positions that the op at `position` waits for."""
        first, end = self._firsts[place], self._firsts[place + 1]
        return tuple(self._before[first + (self._before[first] < 0) : end])

    def last_ended(self, ends: Floats) -> Ints:
        """By position, the one of its predecessors that ended last, of equal ones the highest. -1 where it
        waits for none.

        `ends` gives, by position, when the op ended.
        """
        before, firsts = self._arrays
        by_end = np.append(np.argsort(ends, kind="stable"), -1)
        ranks = np.empty(len(by_end), np.int64)
        ranks[by_end] = np.arange(len(by_end))
        ranks[-1] = -1  # of no place
        return by_end[np.maximum.reduceat(ranks[before], firsts)] if len(firsts) else firsts

    def held_by(self, start: Floats, ready: Floats, tolerance: float) -> Ints:
        """By position, the launch that held it up in their hardware queue, itself where none did.

        `start` is when it started. `ready` is when the host had issued it, and everything that it waits for
        had ended.
        """
        held = np.arange(len(start))
        if not self.ahead:
            return held
        moving = held
        while len(moving):
            at, began = held[moving], start[moving]
            ahead = self._ahead_of[at]
            moves = (ahead >= 0) & (began - ready[at] > tolerance) & (began - start[ahead] <= tolerance)
            moving = moving[moves]
            held[moving] = ahead[moves]
        return held


def predecessors(program: Program, connections: int) -> Predecessors:
    """The predecessors of a program's ops, to be cached with the program."""
    return Predecessors(program, connections)
