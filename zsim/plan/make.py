"""Make the plan of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim import garbage_collection
from zsim.frameworks.deepspeed.pipeline import DeepSpeedMessenger
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.megatron.buffer import placeholders
from zsim.frameworks.megatron.pipeline import MegatronPipeline
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.torch.pipeline_messages import TorchMessenger
from zsim.plan.builder import PlanBuilder
from zsim.plan.checks import check_plan
from zsim.plan.framework_hooks import hooks_of
from zsim.plan.memory.paging import place_paged_states
from zsim.plan.moments import ORDER, BetweenSteps, JobMoment, first_step
from zsim.plan.node_types import NodeTypes, node_types_of, plan_by_type
from zsim.plan.ops import CollectiveKind, Group, Memory, Plan, Program
from zsim.plan.parallel.context import context_parallel
from zsim.plan.parallel.experts import expand_experts
from zsim.plan.parallel.stages import cut_into_stages, register_head_first, tied_numel
from zsim.plan.parallel.tensor import tensor_parallel
from zsim.plan.passes.single_thread import serialize_operators
from zsim.plan.pipeline.lowering import ranks_of, steps_of
from zsim.plan.pipeline.messages import Messenger, PartitioningMessenger
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.pipeline.schedules import Step, forward_only_steps
from zsim.plan.shared.amaxes import amax_group
from zsim.plan.shared.originals import NOTE as ORIGINALS_NOTE
from zsim.plan.shared.originals import originals
from zsim.plan.stage import WORLD, DataParallel, Stage, expert_groups, mesh_groups
from zsim.plan.workload.workload import Workload, Workloads
from zsim.specs.experiment.job import Job
from zsim.specs.model.fusion import fuse_projections
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS
from zsim.specs.strategy.mesh import CONTEXT, DATA, EXPERT_DATA, PIPELINE
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
    return hooks_of(job.strategy).is_offloaded(job.strategy)


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
    what `plan_stages` raises.
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
    if _has_plain_megatron_layers(basis) and model.trainable_numel == model.numel:
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


def _has_plain_megatron_layers(basis: PlanBasis) -> bool:
    """Whether the model has Megatron's or nanotron's layers without any parallelism. With parallelism their
    projections are fused elsewhere. InternEvo's layers are left as they are.
    """
    strategy, parallelism = basis.strategy, basis.parallelism
    is_megatron_family = isinstance(strategy, MegatronConfig) and not strategy.has_whole_tensor_owners
    return is_megatron_family and parallelism.is_trivial and parallelism.style in ("megatron", "nanotron")


def stages_of(model: ModelSpec, parallelism: ParallelismConfig) -> list[ModelSpec]:
    """The stages of a model, in order, as one rank of each tensor- and context-parallel group has them."""
    if parallelism.is_trivial:
        return [expand_experts(model, parallelism.experts)]
    if parallelism.has_megatron_layers:
        model = fuse_projections(model)
    model = context_parallel(tensor_parallel(model, parallelism), parallelism)
    model = expand_experts(model, parallelism.experts)
    stages = cut_into_stages(model, parallelism.layers_per_stage)
    if parallelism.style == "deepspeed" and model.is_tied and len(stages) > 1:
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
    framework, mesh = hooks_of(strategy), parallelism.mesh(world_size)
    data = DataParallel(mesh.groups(DATA, CONTEXT))
    expert_mesh = parallelism.expert_mesh(world_size)
    nodes = parallelism.experts.nodes if parallelism.experts.dispatcher in DEDUPLICATING_DISPATCHERS else 1
    experts = DataParallel(expert_mesh.groups(EXPERT_DATA)) if parallelism.experts.has_expert_groups else None
    trains_experts = any(
        parameter.trainable and bool(parameter.rank_kind)
        for workload in workloads
        for _, parameter in workload.model.named_parameters()
    )
    ranks = ranks_of(
        parallelism.schedule,
        parallelism.pipeline,
        parallelism.virtual_stages,
        workloads[0].training.gradient_accumulation_steps // parallelism.passes,
        parallelism.schedule_text,
    )
    last_stage = len(workloads) - 1
    programs: list[Program] = []
    groups: dict[str, Group] = {}
    notes: list[str] = []
    asynchronous: frozenset[CollectiveKind] = frozenset()
    for rank, steps in enumerate(_steps(workloads[0].training, strategy, parallelism, ranks)):
        amax_groups = amax_group(mesh, workloads[0].training)
        builder = PlanBuilder(
            [*mesh_groups(mesh, parallelism.context_inner), *expert_groups(expert_mesh, nodes), *amax_groups]
        )
        stages = {
            number: Stage(
                builder,
                workloads[number],
                data,
                number,
                is_first=number == 0,
                is_last=number == last_stage,
                tied_numel=tied_numel if number in (0, last_stage) else 0,
                parallelism=parallelism,
                experts=experts,
                trains_experts=trains_experts,
            )
            for number in range(len(workloads))
            if ranks[number] == rank
        }
        hooks_of_stage = {number: framework.make(stage, strategy) for number, stage in stages.items()}
        messenger = None
        if parallelism.pipeline > 1:
            messenger = _messenger(builder, stages, ranks, rank, parallelism, strategy)
        megatron = strategy if isinstance(strategy, MegatronConfig) else None
        run_actions(
            builder,
            hooks_of_stage,
            steps,
            messenger,
            delays_weights=megatron is not None and megatron.delay_wgrad_compute,
            synchronizes=megatron is not None and megatron.synchronizes_timers,
        )
        resident = [memory for hooks in hooks_of_stage.values() for memory in hooks.resident()]
        resident += messenger.resident() if messenger is not None else []
        models = [stage.workload.model for stage in stages.values()]
        original_copies = originals(models, strategy, workloads[0].training, data.size)
        resident += original_copies
        if original_copies and isinstance(strategy, Fsdp1Config | Fsdp2Config):
            notes.append(ORIGINALS_NOTE)
        if isinstance(strategy, MegatronConfig):
            resident += [Memory("buffers", size) for size in strategy.workspaces]
            if strategy.keeps_placeholders:
                resident += placeholders(models, strategy.param_dtype)
        name = f"pipeline rank {rank}" if parallelism.pipeline > 1 else ""
        startup = sum(hooks.startup_bytes for hooks in hooks_of_stage.values())
        programs.append(replace(builder.program(resident, name), startup_bytes=startup))
        groups |= builder.groups
        notes += [note for note in builder.notes if note not in notes]
        asynchronous = next(iter(hooks_of_stage.values())).asynchronous
        for hooks in hooks_of_stage.values():
            hooks.stage_hooks = ()  # a cycle, which would keep all their memory until a search for cycles
    plan = Plan(strategy.kind, tuple(programs), mesh.coordinate(PIPELINE), groups, tuple(notes))
    if is_cpu:
        plan = serialize_operators(plan, asynchronous, copies_scatters=copies_scatters)
    check_plan(plan)
    return plan


def _messenger(
    builder: PlanBuilder,
    stages: Mapping[int, Stage],
    ranks: Sequence[int],
    rank: int,
    parallelism: ParallelismConfig,
    strategy: StrategyConfig,
) -> Messenger:
    if stages[next(iter(stages))].workload.training.forward_only:
        return Messenger(builder, stages, ranks, rank, empties_outputs=True)
    if isinstance(strategy, DeepSpeedConfig):
        return DeepSpeedMessenger(builder, stages, ranks, rank, strategy.pipeline)
    if parallelism.style == "torch":
        return TorchMessenger(builder, stages, ranks, rank)
    is_unique_per_rank = parallelism.tensor == 1 or parallelism.sequence_parallel
    if isinstance(strategy, MegatronConfig) and strategy.scatters_messages and not is_unique_per_rank:
        return PartitioningMessenger(builder, stages, ranks, rank, empties_outputs=True)
    empties_outputs = parallelism.style in ("megatron", "nanotron")
    return Messenger(builder, stages, ranks, rank, empties_outputs=empties_outputs)


def _steps(
    training: TrainingConfig, strategy: StrategyConfig, parallelism: ParallelismConfig, ranks: Sequence[int]
) -> list[list[Step]]:
    """The steps of every pipeline rank."""
    if training.forward_only:
        micro_batches = training.gradient_accumulation_steps
        return [forward_only_steps(ranks, rank, micro_batches) for rank in range(parallelism.pipeline)]
    micro_batches = training.gradient_accumulation_steps // parallelism.passes
    style = "deepspeed" if parallelism.style == "autotp" else parallelism.style
    megatron = None
    if isinstance(strategy, MegatronConfig):
        megatron = MegatronPipeline(
            group_size=strategy.micro_batch_group,
            overlaps_p2p=strategy.overlap_p2p,
            flushes_ahead=strategy.overlap_p2p_warmup_flush,
            waits_sends=strategy.waits_sends,
            aligns_grad_reduce=strategy.overlap_grad_reduce and strategy.align_grad_reduce,
            aligns_param_gather=strategy.overlap_param_gather and strategy.align_param_gather,
            pairs=strategy.overlap_expert_parallel,
        )
    return steps_of(
        style,
        parallelism.schedule,
        parallelism.pipeline,
        parallelism.virtual_stages,
        micro_batches,
        is_fsdp=isinstance(strategy, Fsdp2Config),
        csv=parallelism.schedule_text,
        passes=parallelism.passes,
        megatron=megatron,
    )


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
