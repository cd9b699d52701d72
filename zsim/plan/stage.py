"""The stage that a framework's hooks serve: its part of the model, the plan builder, its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from zsim.arrays import Ints
from zsim.cost.kernels.shapes import WorkOptions
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Group
from zsim.plan.workload.work_part import HEADS, RING
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.parallelism import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    EXPERT_TENSOR,
    PIPELINE,
    TENSOR,
    Mesh,
    ParallelismConfig,
)
from zsim.specs.strategy.training import TrainingConfig

WORLD, MODEL, EMBEDDING = "world", "model", "embedding"
EXPERT_MODEL, EXPERT_STAGES = "expert_model", "expert_stages"
EXPERT_NODE, EXPERT_RAIL = "expert_node", "expert_rail"


@dataclass(frozen=True, eq=False)
class DataParallel:
    """The ranks that hold the same part of the model, replicated or sharded: `members[number]` are those of
    one part."""

    members: Ints

    @classmethod
    def regular(cls, size: int, stride: int = 1, world_size: int | None = None) -> Self:
        """`size` ranks, `stride` apart, of `world_size` (None: the world is these ranks)."""
        world_size = size * stride if world_size is None else world_size
        return cls(Group.regular(WORLD, world_size, size, stride).members)

    @property
    def size(self) -> int:
        return int(self.members.shape[1])

    @property
    def is_world(self) -> bool:
        """Whether all ranks hold the same part."""
        return len(self.members) == 1

    def group(self, name: str, size: int, stride: int) -> Group:
        """The process groups of `size` data-parallel ranks, `stride` apart among them, over the world."""
        count = self.size // (size * stride)
        assert count * size * stride == self.size, f"{name}: {self.size} ranks in {size} x {stride}"
        rows = self.members.reshape(len(self.members), count, size, stride)
        members = rows.transpose(0, 1, 3, 2).reshape(-1, size)
        return Group(name, members[np.argsort(members[:, 0])])


def mesh_groups(mesh: Mesh, context_inner: int = 1) -> list[Group]:
    """The process groups of tensor, context and pipeline parallelism that have several ranks. With several
    pipeline stages or tensor-parallel ranks there are also the ranks of one model, all ranks, and the first
    and last pipeline rank ("embedding"). With `context_inner` > 1 a context group is split into runs of so
    many ranks, and into the ranks at one index of each run.
    """
    groups = [Group(axis, mesh.groups(axis)) for axis in (TENSOR, CONTEXT) if mesh.size(axis) > 1]
    if context_inner > 1:
        rows = mesh.groups(CONTEXT).reshape(-1, mesh.size(CONTEXT) // context_inner, context_inner)
        rings = rows.transpose(0, 2, 1).reshape(-1, rows.shape[1])
        groups += [Group(HEADS, rows.reshape(-1, context_inner)), Group(RING, rings)]
    if mesh.size(TENSOR, PIPELINE) > 1:
        everyone = np.arange(mesh.world_size, dtype=np.int64)[None]
        groups += [Group(MODEL, mesh.groups(TENSOR, PIPELINE)), Group(WORLD, everyone)]
    pipelines = mesh.groups(PIPELINE)
    ranks = pipelines.shape[1]
    if ranks == 1:
        return groups
    return [*groups, Group(PIPELINE, pipelines), Group(EMBEDDING, pipelines[:, [0, ranks - 1]])]


def expert_groups(mesh: Mesh, nodes: int = 1) -> list[Group]:
    """The process groups of routed experts that have several ranks, on their own mesh: experts' ranks, those
    that share an expert's products, both combined ("expert_model"), and those of all stages
    ("expert_stages"), over which Megatron sums the norm of experts that are not sharded. With experts' ranks
    on `nodes` > 1 there are also the ranks at one index of each node ("expert_rail") and those of one node
    ("expert_node").
    """
    if mesh.size(EXPERT, EXPERT_TENSOR) == 1:
        return []
    groups = [Group(axis, mesh.groups(axis)) for axis in (EXPERT, EXPERT_TENSOR) if mesh.size(axis) > 1]
    if len(groups) > 1:
        groups.append(Group(EXPERT_MODEL, mesh.groups(EXPERT, EXPERT_TENSOR)))
    if nodes > 1:
        rows = mesh.groups(EXPERT, EXPERT_TENSOR)
        ranks = rows.reshape(len(rows), nodes, -1)
        groups.append(Group(EXPERT_NODE, ranks.reshape(len(rows) * nodes, -1)))
        groups.append(Group(EXPERT_RAIL, ranks.transpose(0, 2, 1).reshape(-1, nodes)))
    return [*groups, Group(EXPERT_STAGES, mesh.groups(EXPERT, EXPERT_TENSOR, PIPELINE))]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, or the whole model without a pipeline. The first stage takes the tokens, and the
    last computes the loss.
    """

    builder: PlanBuilder
    workload: Workload
    data_parallel: DataParallel = field(default_factory=lambda: DataParallel.regular(1))
    number: int = 0
    """Counts from 0."""
    is_first: bool = True
    is_last: bool = True
    tied_numel: int = 0
    """Elements of the embedding that the first and the last stage share, on these two stages. 0 on all
    others.
    """
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    experts: DataParallel | None = None
    """The ranks that hold the same routed experts, where they are not those of `data_parallel`."""
    trains_experts: bool = False
    """Whether any stage of the model trains some of its routed experts."""

    @property
    def training(self) -> TrainingConfig:
        return self.workload.training

    def frozen_stage(self) -> Self:
        """The stage of a frozen copy of the model, which runs forward alone."""
        workload = replace(self.workload, training=replace(self.training, forward_only=True))
        return replace(self, workload=workload)

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks of the stage."""
        return self.data_parallel.size

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation or a gradient between stages."""
        return self.workload.message_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of a message, which has the outputs of all forwards of a micro-batch in one tensor."""
        return self.message_bytes * (1 + self.training.num_reference_forwards)

    @property
    def message_dtype(self) -> str:
        return WorkOptions.of(self.training).kernel_dtype

    def group(self, name: str = "", size: int | None = None, stride: int = 1) -> Group:
        """Add a process group of `size` data-parallel ranks (default: all), `stride` apart among them, to the
        plan, and return it. Unless `name` is given it is called "world", or "data" among other parallelisms.
        """
        name = name or (WORLD if self.data_parallel.is_world else DATA)
        group = self.data_parallel.group(name, self.ranks if size is None else size, stride)
        self.builder.groups[name] = group
        return group

    def expert_group(self, name: str = EXPERT_DATA, size: int | None = None, stride: int = 1) -> Group:
        """Add a process group of `size` ranks that hold the same routed experts (default: all)."""
        assert self.experts is not None
        group = self.experts.group(name, self.experts.size if size is None else size, stride)
        self.builder.groups[name] = group
        return group

    def norm_groups(self, *data: str) -> list[str]:
        """The groups over which a sum over all gradients runs: `data`, those that hold parts of a parameter,
        then the ranks of one model."""
        return [*data, *([MODEL] if MODEL in self.builder.groups else [])]
