"""Make the plan of a job, its model cut into stages and over the ranks that share a sequence.

# [Note: paged states]
bitsandbytes' paged optimizers (0.50.2 functional.py `get_paged`, csrc/pythonInterface.cpp) keep every state
of 100,000 elements or more in CUDA's unified memory. A step prefetches the states of one tensor to the GPU,
updates it, and waits, tensor by tensor (optim/optimizer.py `step`). Where cudaMalloc or a prefetch finds no
free memory, the driver moves unified memory to the host, in pieces of 2 MiB, those first that came to the GPU
or were prefetched longest ago (NVIDIA/open-gpu-kernel-modules, kernel-open/nvidia-uvm/uvm_pmm_gpu.c, head
comment and `pick_root_chunk_to_evict`). So torch gets what it asks for, and keeps it, and the states have
what the step's peak leaves. If that is enough, nothing moves. If not, a step visits them in the same order as
the one before, and the states that were used longest ago are needed next: all of them come over PCIe and go
back in every step, however little is missing.

# [Note: context parallelism]
Context parallelism: the model that one of c ranks computes, each on a part of every sequence.

All modules see 1/c of the tokens. Only attention needs those of other ranks, and its `context` says how their
K and V reach it, and recurrences, around which ranks exchange heads for tokens. Every rank has all
parameters, and data parallelism sums up their gradients over the ranks too.

# [Note: whose attention]
megatron: Transformer Engine's. torch: `torch.distributed.tensor.experimental.context_parallel`, whose rotate
method "alltoall" is "p2p" here. Where a layer has a window all are FlexAttention's, as torchtitan gives every
layer the one kind (v0.2.2 distributed/context_parallel.py `apply_cp_to_attention_module`). deepspeed and
autotp: `UlyssesSPAttentionHF`. Its data loader gives every rank of a group its own sequences, which the group
computes one after the other. So each is a micro-batch of the group, and `gradient_accumulation_steps` counts
them (DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py `UlyssesSPDataLoaderAdapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from zsim import garbage_collection
from zsim.operations.operation import Role, operations_of
from zsim.operations.sharding import FeatureCut
from zsim.plan.actions import Step
from zsim.plan.builder import PlanBuilder
from zsim.plan.checks import check_plan
from zsim.plan.framework_hooks import FrameworkHooks, frozen_copy, hooks_of, originals
from zsim.plan.hooks import Hooks
from zsim.plan.memory.capacity import excess_bytes
from zsim.plan.moments import ORDER, BetweenSteps, JobMoment, first_step
from zsim.plan.node_types import NodeTypes, node_types_of, plan_by_type
from zsim.plan.ops import CollectiveKind, Group, Memory, Plan, Program
from zsim.plan.parallel.experts import expand_experts
from zsim.plan.parallel.tensor import tensor_parallel
from zsim.plan.passes.single_thread import serialize_operators
from zsim.plan.pipeline.lowering import ForwardOnly, ranks_of, steps_of
from zsim.plan.pipeline.run_actions import PipelineRuntime, run_actions
from zsim.plan.shared.amaxes import amax_group
from zsim.plan.shared.checkpoints import HostCheckpoints
from zsim.plan.shared.host_side import HostSide
from zsim.plan.stage import WORLD, DataParallel, Stage, expert_groups, mesh_groups
from zsim.plan.workload.workload import Workload, Workloads
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.training.resolve import check_blocks
from zsim.specs.model.fusion import fuse_projections
from zsim.specs.model.spec import Block, ContextSharding, Embedding, Exchange, ModelSpec, Module, Parameter
from zsim.specs.strategy.experts import DEDUPLICATING_DISPATCHERS
from zsim.specs.strategy.optimizers import optimizer_of
from zsim.specs.strategy.parallelism import CONTEXT, DATA, EXPERT_DATA, PIPELINE, Mesh, ParallelismConfig
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
    """`plan_basis` with paged states where the driver has them. `plan_of_basis` makes the plan of a basis.

    Frameworks that keep states in their own partitions have them on the GPU. See [Note: paged states].
    """
    basis, training = plan_basis(job), job.training
    if training.paged_states is not None or not optimizer_of(training.optimizer).is_paged:
        return basis
    gpu_basis = replace(basis, training=replace(training, paged_states="gpu"))
    has_own_states = hooks_of(job.strategy).pages_optimizer_states
    if not has_own_states or excess_bytes(job, plan_of_basis(gpu_basis)) <= 0:
        return gpu_basis
    return replace(basis, training=replace(training, paged_states="host"))


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
        return cut_into_stages(expand_experts(model, parallelism.experts), ())
    if parallelism.fuses_projections:
        model = fuse_projections(model)
    model = context_parallel(tensor_parallel(model, parallelism), parallelism)
    model = expand_experts(model, parallelism.experts)
    stages = cut_into_stages(model, parallelism.layers_per_stage)
    if parallelism.style.registers_tied_head_first and model.is_tied and len(stages) > 1:
        stages[-1] = register_head_first(stages[-1])
    return stages


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
        tuple(dict.fromkeys(note for rank in ranks for note in rank.notes)),
    )
    if is_cpu:
        plan = serialize_operators(plan, ranks[-1].asynchronous, copies_scatters=copies_scatters)
    check_plan(plan)
    return plan


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
    gathered: list[Memory] = []
    if model.training.reference is not None and framework.gathers_in_forward(strategy):
        for number, stage in stages.items():
            hooks = hooks_of_stage[number]
            is_copy = model.training.reference == "copy"
            hooks.reference = framework.make(stage.frozen_stage(), strategy) if is_copy else hooks
            gathered += hooks.reference.keep_gathered() if is_copy else []
    messenger = runtime.messenger(builder, stages, model.pipeline_ranks, rank) if is_pipeline else None
    run_actions(builder, hooks_of_stage, steps, messenger, runtime)
    all_hooks = list(hooks_of_stage.values())
    copies = _original_copies(model, framework, strategy, stages)
    resident = [
        *(memory for hooks in all_hooks for memory in hooks.resident()),
        *(messenger.resident() if messenger is not None else []),
        *copies,
        *_reference_weights(model, framework, strategy, stages),
        *gathered,
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
        hooks.stage_hooks, hooks.reference = (), None


def context_parallel(model: ModelSpec, parallelism: ParallelismConfig) -> ModelSpec:
    """The model of one of `parallelism.context` ranks. With one rank it is the model itself."""
    ranks = parallelism.context
    if ranks == 1:
        return model
    share = ContextSharding(
        ranks,
        parallelism.context_method,
        parallelism.style.context_library,
        parallelism.context_inner,
        parallelism.context_masks,
    )
    return replace(
        model.map_blocks(lambda block: replace(block, modules=_split_modules(block.modules, share))),
        before=_split_modules(model.before, share),
        after=_split_modules(model.after, share),
        token_shards=model.token_shards * ranks,
    )


def _split_modules(modules: tuple[Module, ...], share: ContextSharding) -> tuple[Module, ...]:
    split: list[Module] = []
    for is_inner, group in groupby(modules, lambda module: module.op_spec.is_inner):
        run = tuple(group)
        split += _exchange_heads(run, share) if is_inner else [_split_module(part, share) for part in run]
    return tuple(split)


def _split_module(module: Module, share: ContextSharding) -> Module:
    work = module.op_spec.cut_sequences(share)
    return replace(module, op_spec=work, token_shards=module.token_shards * share.ranks)


def _exchange_heads(run: tuple[Module, ...], share: ContextSharding) -> Iterator[Module]:
    """The modules of a recurrence, on a part of its heads and complete sequences, between exchanges of heads
    for tokens (Megatron-LM d98e8a64 core/ssm/mamba_context_parallel.py and gated_delta_net/common.py).
    """
    core = next(module for module in run if module.role is Role.MIXER)
    shards = core.token_shards * share.ranks
    cut = FeatureCut(share.ranks, lambda features: max(1, features // share.ranks))
    for number, width in enumerate(core.op_spec.exchanged_inputs):
        yield _all_to_all(f"{core.name} in {number}", width, share.ranks, shards)
    for module in run:
        yield replace(module, op_spec=module.op_spec.cut_features(cut))
    for number, width in enumerate(core.op_spec.exchanged_outputs):
        yield _all_to_all(f"{core.name} out {number}", width, share.ranks, shards)


def _all_to_all(name: str, width: int, ranks: int, shards: int) -> Module:
    work = Exchange("all_to_all", "all_to_all", width, ranks, CONTEXT)
    return Module(f"{name} all_to_all", work, token_shards=shards)


def cut_into_stages(model: ModelSpec, layers_per_stage: Sequence[int]) -> list[ModelSpec]:
    """The stages in model order: the first has the modules before the blocks and a tower, the last those
    after them. A tied head gets its own copy of the embedding's weight, whose gradients the two stages sum
    up, as does the embedding of multi-token prediction. Fewer than two numbers of layers, or none, are one
    stage with all blocks."""
    if len(layers_per_stage) < 2:
        return [replace(model, after=_name_lenders(model.after))] if model.num_prediction_layers else [model]
    stages, first, last = [], 0, len(layers_per_stage) - 1
    for number, layers in enumerate(layers_per_stage):
        stages.append(
            replace(
                model,
                name=f"{model.name}, stage {number}",
                before=model.before if number == 0 else (),
                towers=model.towers if number == 0 else (),
                blocks=_require_input_gradients(model.blocks[first : first + layers])
                if number
                else model.blocks[:layers],
                after=_modules_after_blocks(model) if number == last else (),
                is_tied=False,
                first_block=model.first_block + first,
                registered_before_blocks=model.registered_before_blocks if number in (0, last) else None,
            )
        )
        first += layers
    return stages


def _require_input_gradients(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks after a message. What is received needs a gradient, whatever is trained before it."""
    changed = {
        id(block): replace(
            block, modules=tuple(replace(module, input_gradient=True) for module in block.modules)
        )
        for block in blocks
        if not all(module.input_gradient for module in block.modules)
    }
    return tuple(changed.get(id(block), block) for block in blocks)


