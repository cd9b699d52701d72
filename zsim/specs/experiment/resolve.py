"""From an experiment to a job: names looked up, defaults filled in, all tables checked against each other.

Co-located jobs on the same fabric: `[jobs.NAME]` of an experiment.

[jobs.other]                       # keys that are left out are as in this experiment
nodes = 16                         # the next 16 nodes, unless its placement says which
model = "llama-3-8b"
strategy = { stage = 3 }
[jobs.other.training]
micro_batch_size = 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.data.images import apply_images
from zsim.specs.experiment.faults import FaultsTable, idle_faults_note
from zsim.specs.experiment.framework_resolver import StrategyRequest, resolver_of
from zsim.specs.experiment.jitter import resolve_jitter
from zsim.specs.experiment.job import Job, job_topology, slowdowns_of
from zsim.specs.experiment.layout import Layout, resolve_layout
from zsim.specs.experiment.model_split import check_split, check_tokens, flex_note, resolve_context_masks
from zsim.specs.experiment.placement import Placement, resolve_placement
from zsim.specs.experiment.tables import Experiment, apply_trainer
from zsim.specs.experiment.training.adapted_experts import check_adapted_experts
from zsim.specs.experiment.training.attention import has_grouped_heads
from zsim.specs.experiment.training.batch import (
    apply_lengths,
    batch_plan,
    micro_batch_sizes_of,
    micro_batches_of,
    resolve_mlp_tiles,
    sequences_of,
    uneven_micro_batches,
    uneven_sequences,
)
from zsim.specs.experiment.training.checkpointing import resolve_recomputation
from zsim.specs.experiment.training.fp8 import check_fp8_shapes, infer_fp8_precision, resolve_fp8
from zsim.specs.experiment.training.framework_training import (
    check_stored_types,
    choose_optimizer,
    training_of,
)
from zsim.specs.experiment.training.quantisation import is_prepared
from zsim.specs.experiment.training.resolve import (
    captured_notes,
    check_captured,
    check_size,
    layer_kernels_of,
    resolve_training,
)
from zsim.specs.experiment.training.software import apply_software, runs_experts_one_by_one
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.experiment.training.trained_model import (
    apply_training,
    check_reference,
    reference_notes,
    table_under_autocast,
)
from zsim.specs.library import Library
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.expert_loop import unstack_experts
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_degrees import (
    assumed_dispatcher_note,
    assumed_loads_note,
    choices_in_turn_note,
    expert_members,
    resolve_expert_degrees,
)
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.requirement import alternatives
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import TrainingConfig
from zsim.specs.user_code import check_names


def trainer_of(experiment: Experiment) -> Experiment:
    """The experiment without `[rl]`, on the GPUs that its rollout leaves."""
    if experiment.rl is None:
        return experiment
    rollout = experiment.rl.rollout.gpus or 0
    shape = {"gpus": experiment.gpus - rollout, "nodes": None} if experiment.gpus and rollout else {}
    return experiment.model_copy(update={"rl": None, **shape})


def resolve(experiment: Experiment, library: Library | None = None) -> Job:
    """Look up model and cluster in `library`, fill in defaults, check all tables against each other.

    Raises InputError for contradictions, NotSimulatedError for what zsim cannot simulate yet.
    """
    if experiment.rl is not None:
        if experiment.program is None:
            raise NotSimulatedError(
                "rl: rollouts are simulated by `zsim run`, sweep, scaling, sensitivity, tune and "
                "zsim.simulate_rl alone; leave out [rl] for the training step"
            )
        experiment = trainer_of(experiment)
    library = library or Library()
    try:
        cluster = library.cluster(experiment.cluster)
    except InputError:
        check_names(experiment.model, experiment.cluster)
        raise
    if not experiment.jobs:
        placement = resolve_placement(experiment.placement, cluster, experiment.nodes, experiment.gpus)
        job = _resolve_job(experiment, library, cluster, placement)
    else:
        if cluster.nodes:
            raise NotSimulatedError(
                f"jobs: co-located jobs on cluster '{cluster.name}', whose nodes are of several types, are "
                "not simulated yet; leave out one of them"
            )
        colocated_experiments = expand_colocated_jobs(experiment)
        placement, placements = place_jobs(experiment, colocated_experiments, cluster)
        colocated_jobs = {
            name: _resolve_job(colocated_experiment, library, cluster, placements[name])
            for name, colocated_experiment in colocated_experiments.items()
        }
        job = replace(_resolve_job(experiment, library, cluster, placement), colocated_jobs=colocated_jobs)
    if experiment.faults != FaultsTable.model_construct():
        slowdowns_of(job, job_topology(job))
        placements = {"this job": placement} | {
            f"'{name}'": colocated_job.placement for name, colocated_job in job.colocated_jobs.items()
        }
        note = idle_faults_note(experiment.faults, placements)
        job = replace(job, notes=(*job.notes, note)) if note else job
    return job


def _resolve_job(experiment: Experiment, library: Library, cluster: Cluster, placement: Placement) -> Job:
    model = library.model(experiment.model)
    experiment, software_notes = apply_software(experiment, cluster, model)
    table = experiment.strategy
    layout = resolve_layout(experiment, model, cluster, placement)
    notes = [*experiment.notes, *captured_notes(model), *software_notes, *layout.notes]
    parallelism = layout.parallelism
    micro_batch_sizes = micro_batch_sizes_of(
        experiment.training.micro_batch_sizes,
        experiment.training.micro_batch_size or 1,
        table.kind,
        parallelism,
        layout.full_cluster,
        placement,
    )
    requested, type_notes = table_under_autocast(
        _apply_batch(experiment, layout, micro_batch_sizes), table.kind
    )
    notes += type_notes
    framework = resolver_of(table.kind)
    settings = framework.resolve_file(
        table, requested, layout.model, layout.cluster, placement, layout.parallelism
    )
    config, parallelism = settings.config, settings.parallelism
    notes += settings.notes
    layout = replace(layout, parallelism=parallelism)
    requested = training_of(table.kind).fill_training(requested, table, config, parallelism, layout.cluster)
    trained = _resolve_trained_model(experiment, requested, layout, config)
    training, model, expert_split = trained.training, trained.model, trained.expert_split
    notes += trained.notes
    check_tokens(training, parallelism)
    parallelism = _apply_expert_degrees(experiment, layout, expert_split, model, training, config)
    parallelism = resolve_context_masks(parallelism, model, training.sequence_length)
    notes += _check_tables(experiment, layout.cluster, model, training, parallelism, config)
    has_adapters = experiment.training.lora is not None
    request = StrategyRequest(
        table, config, training, parallelism, layout.full_cluster, placement, has_adapters
    )
    resolution = framework.resolve(request)
    notes += resolution.notes
    sequences = None
    if not micro_batch_sizes:
        sequences = sequences_of(experiment.training.global_batch_size, training, layout.replicas)
    return Job(
        experiment,
        apply_trainer(model, experiment.trainer),
        resolution.cluster,
        placement,
        training,
        resolution.config,
        tuple(notes),
        parallelism=parallelism,
        sequences=sequences,
        micro_batch_sizes=micro_batch_sizes,
        simulation=experiment.simulation,
        faults=experiment.faults,
        jitter=resolve_jitter(experiment.jitter),
        cost=experiment.cost and experiment.cost.scale_samples(experiment.training.sequences_per_sample),
    )


@dataclass(frozen=True, slots=True)
class _TrainedModel:
    """A model as it is trained."""

    training: TrainingConfig
    model: ModelSpec
    expert_split: ExpertSplit
    """The split of its routed experts, which says whose code runs them."""
    notes: Sequence[str]
    """Notes on assumptions, and on settings without effect."""


def _resolve_trained_model(
    experiment: Experiment, requested: TrainingTable, layout: Layout, config: StrategyConfig | None
) -> _TrainedModel:
    """The training that the experiment asks for, and the model as it is trained."""
    table, model, parallelism = experiment.strategy, layout.model, layout.parallelism
    optimizer = choose_optimizer(requested, table, config)
    training, training_notes = resolve_training(requested, model, layout.cluster, optimizer.name)
    training = replace(
        training,
        layer_kernels=layer_kernels_of(requested, table, parallelism),
        expands_groups=layout.runs_flash_2 and has_grouped_heads(model),
        calls_engine=training_of(table.kind).has_engine_products(table),
        padding_mask=layout.padding_mask,
    )
    check_reference(requested, table, config, parallelism)
    expert_split = _split_experts(model, table, layout.requested_parallelism)
    is_unstacked, expert_notes = runs_experts_one_by_one(
        model, requested, table, expert_split, has_mask=layout.padding_mask is not None
    )
    if is_unstacked:
        model = unstack_experts(model)
    training = replace(training, has_fp32_stream=is_prepared(requested, table.kind, model))
    model, model_notes = apply_training(
        model, requested, table, training.precision, parallelism, expert_split, config
    )
    notes = [*training_notes, *reference_notes(requested), *expert_notes, *model_notes]
    if training.precision == "fp8":
        fp8, model, fp8_notes = resolve_fp8(requested, table, layout.cluster.gpu, model)
        notes += fp8_notes
        training = replace(training, fp8=fp8)
    training = resolve_recomputation(training, requested, table, parallelism, len(model.blocks))
    mlp_tiles = resolve_mlp_tiles(requested, training, model, table.kind, parallelism)
    training = replace(training, mlp_tiles=mlp_tiles)
    if (
        requested.lengths is not None
        or requested.images is not None
        or requested.audio is not None
        or model.towers
    ):
        expert_ranks = expert_members(layout.requested_parallelism, parallelism, expert_split)
        counts = layout.replicas, len(layout.placement.nodes)
        batch = table, parallelism, *counts, config, expert_ranks
        if requested.lengths is not None:
            training = apply_lengths(training, requested.lengths, model, *batch)
        plan = batch_plan(training, *batch)
        training, image_notes = apply_images(training, requested.images, requested.audio, model, plan)
        notes += image_notes
    check_stored_types(training, requested, table)
    check_size(model, training, parallelism, every_micro_batch=experiment.simulation.every_micro_batch)
    return _TrainedModel(training, model, expert_split, notes)


def _split_experts(model: ModelSpec, table: StrategyTable, requested: ParallelismTable) -> ExpertSplit:
    """The split of the model's routed experts, which says whose code runs them. `requested` has their
    degrees.

    Models without experts all have the same value. Raises for what the framework does not support with
    experts.
    """
    framework = resolver_of(table.kind)
    if not has_experts(model):
        return ExpertSplit()
    if not requested.expert_padding:
        return framework.split_experts(table, requested, model)
    if framework.padded_experts is None:
        raise InputError(
            f"parallelism.expert_padding: found true with strategy '{table.kind}', which pads no expert to "
            f"the fullest; expected it left out, or {alternatives('parallelism.expert_padding')}"
        )
    return ExpertSplit(library=framework.padded_experts, has_auxiliary_loss=True)


def _apply_expert_degrees(
    experiment: Experiment,
    layout: Layout,
    expert_split: ExpertSplit,
    model: ModelSpec,
    training: TrainingConfig,
    config: StrategyConfig | None,
) -> ParallelismConfig:
    """The layout's parallelism with the degrees of the model's experts. `model` is the model as it is
    trained.
    """
    table, placement, parallelism = experiment.strategy, layout.placement, layout.parallelism
    framework, link = resolver_of(table.kind), layout.full_cluster.node_link
    nodes_per_domain, requested = placement.nodes_per_domain(link), layout.requested_parallelism
    split = resolve_expert_degrees(
        requested,
        parallelism,
        expert_split,
        layout.model,
        placement.world_size,
        training.micro_batch_tokens,
        placement.gpus_per_node,
        framework.expert_replicas(table),
        nodes_per_domain,
        framework.default_dispatcher(table, requested, nodes_per_domain),
    )
    framework.check_experts(config, split, parallelism)
    check_adapted_experts(model, table, split)
    return replace(parallelism, experts=split)


def _check_tables(
    experiment: Experiment,
    cluster: Cluster,
    model: ModelSpec,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    config: StrategyConfig | None,
) -> list[str]:
    """Notes about settings without effect, after all tables have been checked against each other."""
    table = experiment.strategy
    framework = resolver_of(table.kind)
    notes = framework.check_layers(table, model, training, parallelism)
    check_captured(model, table.kind, training, parallelism)
    check_split(framework, model, training, parallelism)
    notes += framework.describe_parts(config, model, parallelism)
    others = (
        flex_note(parallelism, cluster.gpus, model, training),
        assumed_loads_note(parallelism.experts, model),
        choices_in_turn_note(parallelism.experts),
        assumed_dispatcher_note(experiment.parallelism, parallelism),
    )
    check_fp8_shapes(model, training, parallelism)
    return [*notes, *(note for note in others if note)]


def _apply_batch(experiment: Experiment, layout: Layout, sizes: tuple[int, ...]) -> TrainingTable:
    """`[training]` with the micro-batches of a step.

    `sizes` are the micro-batches by type of nodes, if they differ. Raises InputError for a global batch that
    is not made of the micro-batches.
    """
    full_cluster, placement = layout.full_cluster, layout.placement
    per_micro_batch = uneven_sequences(sizes, full_cluster, placement) if sizes else None
    training_table = _resolve_micro_batches(experiment, layout.replicas, per_micro_batch)
    if experiment.training.micro_batch_sizes:
        training_table = _apply_first_size(training_table, full_cluster, placement)
    return training_table


def _resolve_micro_batches(
    experiment: Experiment, replicas: int, per_micro_batch: int | None = None
) -> TrainingTable:
    """`[training]` with the number of micro-batches of its global batch.

    Each of `replicas` has a part of the global batch. `per_micro_batch` is the number of sequences of all
    replicas in one micro-batch, where they differ.
    """
    table = infer_fp8_precision(experiment.training)
    if table.global_batch_size is not None and per_micro_batch is not None:
        steps = uneven_micro_batches(table.global_batch_size, per_micro_batch)
        if table.gradient_accumulation_steps not in (None, steps):
            raise InputError(
                f"training.gradient_accumulation_steps: found {table.gradient_accumulation_steps}, but "
                f"global_batch_size {table.global_batch_size:,} makes {steps} micro-batches; "
                "expected one of them"
            )
        table = table.model_copy(update={"gradient_accumulation_steps": steps})
    elif table.global_batch_size is not None and table.gradient_accumulation_steps is None:
        steps = micro_batches_of(table.global_batch_size, table.micro_batch_size or 1, replicas)
        table = table.model_copy(update={"gradient_accumulation_steps": steps})
    return table


def _apply_first_size(table: TrainingTable, cluster: Cluster, placement: Placement) -> TrainingTable:
    """`[training]` with the micro-batch of the first node of the job."""
    name = cluster.nodes[int(cluster.node_type_indices[placement.nodes[0]])].name
    size = table.micro_batch_sizes.get(name, table.micro_batch_size or 1)
    return table.model_copy(update={"micro_batch_size": size})


_KEYS = ("model", "nodes", "gpus", "placement", "training", "trainer", "strategy")
_FABRIC_KEYS = ("cluster", "faults", "jitter", "cost", "jobs")


def expand_colocated_jobs(experiment: Experiment) -> dict[str, Experiment]:
    """The co-located jobs of `[jobs.NAME]` by name, each as a complete experiment.

    Raises InputError for keys that belong to the shared fabric, and for anything that an experiment refuses.
    """
    return {name: _expand_colocated_job(experiment, name, table) for name, table in experiment.jobs.items()}


def _expand_colocated_job(experiment: Experiment, name: str, table: Mapping[str, Any]) -> Experiment:
    where = f"jobs.{name}"
    for key in table:
        if key in _FABRIC_KEYS:
            raise InputError(f"{where}: '{key}' belongs to the fabric that all jobs share; set it outside")
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key '{key}'{did_you_mean(key, _KEYS)}")
    data: dict[str, Any] = {
        "model": experiment.model,
        "cluster": experiment.cluster,
        "strategy": experiment.strategy.model_dump(),
        **table,
        "training": {**experiment.training.model_dump(), **_table(table, "training", where)},
        "trainer": {**experiment.trainer.model_dump(), **_table(table, "trainer", where)},
    }
    if not {"nodes", "gpus", "placement"} & set(table):
        data |= {"nodes": experiment.nodes, "gpus": experiment.gpus}
    return Experiment.of_data(data, origin=where)


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{where}.{key}: found {value!r}, expected a table")
    return value


def place_jobs(
    experiment: Experiment, colocated_experiments: Mapping[str, Experiment], cluster: Cluster
) -> tuple[Placement, dict[str, Placement]]:
    """The placements of the experiment's main job and of its co-located jobs, on one fabric without shared
    nodes.

    Jobs that name no nodes take free ones, in the order of the tables.
    """
    for name, colocated_experiment in colocated_experiments.items():
        if colocated_experiment.placement.fabric_nodes is not None:
            raise InputError(f"jobs.{name}.placement.fabric_nodes: is the fabric's; set it outside")
    all_experiments = [
        ("", experiment),
        *(
            (f"jobs.{name}: ", colocated_experiment)
            for name, colocated_experiment in colocated_experiments.items()
        ),
    ]
    fabric = experiment.placement.fabric_nodes or _min_fabric_nodes(all_experiments, cluster)
    node_owners: dict[int, str] = {}
    placements = []
    for where, job_experiment in all_experiments:
        table = job_experiment.placement.model_copy(update={"fabric_nodes": fabric})
        placement = resolve_placement(
            table, cluster, job_experiment.nodes, job_experiment.gpus, where, node_owners
        )
        placements.append(placement)
        node_owners |= dict.fromkeys(placement.nodes, where.removesuffix(": ") or "the job itself")
    return placements[0], dict(zip(colocated_experiments, placements[1:], strict=True))


def _min_fabric_nodes(all_experiments: Sequence[tuple[str, Experiment]], cluster: Cluster) -> int:
    """Nodes of the smallest fabric that holds all jobs, including the nodes that they name."""
    placements = [
        resolve_placement(job_experiment.placement, cluster, job_experiment.nodes, job_experiment.gpus, where)
        for where, job_experiment in all_experiments
    ]
    named_sizes = [
        max(placement.nodes) + 1
        for placement, (_, job_experiment) in zip(placements, all_experiments, strict=True)
        if job_experiment.placement.nodes
    ]
    return max(sum(len(placement.nodes) for placement in placements), *named_sizes, 1)
