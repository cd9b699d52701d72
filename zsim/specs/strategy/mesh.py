"""The mesh: ranks as a box whose axes are the parallelisms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from zsim.arrays import Ints

PIPELINE, DATA, CONTEXT, TENSOR = "pipeline", "data", "context", "tensor"
EXPERT, EXPERT_TENSOR, EXPERT_DATA = "expert", "expert_tensor", "expert_data"


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 to n - 1 as a box."""

    axes: tuple[tuple[str, int], ...]
    """(name, size) from the slowest to the fastest, as torch's DeviceMesh has them. Along the last axis ranks
    are adjacent.
    """

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def _box(self) -> Ints:
        sizes = [size for _, size in self.axes]
        return np.arange(self.world_size, dtype=np.int64).reshape(sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks along all the named axes."""
        return prod(size for name, size in self.axes if name in axes)

    def groups(self, *axes: str) -> Ints:
        """The ranks that differ in the named axes only, of shape [number of groups, ranks of a group].

        There is one row per group, in rank order within a row.
        """
        outer = [axis_index for axis_index, name in enumerate(self.names) if name not in axes]
        inner = [axis_index for axis_index, name in enumerate(self.names) if name in axes]
        return self._box.transpose([*outer, *inner]).reshape(-1, self.size(*axes))

    def coordinate(self, axis: str) -> Ints:
        """The coordinate of every rank along an axis, which may have several parts in the box."""
        assert axis in self.names, axis
        coordinates = np.zeros(self._box.shape, dtype=np.int64)
        for number, (name, size) in enumerate(self.axes):
            if name == axis:
                along = np.arange(size, dtype=np.int64)
                coordinates = coordinates * size + along.reshape([-1] + [1] * (len(self.axes) - number - 1))
        return coordinates.reshape(-1)