def register_head_first(stage: ModelSpec) -> ModelSpec:
    """The last stage with its head registered before the blocks, where DeepSpeed's PipelineModule has its
    tied layers (`tied_modules`, DeepSpeed 0.19.8 `runtime/pipe/module.py`)."""
    heads = tuple(module.name for module in stage.after if module.role is Role.PRODUCT and module.parameters)
    return replace(stage, registered_before_blocks=heads)


def tied_numel(model: ModelSpec) -> int:
    """Elements of the weight that the embedding shares with a tied head, or with that of multi-token
    prediction, on this rank. 0 if it shares none.
    """
    is_shared = model.is_tied or model.num_prediction_layers > 0
    return next((module.numel for module in model.before if is_shared and module.role is Role.EMBEDDING), 0)


def _modules_after_blocks(model: ModelSpec) -> tuple[Module, ...]:
    """The last stage's modules after the blocks. Of several that share a weight, one has a copy of it."""
    modules = list(model.after)
    readers = Role.PRODUCT if model.is_tied else Role.EMBEDDING
    numbers = [number for number, module in enumerate(modules) if module.role is readers]
    if model.is_tied:
        modules[numbers[-1]] = _add_head_weight(modules[numbers[-1]])
    elif numbers:
        (table,) = operations_of([modules[numbers[0]]], Embedding)
        modules[numbers[0]] = replace(
            modules[numbers[0]], parameters=(Parameter("weight", (table.rows, table.width)),)
        )
    return _name_lenders(modules, is_tied=model.is_tied)


def _name_lenders(modules: Sequence[Module], *, is_tied: bool = False) -> tuple[Module, ...]:
    """Modules after the blocks, of which heads and embeddings of multi-token prediction name the module among
    them whose weight they use. A tied stage's head has the weight of both.
    """
    names = {module.role: module.name for module in modules if module.has_weight}
    head = names.get(Role.PRODUCT, "")
    lenders = {Role.PRODUCT: head, Role.EMBEDDING: head if is_tied else names.get(Role.EMBEDDING, "")}
    return tuple(
        replace(module, lender=lenders[module.role])
        if module.role in lenders and not module.has_weight
        else module
        for module in modules
    )


def _add_head_weight(module: Module) -> Module:
    if not module.op_spec.may_borrow_weight or module.has_weight:
        return module
    inputs, outputs = module.op_spec.product_features
    weight = Parameter("weight", (outputs, inputs))
    return replace(module, parameters=(weight, *module.parameters))
