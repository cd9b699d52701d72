"""From an experiment to a job: names looked up, defaults filled in, all tables checked against each other."""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.capture.settings import captured_notes, check_captured
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.data.micro_batches import with_lengths
from zsim.specs.experiment.faults import FaultsTable, idle_faults_note
from zsim.specs.experiment.fp8.recipe import resolve_fp8
from zsim.specs.experiment.fp8.shapes import check_fp8_shapes
from zsim.specs.experiment.jitter import resolve_jitter
from zsim.specs.experiment.job import Job, Strategy, job_topology, slowdowns_of
from zsim.specs.experiment.kernel_choices import check_stored_types, has_grouped_heads, layer_kernels_of
from zsim.specs.experiment.layout import Layout, lay_out
from zsim.specs.experiment.model_split import check_split, check_tokens, flex_note, with_context_masks
from zsim.specs.experiment.other_jobs import neighbours, place_together
from zsim.specs.experiment.placement import Placement, place
from zsim.specs.experiment.strategies import (
    expert_replicas,
    resolve_deepspeed,
    resolve_experts,
    resolve_strategy,
    with_threads,
)
from zsim.specs.experiment.tables import Experiment, TrainingTable
from zsim.specs.experiment.trainer import with_trainer
from zsim.specs.experiment.training.adapted_experts import check_adapted_experts
from zsim.specs.experiment.training.asked import asked_training
from zsim.specs.experiment.training.batch import micro_batch_sizes_of, sequences_of
from zsim.specs.experiment.training.checkpointing import recomputation_of, with_interval
from zsim.specs.experiment.training.optimizer_choice import chosen_optimizer
from zsim.specs.experiment.training.quantisation import is_prepared
from zsim.specs.experiment.training.settled import check_size, settled_training
from zsim.specs.experiment.training.trained_model import trained_model
from zsim.specs.experiment.training.transformers_release import runs_experts_one_by_one
from zsim.specs.library import Library
from zsim.specs.model.expert_loop import with_experts_one_by_one
from zsim.specs.model.spec import ModelSpec
from zsim.specs.names import check_names
from zsim.specs.strategy.deepspeed.autotp import uneven_shards_note, with_grain
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.deepspeed.experts import check_experts
from zsim.specs.strategy.expert_degrees import (
    assumed_loads_note,
    expert_members,
    resolve_expert_degrees,
)
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.frameworks import Fsdp2
from zsim.specs.strategy.megatron import check_megatron_layout
from zsim.specs.strategy.megatron_experts import (
    check_overlap,
    check_router_padding,
    norms_note,
    shared_overlap_note,
)
from zsim.specs.strategy.megatron_table import MegatronTable
from zsim.specs.strategy.parallelism import Parallelism
from zsim.specs.strategy.tables import DeepSpeedTable
from zsim.specs.strategy.training import Training


def resolve(experiment: Experiment, library: Library | None = None) -> Job:
    """Look up model and cluster in `library`, fill in defaults, check all tables against each other.

    Raises InputError for contradictions, NotSimulatedError for what zsim cannot simulate yet.
    """
    library = library or Library()
    try:
        cluster = library.cluster(experiment.cluster)
    except InputError:
        check_names(experiment.model, experiment.cluster)
        raise
    if not experiment.jobs:
        placement = place(experiment.placement, cluster, experiment.nodes, experiment.gpus)
        job = _resolve(experiment, library, cluster, placement)
    else:
        if cluster.nodes:
            raise NotSimulatedError(
                f"jobs: co-located jobs on cluster '{cluster.name}', whose nodes are of several "
                "types, are not "
                "simulated yet; leave out one of them"
            )
        others = neighbours(experiment)
        placement, places = place_together(experiment, others, cluster)
        beside = {name: _resolve(other, library, cluster, places[name]) for name, other in others.items()}
        job = replace(_resolve(experiment, library, cluster, placement), others=beside)
    if experiment.faults != FaultsTable.model_construct():
        slowdowns_of(job, job_topology(job))
        places = {"this job": placement} | {f"'{name}'": one.placement for name, one in job.others.items()}
        note = idle_faults_note(experiment.faults, places)
        job = replace(job, notes=(*job.notes, note)) if note else job
    return job


