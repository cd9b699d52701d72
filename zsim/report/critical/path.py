"""The critical path of a step: the chain of work that determines its end, read backwards.

# [Note: reading the chain backwards]
An op begins when the last of three things has happened: the previous op on its stream ended, an op that it
depends on ended, the host issued it. The one that happened last is the previous link of the chain. An op in a
shared hardware queue may be held up by a waiting launch before it. It begins when that launch does, so the
chain goes on with the predecessors of that launch (`zsim.plan.passes.hardware_queues`). A link of the host
goes back to the last time that the host was blocked, and from there to the op that it waited for.

A collective begins when its last rank has arrived, so the chain goes on at that rank. A message begins when
both sides have arrived, and a call with several messages ends with the one that began last. The chain covers
the whole step without gaps: its parts add up to the step's time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Floats, Ints, unique
from zsim.plan.columns import op_columns
from zsim.plan.ops import Collective, Plan, PointToPoint, Program
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.report.rank_map import StepTimes
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace


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


_SAME_INSTANT = 1e-9  # of the step
Peers = Mapping[tuple[int, int], Sequence[tuple[int, int]]]


def critical_path(
    plan: Plan,
    trace: Trace,
    communicators: Mapping[tuple[str, int], int] | None = None,
    connections: int = DEFAULT_CONNECTIONS,
    peers: Peers | None = None,
) -> Chain:
    """The chain from the step's beginning to its end, in that order. See [Note: reading the chain backwards].

    `trace` must be the simulated trace of `plan`, with one span per op with work. `communicators` gives, by
    (group, rank), a number that is equal for ranks that wait for each other. By default the ranks of a group
    do. `connections` is the number of hardware queues that the streams share. `peers` gives, by (rank, op) of
    a call with messages, the (rank, op) of the calls at the other side.
    """
    return _Walk(plan, trace, communicators or {}, connections, peers or {}).links()


class _RankOps(NamedTuple):
    """A rank's ops with work, by position."""

    dependencies: Predecessors
    start: Floats
    """When each started."""
    end: Floats
    """When each ended."""
    blocking_launch: Ints
    """The launch that held it up in their hardware queue, itself where none did."""
    predecessor: Ints
    """The predecessor of that launch that ended last. -1 without any."""
    predecessor_end: Floats
    """When that predecessor ended. 0 without any."""
    issue: Floats
    """When the host issued that launch."""
    next_link: list[int]
    """That predecessor, where the chain goes on with it and nothing else is to be checked, else -1."""


