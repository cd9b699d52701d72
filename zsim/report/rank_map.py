"""The mesh on the nodes: which coordinates the ranks of a node have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Ints
from zsim.specs.strategy.mesh import Mesh

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