def _resolve(experiment: Experiment, library: Library, cluster: Cluster, placement: Placement) -> Job:
    model = library.model(experiment.model)
    if model.not_simulated:
        raise NotSimulatedError(f"model '{model.name}': {model.not_simulated}")
    notes = [*experiment.notes, *captured_notes(model)]
    table = experiment.strategy
    layout = lay_out(experiment, model, cluster, placement, notes)
    parallelism = layout.parallelism
    sizes = micro_batch_sizes_of(
        experiment.training.micro_batch_sizes,
        experiment.training.micro_batch_size or 1,
        table.kind,
        parallelism,
        layout.whole,
        placement,
    )
    asked = asked_training(experiment, layout, sizes)
    deepspeed: DeepSpeedConfig | None = None
    if isinstance(table, DeepSpeedTable):
        deepspeed = resolve_deepspeed(table, asked, layout.model, layout.cluster, placement, parallelism)
        parallelism = with_grain(parallelism, deepspeed)
        notes += deepspeed.notes
    layout = replace(layout, parallelism=parallelism)
    asked = with_interval(asked, deepspeed, parallelism)
    training, model, of_experts = _trained(experiment, asked, layout, deepspeed, notes)
    check_tokens(training, parallelism)
    parallelism = _with_experts(experiment, layout, of_experts, model, training, deepspeed)
    parallelism = with_context_masks(parallelism, model, training.sequence_length)
    notes += _checked(experiment, layout.cluster, model, training, parallelism, deepspeed)
    strategy: Strategy
    cluster = layout.whole
    if deepspeed is not None:
        strategy = deepspeed
    else:
        ranks = layout.replicas * parallelism.context
        strategy, cluster = resolve_strategy(table, training, ranks, cluster, len(placement.nodes))
    if isinstance(strategy, Fsdp2):
        strategy = replace(strategy, gpus_of_node=placement.gpus_per_node)
    cluster, threads_note = with_threads(strategy, cluster, placement.gpus_per_node)
    notes += threads_note
    if isinstance(table, MegatronTable):
        queues = training.device_max_connections
        check_megatron_layout(table, parallelism.pipeline, parallelism.experts.ranks, queues)
    sequences = None
    if not sizes:
        sequences = sequences_of(experiment.training.global_batch_size, training, layout.replicas)
    return Job(
        experiment,
        with_trainer(model, experiment.trainer),
        cluster,
        placement,
        training,
        strategy,
        tuple(notes),
        parallelism=parallelism,
        sequences=sequences,
        micro_batch_sizes=sizes,
        simulation=experiment.simulation,
        faults=experiment.faults,
        jitter=resolve_jitter(experiment.jitter),
        cost=experiment.cost,
    )


def _trained(
    experiment: Experiment,
    asked: TrainingTable,
    layout: Layout,
    deepspeed: DeepSpeedConfig | None,
    notes: list[str],
) -> tuple[Training, ModelSpec, ExpertSplit]:
    """The training that the experiment asks for, the trained model, and whose code runs its experts."""
    table, model, parallelism = experiment.strategy, layout.model, layout.parallelism
    optimizer = chosen_optimizer(asked, table, deepspeed)
    training = settled_training(asked, model, layout.cluster, deepspeed, notes, optimizer.name)
    training = replace(
        training,
        layer_kernels=layer_kernels_of(asked, table, parallelism),
        expands_groups=layout.runs_flash_2 and has_grouped_heads(model),
        calls_engine=isinstance(table, MegatronTable) and table.runs_transformer_engine,
    )
    of_experts = resolve_experts(model, table, layout.asked)
    if runs_experts_one_by_one(model, asked.transformers, table, of_experts, notes):
        model = with_experts_one_by_one(model)
    training = replace(training, has_fp32_stream=is_prepared(asked, table.kind, model))
    model = trained_model(
        model,
        asked,
        table.kind,
        training.precision,
        parallelism,
        of_experts,
        notes,
        is_offloaded=getattr(table, "cpu_offload", False),
        deepspeed=deepspeed,
    )
    if training.precision == "fp8":
        fp8, model = resolve_fp8(asked, table, layout.cluster.gpu, model, notes)
        training = replace(training, fp8=fp8)
    recomputed = recomputation_of(experiment, asked, parallelism, len(model.blocks), training.attention)
    training = replace(
        training,
        activation_checkpointing=recomputed.policy,
        block_checkpointing=recomputed.blocks,
        layers_per_checkpoint=recomputed.layers_per_checkpoint,
        recompute_modules=recomputed.modules,
    )
    if asked.lengths is not None:
        exchanging = expert_members(layout.asked, parallelism, of_experts)
        counts = layout.replicas, len(layout.placement.nodes)
        given = asked.lengths, model, table, parallelism, *counts, deepspeed, exchanging
        training = with_lengths(training, *given)
    check_stored_types(training, asked, table)
    check_size(model, training, parallelism, every_micro_batch=experiment.simulation.every_micro_batch)
    return training, model, of_experts


def _with_experts(
    experiment: Experiment,
    layout: Layout,
    of_experts: ExpertSplit,
    model: ModelSpec,
    training: Training,
    deepspeed: DeepSpeedConfig | None,
) -> Parallelism:
    """The layout's parallelism with the degrees of the model's experts. `model` is the model as it is
    trained.
    """
    table, placement, parallelism = experiment.strategy, layout.placement, layout.parallelism
    split = resolve_expert_degrees(
        layout.asked,
        parallelism,
        of_experts,
        layout.model,
        placement.world_size,
        training.micro_batch_tokens,
        placement.gpus_per_node,
        expert_replicas(table),
        layout.whole.node_link.segment(placement.fabric_nodes)
        if placement.is_plain
        else layout.whole.node_link.nodes_per_domain,
    )
    if deepspeed is not None:
        check_experts(deepspeed, split, parallelism)
    check_adapted_experts(model, table, split)
    return replace(parallelism, experts=split)


def _checked(
    experiment: Experiment,
    cluster: Cluster,
    model: ModelSpec,
    training: Training,
    parallelism: Parallelism,
    deepspeed: DeepSpeedConfig | None,
) -> list[str]:
    """Notes about settings without effect, after all tables have been checked against each other."""
    table = experiment.strategy
    notes: list[str | None] = []
    if isinstance(table, MegatronTable):
        check_overlap(table, parallelism, training)
        check_router_padding(table, parallelism.experts, training, model)
        notes += norms_note(table, model), shared_overlap_note(table, parallelism, training, model)
    check_captured(model, table.kind, training, parallelism)
    check_split(model, training, parallelism)
    notes += (
        uneven_shards_note(model, parallelism, deepspeed),
        flex_note(parallelism, cluster.gpus, model, training),
        assumed_loads_note(parallelism.experts, model),
    )
    check_fp8_shapes(model, training, parallelism)
    return [note for note in notes if note]