class _Walk:
    def __init__(
        self,
        plan: Plan,
        trace: Trace,
        communicators: Mapping[tuple[str, int], int],
        connections: int,
        peers: Peers,
    ) -> None:
        self.plan, self.trace, self.communicators, self.peers = plan, trace, communicators, peers
        self.tolerance = _SAME_INSTANT * trace.step_seconds
        self.begin = max(0.0, *trace.begins.values()) if trace.begins else 0.0  # of the last rank to begin
        self.dependencies = [program.memoize(predecessors, connections) for program in plan.programs]
        first_info = list(
            accumulate(
                (len(program_dependencies.numbers) for program_dependencies in self.dependencies), initial=0
            )
        )
        self.times = StepTimes(trace, plan, first_info)
        self.connections = connections
        self.is_alone = len(self.times.ranks) == 1 and not self.peers  # waits for no other traced rank
        self.rank_ops: dict[int, _RankOps] = {}
        self.rows: dict[str, dict[int, list[int]]] = {}
        self.row_of_rank: dict[str, Ints] = {}
        # The chain: ranks, and places of their ops (below 0: -1 - the place in `others`, the other links)
        self.ranks: list[int] = []
        self.positions: list[int] = []
        self.other_links: list[tuple[int, float, float]] = []

    def links(self) -> Chain:
        end = self.begin + self.trace.step_seconds
        rank, position = self.times.last()
        at: tuple[int, int] | None = (rank, position)
        if end - float(self._ops_of_rank(rank).end[position]) > self.tolerance:
            at = self._host(rank, end, len(self._ops_of_rank(rank).end))
        while at is not None:
            at = self._ops(*at)
        return self._make_chain()

    def _ops(self, rank: int, position: int) -> tuple[int, int] | None:
        """Add the op at `position` and those that it waited for in turn, up to one that waited for the host.

        Returns the (rank, position) that the host waited for. None at the step's beginning.
        """
        rank_ops = self._ops_of_rank(rank)
        while True:
            first = len(self.positions)
            while (next_position := rank_ops.next_link[position]) >= 0:
                self.positions.append(position)
                position = next_position
            self.ranks += [rank] * (len(self.positions) - first)
            last_rank, last_position = (
                (rank, position) if self.is_alone else self._last_to_arrive(rank, position)
            )
            if last_rank == rank:
                self.ranks.append(rank)
                self.positions.append(position)
            else:
                end, rank, position, rank_ops = (
                    float(rank_ops.end[position]),
                    last_rank,
                    last_position,
                    self._ops_of_rank(last_rank),
                )
                self._add(rank, rank_ops.dependencies.numbers[position], float(rank_ops.start[position]), end)
            start = float(rank_ops.start[position])
            if start <= self.begin + self.tolerance:
                return None
            predecessor_end, issue = (
                float(rank_ops.predecessor_end[position]),
                float(rank_ops.issue[position]),
            )
            if predecessor_end < issue or rank_ops.predecessor[position] < 0:
                break
            if start - predecessor_end > self.tolerance:  # a wait of unknown cause: the chain has no gaps
                self._add(rank, OTHERS, predecessor_end, start)
            position = int(rank_ops.predecessor[position])
        if start - issue > self.tolerance:
            self._add(rank, OTHERS, issue, start)
        return self._host(rank, issue, int(rank_ops.blocking_launch[position]))

    def _host(self, rank: int, until: float, end_position: int) -> tuple[int, int] | None:
        """Add the link of the host that ends at `until`, and return the op that it was last blocked on.

        Only positions below `end_position` count, since ops shorter than the tolerance end at the same
        instant.
        """
        stalls = self.times.rank_times(rank).stalls
        number = bisect_right(stalls, until + self.tolerance, key=itemgetter(0)) - 1
        while number >= 0 and stalls[number][2] >= end_position:
            number -= 1
        if number < 0:
            self._add_host(rank, self.begin, until)
            return None
        ended, _, position = stalls[number]
        self._add_host(rank, min(ended, until), until)
        return rank, position

    def _add_host(self, rank: int, start: float, end: float) -> None:
        """Add the host's interval, with the parts in torch's allocator as separate links."""
        calls = self.times.rank_times(rank).allocator
        for number in range(bisect_left(calls, end, key=itemgetter(0)) - 1, -1, -1):
            call_start, call_end = calls[number]
            if call_end <= start:
                break
            call_end = min(call_end, end)
            self._add(rank, HOST, call_end, end)
            self._add(rank, ALLOCATOR, max(call_start, start), call_end)
            end = max(call_start, start)
        self._add(rank, HOST, start, end)

    def _ops_of_rank(self, rank: int) -> _RankOps:
        rank_ops = self.rank_ops.get(rank)
        if rank_ops is None:
            rank_ops = self.rank_ops[rank] = self._make_rank_ops(rank)
        return rank_ops

    def _make_rank_ops(self, rank: int) -> _RankOps:
        dependencies, tolerance = self._dependencies_of(rank), self.tolerance
        issue, start, end = self.times.columns(rank)
        last_predecessor, ends = (
            dependencies.last_ended(end),
            np.append(end, 0.0),
        )  # 0 where nothing was waited for
        blocking_launch = dependencies.blocking_launches(
            start, np.maximum(issue, ends[last_predecessor]), tolerance
        )
        predecessor = last_predecessor[blocking_launch]
        predecessor_end, issue_time = ends[predecessor], np.minimum(issue[blocking_launch], start)
        goes_on = (
            (predecessor >= 0) & (predecessor_end >= issue_time) & (start - predecessor_end <= tolerance)
        )
        goes_on &= start > self.begin + tolerance
        if not self.is_alone:
            goes_on &= ~self._program(rank).memoize(_are_calls, self.connections)
        next_link = np.where(goes_on, predecessor, -1).tolist()
        return _RankOps(
            dependencies, start, end, blocking_launch, predecessor, predecessor_end, issue_time, next_link
        )

    def _dependencies_of(self, rank: int) -> Predecessors:
        return self.dependencies[int(self.plan.program_of[rank])]

    def _program(self, rank: int) -> Program:
        return self.plan.program_on(rank)

    def _last_to_arrive(self, rank: int, position: int) -> tuple[int, int]:
        """The simulated rank that was the last to arrive at the same collective or message, and the position
        of its call. For other work they are `rank` and `position`.
        """
        number = self._dependencies_of(rank).numbers[position]
        work = self._program(rank).ops[number].work
        times = self.times
        if isinstance(work, PointToPoint):
            return self._last_side(rank, number, position)
        if not isinstance(work, Collective) or len(times.ranks) == 1:
            return rank, position
        rows = self._rows_of_communicator(work.group, self._communicator_of(work.group, rank))
        positions: int | list[int] = position
        if len(self.dependencies) > 1:
            call = self._calls(rank, work.group).index(position)
            positions = [self._calls(times.ranks[row], work.group)[call] for row in rows]
        starts = times.start[rows, positions]
        latest = int(np.argmax(starts))
        if times.start[times.row_of[rank], position] == starts[latest]:
            return rank, position
        return times.ranks[rows[latest]], positions if isinstance(positions, int) else positions[latest]

    def _calls(self, rank: int, group: str) -> list[int]:
        """Positions of the rank's calls of a group."""
        return self._program(rank).memoize(_positions_of_calls, self.connections)[group]

    def _last_side(self, rank: int, number: int, position: int) -> tuple[int, int]:
        latest = (float(self._ops_of_rank(rank).start[position]), rank, position)
        for peer, op in self.peers.get((rank, number), ()):
            peer_position = bisect_left(self._dependencies_of(peer).numbers, op)
            start = float(self._ops_of_rank(peer).start[peer_position])
            if start > latest[0]:
                latest = (start, peer, peer_position)
        return latest[1:]

    def _rows_of_communicator(self, group: str, communicator: int) -> list[int]:
        """Rows of the simulated ranks that wait for each other in this communicator of the group."""
        if group not in self.rows:
            rows: dict[int, list[int]] = {}
            for row, rank in enumerate(self.times.ranks):
                rows.setdefault(self._communicator_of(group, rank), []).append(row)
            self.rows[group] = rows
        return self.rows[group][communicator]

    def _communicator_of(self, group: str, rank: int) -> int:
        communicator = self.communicators.get((group, rank))
        if communicator is not None:
            return communicator
        if group not in self.row_of_rank:
            self.row_of_rank[group] = self.plan.groups[group].row_per_rank(self.plan.world_size)
        return int(self.row_of_rank[group][rank])

    def _add(self, rank: int, op: int, start: float, end: float) -> None:
        """Add a link that is not an op whose times are in the trace."""
        self.ranks.append(rank)
        self.other_links.append((op, start, end))
        self.positions.append(-len(self.other_links))

    def _make_chain(self) -> Chain:
        """The chain in order, from the step's beginning on."""
        ranks, positions = np.array(self.ranks[::-1], np.int64), np.array(self.positions[::-1], np.int64)
        are_ops = positions >= 0
        ops, starts, ends = np.empty_like(positions), np.empty(len(positions)), np.empty(len(positions))
        other_links = np.array(self.other_links, np.float64).reshape(-1, 3)[-1 - positions[~are_ops]]
        ops[~are_ops], starts[~are_ops], ends[~are_ops] = other_links.T
        for rank in unique(ranks[are_ops]):
            is_of_rank, rank_ops = are_ops & (ranks == rank), self.rank_ops[rank]
            op_positions = positions[is_of_rank]
            ops[is_of_rank], starts[is_of_rank], ends[is_of_rank] = (
                rank_ops.dependencies.numbers_of[op_positions],
                rank_ops.start[op_positions],
                rank_ops.end[op_positions],
            )
        starts = np.maximum(starts, self.begin)
        has_length = ends > starts
        return Chain(ranks[has_length], ops[has_length], starts[has_length], ends[has_length])


def _are_calls(program: Program, connections: int) -> Bools:
    """Whether each op with work calls other ranks, by position."""
    numbers = program.memoize(predecessors, connections).numbers
    return np.array([isinstance(program.ops[n].work, Collective | PointToPoint) for n in numbers], np.bool_)


def _positions_of_calls(program: Program, connections: int) -> dict[str, list[int]]:
    """Positions of the calls of each group, by group."""
    positions_of_group: dict[str, list[int]] = {}
    for position, number in enumerate(program.memoize(predecessors, connections).numbers):
        work = program.ops[number].work
        if isinstance(work, Collective):
            positions_of_group.setdefault(work.group, []).append(position)
    return positions_of_group
