"""The mesh on the nodes: which coordinates the ranks of a node have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.plan.ops import Plan
from zsim.specs.strategy.parallelism import Mesh
from zsim.trace.trace import Trace

_MAX_NODES = 8


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks of one node, from `first_rank` on: `coordinates[axis]` has one number per rank."""

    node: int
    first_rank: int
    coordinates: dict[str, tuple[int, ...]]

    @property
    def num_ranks(self) -> int:
        return len(next(iter(self.coordinates.values())))


@dataclass(frozen=True, slots=True)
class RankMap:
    """The axes of the mesh, and the ranks of the first nodes."""

    axes: tuple[tuple[str, int], ...]
    """(name, size) of each axis, from the slowest to the fastest."""
    nodes: tuple[NodeRanks, ...]
    """The first of the nodes."""
    num_nodes: int
    world_size: int
    """Number of ranks of all nodes."""
    expert_axes: tuple[tuple[str, int], ...] = ()
    """The axes with other names of the mesh that routed experts have."""

    @property
    def shown_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank."""
        return tuple(name for name, size in (*self.axes, *self.expert_axes) if size > 1)


def rank_map(mesh: Mesh, gpus: Sequence[int], nodes: Sequence[int], experts: Mesh | None = None) -> RankMap:
    """The map of a job that has `gpus[i]` ranks on its i-th node, which is number `nodes[i]` of the fabric.
    `experts`: the mesh of routed experts, where several ranks share them."""
    coordinates: dict[str, Ints] = {axis: mesh.coordinate(axis) for axis in mesh.names}
    expert_axes = (
        () if experts is None else tuple(axis for axis in experts.axes if axis[0] not in coordinates)
    )
    if experts is not None:
        coordinates |= {axis: experts.coordinate(axis) for axis, _ in expert_axes}
    ends = np.cumsum(gpus).tolist()
    node_ranks = tuple(
        NodeRanks(
            number,
            end - count,
            {
                axis: tuple(axis_coordinates[end - count : end].tolist())
                for axis, axis_coordinates in coordinates.items()
            },
        )
        for number, count, end in list(zip(nodes, gpus, ends, strict=True))[:_MAX_NODES]
    )
    return RankMap(mesh.axes, node_ranks, len(gpus), mesh.world_size, expert_axes)


def ranges(numbers: Sequence[int]) -> str:
    """Distinct numbers in words: "0-7", "0, 2, 4", "3"."""
    intervals: list[list[int]] = []
    for number in sorted(set(numbers)):
        if intervals and number == intervals[-1][1] + 1:
            intervals[-1][1] = number
        else:
            intervals.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in intervals)


HostStall = tuple[float, float, int]


class RankTimes:
    """One rank's times by position among the ops with work.

    `stalls` are the times in which its host was blocked, sorted by end, as (end, start, position of the op
    that it waited for). `allocator` has (start, end) of the host's time in torch's allocator when that had
    run short.
    """

    def __init__(
        self,
        issue: Floats,
        start: Floats,
        end: Floats,
        stalls: list[HostStall],
        allocator: list[tuple[float, float]],
    ) -> None:
        self._columns = issue, start, end
        self.stalls = sorted(stalls)
        self.allocator = sorted(allocator)

    @cached_property
    def issue(self) -> list[float]:
        issues: list[float] = self._columns[0].tolist()
        return issues

    @cached_property
    def start(self) -> list[float]:
        starts: list[float] = self._columns[1].tolist()
        return starts

    @cached_property
    def end(self) -> list[float]:
        ends: list[float] = self._columns[2].tolist()
        return ends


class StepTimes:
    """The trace as one row per rank and one column per op with work (padded with -inf where other ranks have
    more ops).

    A chain visits few ranks, so the times of a rank are made on demand. `first_info` is, by program, the
    index of its first span information in the trace.
    """

    def __init__(self, trace: Trace, plan: Plan, first_info: Sequence[int]) -> None:
        ranks, self._counts = np.unique(trace.ranks, return_counts=True)
        self.ranks: list[int] = ranks.tolist()
        order = _order(trace)
        self._issue, self.start, self._end = (
            _reshape_rows(seconds if order is None else seconds[order], self._counts)
            for seconds in (trace.issue_seconds, trace.start_seconds, trace.end_seconds)
        )
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self._stalls: dict[int, list[HostStall]] = {}
        for rank, start, end, info in trace.host_blocks:
            position = info - first_info[plan.program_of[rank]]
            self._stalls.setdefault(rank, []).append((end, start, position))
        self._allocator: dict[int, list[tuple[float, float]]] = {}
        for rank, start, end in trace.allocator_blocks:
            self._allocator.setdefault(rank, []).append((start, end))
        self._rank_times: dict[int, RankTimes] = {}

    def rank_times(self, rank: int) -> RankTimes:
        rank_times = self._rank_times.get(rank)
        if rank_times is None:
            times = self.columns(rank)
            stalls, allocator = self._stalls.get(rank, []), self._allocator.get(rank, [])
            rank_times = self._rank_times[rank] = RankTimes(*times, stalls, allocator)
        return rank_times

    def columns(self, rank: int) -> tuple[Floats, Floats, Floats]:
        """When the rank's ops with work were issued, started and ended, by position."""
        row = self.row_of[rank]
        count = self._counts[row]
        return self._issue[row, :count], self.start[row, :count], self._end[row, :count]

    def last(self) -> tuple[int, int]:
        """The rank that ends last, and the position of its last op. Of equal ones these are the first rank
        and the last position.
        """
        row = int(np.argmax(self._end.max(axis=1)))
        ends = self._end[row]
        return self.ranks[row], int(np.flatnonzero(ends == ends.max())[-1])


def _order(trace: Trace) -> Ints | None:
    """The spans sorted by rank and information. None if they are in that order."""
    keys = trace.ranks * len(trace.infos) + trace.info_indices
    if (keys[1:] >= keys[:-1]).all():
        return None
    return np.lexsort((trace.info_indices, trace.ranks))


def _reshape_rows(seconds: Floats, counts: Ints) -> Floats:
    if (counts == counts[0]).all():
        return seconds.reshape(len(counts), -1)
    rows = np.full((len(counts), counts.max()), -np.inf)
    rows[np.arange(counts.max()) < counts[:, None]] = seconds
    return rows
