"""Make the plan of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zsim import garbage_collection
from zsim.plan.checks import check_plan
from zsim.plan.framework_hooks import hooks_of
from zsim.plan.moments import ORDER, BetweenSteps, JobMoment, first_step
from zsim.plan.node_types import NodeTypes, node_types_of, plan_by_type
from zsim.plan.ops import Group, Plan
from zsim.plan.paging import place_paged_states
from zsim.plan.parallel.context import context_parallel
from zsim.plan.parallel.experts import expand_experts
from zsim.plan.parallel.stages import cut_into_stages, register_head_first, tied_numel
from zsim.plan.parallel.tensor import tensor_parallel
from zsim.plan.passes.single_thread import serialize_operators
from zsim.plan.pipeline.forward_only import ForwardOnly
from zsim.plan.pipeline.lowering import steps_of
from zsim.plan.rank_program import RankProgram, StagedModel, plan_rank
from zsim.plan.stage import WORLD
from zsim.plan.workload.workload import Workload, Workloads
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.training.resolve import check_blocks
from zsim.specs.model.fusion import fuse_projections
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.mesh import PIPELINE
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig
from zsim.specs.strategy.training import TrainingConfig


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """All inputs of a plan. Jobs with equal bases have the same plan, whatever their hardware."""

    world_size: int
    is_cpu: bool
    """The ranks are CPUs, which run every op in the thread that issues it."""
    copies_scatters: bool
    """The CPU backend implements a reduce-scatter as an all-reduce of a copy (False on GPUs)."""
    training: TrainingConfig
    strategy: StrategyConfig
    model: ModelSpec
    parallelism: ParallelismConfig
    types: NodeTypes | None = None
    """The types of the ranks' nodes, where the job is on several."""


def plan_basis(job: Job) -> PlanBasis:
    """The inputs of a job's plan."""
    is_cpu = job.cluster.gpu.vendor == "cpu"
    copies_scatters = is_cpu and job.cluster.collectives.reduce_scatter == "all_reduce"
    inputs = job.world_size, is_cpu, copies_scatters, job.training, job.strategy, job.model, job.parallelism
    return PlanBasis(*inputs, types=node_types_of(job))


def is_offloaded(job: Job) -> bool:
    """Whether parameters, optimizer states or activation checkpoints are offloaded from the GPU."""
    return job.training.checkpoint_offload is not None or hooks_of(job.strategy).is_offloaded(job.strategy)


def make_plan(job: Job) -> Plan:
    """The plan of one steady step of the job. It depends on hardware by the kind of device alone, and with a
    paged optimizer by the room on the GPU."""
    return plan_of(paged_basis(job, plan_of))


def paged_basis(job: Job, plan_of_basis: Callable[[PlanBasis], Plan]) -> PlanBasis:
    """`plan_basis` with paged states where the driver has them. `plan_of_basis` makes the plan of a basis."""
    basis = plan_basis(job)

    def plan_training(training: TrainingConfig) -> Plan:
        return plan_of_basis(replace(basis, training=training))

    return replace(basis, training=place_paged_states(job, plan_training))


@garbage_collection.pause()
def plan_of(basis: PlanBasis, workloads: Workloads | None = None) -> Plan:
    """The plan of all jobs with this basis. `workloads` is the cache of the workloads of other plans. Raises
    what `plan_stages` raises, and InputError for more blocks than zsim plans.
    """
    types, workloads = basis.types, workloads or Workloads()
    if types is not None:
        sizes = types.micro_batch_sizes or (basis.training.micro_batch_size,) * len(types.names)
        plans = {
            size: plan_of(
                replace(basis, types=None, training=replace(basis.training, micro_batch_size=size)), workloads
            )
            for size in {sizes[number] for number, _ in types.runs}
        }
        return plan_by_type(types, [plans.get(size) for size in sizes])
    model = basis.model
    check_blocks(model, basis.training, len(model.blocks) * basis.training.gradient_accumulation_steps)
    if _fuses_whole_layers(basis) and model.trainable_numel == model.numel:
        model = fuse_projections(model)
    models = stages_of(model, basis.parallelism)
    tied = tied_numel(basis.model) // basis.parallelism.tensor
    return plan_stages(
        workloads.of(models, basis.training),
        basis.strategy,
        basis.world_size,
        basis.parallelism,
        tied_numel=tied if len(models) > 1 else 0,
        is_cpu=basis.is_cpu,
        copies_scatters=basis.copies_scatters,
    )


