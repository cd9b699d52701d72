"""The stage that a framework's hooks serve: its part of the model, the plan builder, its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Group
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.training import Training

WORLD = "world"


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The ranks that hold the same part of the model, replicated or sharded: `size` ranks, `stride` apart
    (1 where data parallelism is the only kind), of `world_size` ranks (None: the world is these ranks)."""

    size: int
    stride: int = 1
    world_size: int | None = None

    def group(self, name: str, size: int, stride: int) -> Group:
        """The process groups of `size` data-parallel ranks, `stride` apart among them, over the world."""
        world_size = self.size * self.stride if self.world_size is None else self.world_size
        return Group.regular(name, world_size, size, stride * self.stride)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, or the whole model without a pipeline: `number` counts from 0; the first stage
    takes the tokens, the last computes the loss."""

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
        """Number of data-parallel ranks of the stage."""
        return self.data_parallel.size

    def group(self, name: str = WORLD, size: int | None = None, stride: int = 1) -> Group:
        """Add a process group of `size` data-parallel ranks (default: all), `stride` apart among them, to the
        plan, and return it."""
        group = self.data_parallel.group(name, self.ranks if size is None else size, stride)
        self.builder.groups[name] = group
        return group
