"""What a framework's hooks are made for: a part of the model, where it is written down, on which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Group
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.training import Training

WORLD = "world"


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The ranks that hold the same part of the model, replicated or sharded: `size` of them, `stride` apart
    (1 where nothing but data is parallel), in a world of so many ranks (None: these alone)."""

    size: int
    stride: int = 1
    world_size: int | None = None

    def group(self, name: str, size: int, stride: int) -> Group:
        """Groups of `size` of these ranks, `stride` apart among them, wherever in the world."""
        world_size = self.size * self.stride if self.world_size is None else self.world_size
        return Group.regular(name, world_size, size, stride * self.stride)


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, or the whole model where there is none: `number` counts from 0, the first
    takes the tokens, the last has the loss."""

    builder: PlanBuilder
    workload: Workload
    data_parallel: DataParallel = DataParallel(1)
    number: int = 0
    is_first: bool = True
    is_last: bool = True

    @property
    def training(self) -> Training:
        return self.workload.training

    @property
    def ranks(self) -> int:
        """How many ranks share the stage's data-parallel work."""
        return self.data_parallel.size

    def group(self, name: str = WORLD, size: int | None = None, stride: int = 1) -> Group:
        """A process group of `size` of the data-parallel ranks (all of them, unless told otherwise), `stride`
        apart among these; the plan knows it from here on."""
        group = self.data_parallel.group(name, self.ranks if size is None else size, stride)
        self.builder.groups[name] = group
        return group