def plan_for_ranks(basis: PlanBasis, source_basis: PlanBasis, plan: Plan) -> Plan | None:
    """The plan of all jobs with this basis, derived from `plan`, which is that of `source_basis`. The two
    bases may differ in the number of ranks alone. The programs are the same, and communicators are of all
    ranks. None where this is not known to be what `plan_of` gives.
    """
    is_independent = hooks_of(basis.strategy).is_independent_of_ranks
    has_peers = min(basis.world_size, source_basis.world_size) > 1
    if not (is_independent and has_peers and basis.parallelism.is_trivial) or basis.types:
        return None
    if replace(basis, world_size=source_basis.world_size) != source_basis or list(plan.groups) != [WORLD]:
        return None
    groups = {WORLD: Group.regular(WORLD, basis.world_size)}
    return Plan.uniform(plan.framework, basis.world_size, plan.program, groups, plan.notes, plan.labels)


def _fuses_whole_layers(basis: PlanBasis) -> bool:
    """Whether the layers of a model without any parallelism have fused projections. With parallelism
    `stages_of` fuses them.
    """
    parallelism = basis.parallelism
    is_fused = parallelism.is_trivial and parallelism.fuses_projections
    return is_fused and hooks_of(basis.strategy).fuses_whole_layers(basis.strategy)


def stages_of(model: ModelSpec, parallelism: ParallelismConfig) -> list[ModelSpec]:
    """The stages of a model, in order, as one rank of each tensor- and context-parallel group has them."""
    if parallelism.is_trivial:
        return [expand_experts(model, parallelism.experts)]
    if parallelism.fuses_projections:
        model = fuse_projections(model)
    model = context_parallel(tensor_parallel(model, parallelism), parallelism)
    model = expand_experts(model, parallelism.experts)
    stages = cut_into_stages(model, parallelism.layers_per_stage)
    if parallelism.style.registers_tied_head_first and model.is_tied and len(stages) > 1:
        stages[-1] = register_head_first(stages[-1])
    return stages


def plan_step(
    workload: Workload,
    strategy: StrategyConfig,
    world_size: int,
    *,
    is_cpu: bool = False,
    copies_scatters: bool = False,
) -> Plan:
    """The plan of one steady step of `workload` on a data-parallel group of `world_size` ranks. `is_cpu` and
    `copies_scatters` are those of `PlanBasis`. Raises what `plan_stages` raises.
    """
    parallelism = ParallelismConfig()
    return plan_stages(
        [workload], strategy, world_size, parallelism, is_cpu=is_cpu, copies_scatters=copies_scatters
    )


def plan_stages(
    workloads: Sequence[Workload],
    strategy: StrategyConfig,
    world_size: int,
    parallelism: ParallelismConfig,
    *,
    tied_numel: int = 0,
    is_cpu: bool = False,
    copies_scatters: bool = False,
) -> Plan:
    """The plan of one steady step of a model whose virtual stages are `workloads`, in model order. It has a
    program for each pipeline rank. `tied_numel` are the elements of the embedding that the first and last
    stage share.

    Raises what the framework's hooks and its schedule raise: InputError and NotSimulatedError.
    """
    model = StagedModel(workloads, parallelism, world_size, tied_numel)
    runtime = hooks_of(strategy).pipeline(strategy, parallelism)
    if model.training.forward_only:
        runtime = ForwardOnly(parallelism)
    ranks = [
        plan_rank(model, strategy, runtime, rank, steps)
        for rank, steps in enumerate(steps_of(runtime, model.micro_batches))
    ]
    plan = Plan(
        strategy.kind,
        tuple(rank.program for rank in ranks),
        model.mesh.coordinate(PIPELINE),
        {name: group for rank in ranks for name, group in rank.groups.items()},
        _collect_notes(ranks),
    )
    if is_cpu:
        plan = serialize_operators(plan, ranks[-1].asynchronous, copies_scatters=copies_scatters)
    check_plan(plan)
    return plan


def _collect_notes(ranks: Sequence[RankProgram]) -> tuple[str, ...]:
    """The notes of all ranks, each once."""
    return tuple(dict.fromkeys(note for rank in ranks for note in rank.notes))


def moments_of(job: Job, plan: Plan) -> tuple[JobMoment, ...]:
    """The moments of a job in the order of a run. A recorded plan has none, and a plan with several ranks to
    a replica only those of the first step.
    """
    if plan.programs[0].is_recorded:
        return ()
    between_steps = BetweenSteps(job, plan)
    moments = [*first_step(between_steps)]
    if job.parallelism.is_trivial:
        moments += hooks_of(job.strategy).moments(between_steps)
    return tuple(sorted(moments, key=lambda moment: ORDER.index(moment.name)))
