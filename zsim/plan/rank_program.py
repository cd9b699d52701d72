"""The program of a pipeline rank: its stages, whose hooks run its steps, and its memory between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zsim.plan.actions import Step
from zsim.plan.builder import PlanBuilder
from zsim.plan.framework_hooks import FrameworkHooks, hooks_of
from zsim.plan.hooks import Hooks
from zsim.plan.ops import CollectiveKind, Group, Memory, Program
from zsim.plan.pipeline.lowering import ranks_of
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.pipeline.runtime import PipelineRuntime
from zsim.plan.shared.amaxes import amax_group
from zsim.plan.shared.checkpoints import HostCheckpoints
from zsim.plan.shared.host_side import HostSide
from zsim.plan.shared.originals import frozen_copy, originals
from zsim.plan.stage import DataParallel, Stage, expert_groups, mesh_groups
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS
from zsim.specs.strategy.mesh import CONTEXT, DATA, EXPERT_DATA, Mesh
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig


@dataclass(frozen=True)
class StagedModel:
    """A model in virtual stages, and the ranks of the world that hold them."""

    workloads: Sequence[Workload]
    """Those of the stages, in model order."""
    parallelism: ParallelismConfig
    world_size: int
    tied_numel: int = 0
    """Elements of the embedding that the first and last stage share."""

    @property
    def training(self) -> TrainingConfig:
        return self.workloads[0].training

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a pass."""
        return self.training.gradient_accumulation_steps // self.parallelism.passes

    @cached_property
    def mesh(self) -> Mesh:
        return self.parallelism.mesh(self.world_size)

    @cached_property
    def expert_mesh(self) -> Mesh:
        return self.parallelism.expert_mesh(self.world_size)

    @cached_property
    def data(self) -> DataParallel:
        """The ranks that hold the same part of the model."""
        return DataParallel(self.mesh.groups(DATA, CONTEXT))

    @cached_property
    def experts(self) -> DataParallel | None:
        """The ranks that hold the same routed experts, where they are a group of their own."""
        if not self.parallelism.experts.has_expert_groups:
            return None
        return DataParallel(self.expert_mesh.groups(EXPERT_DATA))

    @cached_property
    def trains_experts(self) -> bool:
        """Whether any stage trains some of its routed experts."""
        return any(
            parameter.trainable and bool(parameter.rank_kind)
            for workload in self.workloads
            for _, parameter in workload.model.named_parameters()
        )

    @cached_property
    def pipeline_ranks(self) -> list[int]:
        """The pipeline rank of every stage."""
        return ranks_of(self.parallelism, self.micro_batches)

    def groups(self) -> list[Group]:
        """The process groups that every rank is in."""
        experts = self.parallelism.experts
        nodes = experts.nodes if experts.dispatcher in DEDUPLICATING_DISPATCHERS else 1
        return [
            *mesh_groups(self.mesh, self.parallelism.context_inner),
            *expert_groups(self.expert_mesh, nodes),
            *amax_group(self.mesh, self.training),
        ]

    def stages(self, builder: PlanBuilder, rank: int) -> dict[int, Stage]:
        """The stages of a pipeline rank, whose ops go to `builder`, by number."""
        last = len(self.workloads) - 1
        return {
            number: Stage(
                builder,
                workload,
                self.data,
                number,
                is_first=number == 0,
                is_last=number == last,
                tied_numel=self.tied_numel if number in (0, last) else 0,
                parallelism=self.parallelism,
                experts=self.experts,
                trains_experts=self.trains_experts,
            )
            for number, workload in enumerate(self.workloads)
            if self.pipeline_ranks[number] == rank
        }


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of a pipeline rank, and what else a plan has of it."""

    program: Program
    groups: Mapping[str, Group]
    notes: tuple[str, ...]
    asynchronous: frozenset[CollectiveKind]
    """See `Hooks.asynchronous`."""


def plan_rank(
    model: StagedModel, strategy: StrategyConfig, runtime: PipelineRuntime, rank: int, steps: Sequence[Step]
) -> RankProgram:
    """Run the `steps` of a pipeline rank."""
    framework, is_pipeline = hooks_of(strategy), model.parallelism.pipeline > 1
    builder = PlanBuilder(model.groups())
    stages = model.stages(builder, rank)
    hooks_of_stage = {number: framework.make(stage, strategy) for number, stage in stages.items()}
    for number, stage in stages.items():
        if stage.training.checkpoint_offload is not None:
            host = HostSide(builder)
            hooks_of_stage[number].checkpoints = HostCheckpoints(host, stage.training.checkpoint_offload)
    messenger = runtime.messenger(builder, stages, model.pipeline_ranks, rank) if is_pipeline else None
    run_actions(builder, hooks_of_stage, steps, messenger, runtime)
    all_hooks = list(hooks_of_stage.values())
    copies = _original_copies(model, framework, strategy, stages)
    resident = [
        *(memory for hooks in all_hooks for memory in hooks.resident()),
        *(messenger.resident() if messenger is not None else []),
        *copies,
        *_reference_weights(model, framework, strategy, stages),
        *framework.resident(strategy, [stage.workload.model for stage in stages.values()]),
    ]
    program = builder.program(resident, f"pipeline rank {rank}" if is_pipeline else "")
    program = replace(program, startup_bytes=sum(hooks.startup_bytes for hooks in all_hooks))
    _break_cycles(all_hooks)
    notes = [framework.originals_note] if copies and framework.originals_note else []
    return RankProgram(program, builder.groups, (*notes, *builder.notes), all_hooks[0].asynchronous)


def _original_copies(
    model: StagedModel, framework: FrameworkHooks[StrategyConfig], strategy: StrategyConfig,
    stages: Mapping[int, Stage],
) -> list[Memory]:  # fmt: skip
    """The frozen originals of the stages' trained copies."""
    storage = framework.frozen_storage(strategy, model.training, model.data.size)
    return originals([stage.workload.model for stage in stages.values()], storage)


def _reference_weights(
    model: StagedModel, framework: FrameworkHooks[StrategyConfig], strategy: StrategyConfig,
    stages: Mapping[int, Stage],
) -> list[Memory]:  # fmt: skip
    """The weights of a frozen copy of the stages, where a loss asks for one."""
    if model.training.reference != "copy":
        return []
    storage = framework.frozen_storage(strategy, model.training, model.data.size)
    if model.training.reference_dtype:
        storage = replace(storage, dtype=model.training.reference_dtype)
    return frozen_copy([stage.workload.model for stage in stages.values()], storage)


def _break_cycles(all_hooks: Sequence[Hooks]) -> None:
    """Hooks of a rank name each other, which would keep all their memory until a search for cycles."""
    for hooks in all_hooks:
        hooks.stage_hooks = ()
