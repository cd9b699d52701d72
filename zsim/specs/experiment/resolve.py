"""From an experiment to a job: names looked up, defaults filled in, all tables checked against each other."""

from __future__ import annotations

from dataclasses import replace

from zsim.arrays import distinct
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.capture.settings import captured_length, captured_notes, check_captured
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.batch import (
    micro_batch_sizes_of,
    micro_batches_of,
    sequences_of,
    uneven_micro_batches,
    uneven_sequences,
)
from zsim.specs.experiment.checkpointing import recomputation_of, with_interval
from zsim.specs.experiment.data.micro_batches import with_lengths
from zsim.specs.experiment.faults import FaultsTable, idle_faults_note
from zsim.specs.experiment.fp8.recipe import resolve_fp8, with_fp8_precision
from zsim.specs.experiment.fp8.shapes import check_fp8_shapes
from zsim.specs.experiment.jitter import resolve_jitter
from zsim.specs.experiment.job import Job, Strategy, job_topology, slowdowns_of
from zsim.specs.experiment.kernel_choices import (
    as_megatron_deepspeed_runs,
    as_megatron_runs,
    attention_kind,
    attention_of,
    check_stored_types,
    cross_entropy_of,
    has_grouped_heads,
    layer_kernels_of,
    runs_flash_2,
    with_attention,
    with_one_connection,
    with_release,
)
from zsim.specs.experiment.model_split import (
    check_split,
    flex_note,
    with_context_inner,
    with_context_masks,
)
from zsim.specs.experiment.other_jobs import neighbours, place_together
from zsim.specs.experiment.placement import Placement, place
from zsim.specs.experiment.strategies import (
    asked_parallelism,
    default_precision,
    expert_replicas,
    resolve_deepspeed,
    resolve_experts,
    resolve_strategy,
    with_predictions,
)
from zsim.specs.experiment.tables import Experiment, TrainingTable
from zsim.specs.experiment.trainer import with_trainer
from zsim.specs.experiment.training.adapted_experts import check_adapted_experts
from zsim.specs.experiment.training.optimizer_choice import chosen_optimizer
from zsim.specs.experiment.training.trained_model import trained_model
from zsim.specs.library import Library
from zsim.specs.model.config_reader import MAX_BLOCKS
from zsim.specs.model.spec import ModelSpec
from zsim.specs.model.tiling import with_tiled_linears
from zsim.specs.model.vocabulary import with_padded_vocabulary
from zsim.specs.names import check_names
from zsim.specs.strategy.deepspeed.autotp import uneven_shards_note, with_grain
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.deepspeed.experts import check_experts
from zsim.specs.strategy.expert_degrees import expert_members, resolve_expert_degrees
from zsim.specs.strategy.frameworks import Fsdp2
from zsim.specs.strategy.megatron import check_megatron_layout
from zsim.specs.strategy.megatron_experts import (
    check_overlap,
    check_router_padding,
    norms_note,
    shared_overlap_note,
)
from zsim.specs.strategy.megatron_table import MegatronTable
from zsim.specs.strategy.parallelism import Parallelism, resolve_parallelism
from zsim.specs.strategy.partition import layer_weights
from zsim.specs.strategy.tables import DeepSpeedTable
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS, Training

_DEFAULT_SEQUENCE = 4096
_MAX_TOKENS = 2**27
_MAX_PARAMETERS = 10**16


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
    if isinstance(table, DeepSpeedTable) and table.tile_numel is not None:
        model = with_tiled_linears(model, table.tile_numel)
    asked_degrees, style = asked_parallelism(experiment)
    parallelism = resolve_parallelism(
        asked_degrees, style, table.kind, placement.world_size, len(model.blocks), layer_weights(model)
    )
    parallelism = with_release(parallelism, table, asked_degrees)
    choices = [attention_of(experiment.training, table, [gpu], model, parallelism) for gpu in cluster.gpus]
    used = _types_in_use(cluster, placement)
    runs_second = any(runs_flash_2(choices[kind], table, cluster.gpus[kind]) for kind in used)
    cluster = with_attention(cluster, choices)
    parallelism = with_context_inner(parallelism, placement.world_size, placement.gpus_per_node)
    if isinstance(table, MegatronTable) and table.mtp_layers:
        model, parallelism = with_predictions(model, table, parallelism)
    if isinstance(table, MegatronTable):
        multiple = table.vocabulary_multiple * parallelism.tensor
        model, unpadded = with_padded_vocabulary(model, multiple), model.vocab_size
        if model.vocab_size != unpadded:
            notes.append(f"Megatron pads the vocabulary of {unpadded:,} to {model.vocab_size:,}")
    replicas = placement.world_size // parallelism.model_ranks
    ranks = replicas * parallelism.context
    whole, cluster = cluster, _of_types_in_use(cluster, placement)
    sizes = micro_batch_sizes_of(
        experiment.training.micro_batch_sizes,
        experiment.training.micro_batch_size or 1,
        table.kind,
        parallelism,
        whole,
        placement,
    )
    per_micro_batch = uneven_sequences(sizes, whole, placement) if sizes else None
    asked = _training_table(experiment, replicas, per_micro_batch)
    if experiment.training.micro_batch_sizes:
        asked = _with_first_size(asked, whole, placement)
    if parallelism.style == "deepspeed" and parallelism.has_megatron_layers:
        asked = as_megatron_deepspeed_runs(asked)
    if parallelism.style == "megatron" and parallelism.tensor * parallelism.context > 1:
        is_fsdp = isinstance(table, MegatronTable) and table.fsdp_sharding is not None
        asked = asked if is_fsdp else with_one_connection(asked, cluster)
    deepspeed: DeepSpeedConfig | None = None
    if isinstance(table, DeepSpeedTable):
        deepspeed = resolve_deepspeed(table, asked, model, cluster, placement, parallelism)
        parallelism = with_grain(parallelism, deepspeed)
        notes += deepspeed.notes
    asked = with_interval(asked, deepspeed, parallelism)
    optimizer = chosen_optimizer(asked, table, deepspeed)
    training = _training(asked, model, cluster, deepspeed, notes, optimizer.name)
    training = replace(
        training,
        layer_kernels=layer_kernels_of(asked, table, parallelism),
        expands_groups=runs_second and has_grouped_heads(model),
    )
    offloads = getattr(table, "cpu_offload", False)
    of_experts = resolve_experts(model, table, asked_degrees)
    model = trained_model(
        model,
        asked,
        table.kind,
        training.precision,
        parallelism,
        of_experts,
        notes,
        is_offloaded=offloads,
        deepspeed=deepspeed,
    )
    if training.precision == "fp8":
        fp8, model = resolve_fp8(asked, table, cluster.gpu, model, notes)
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
        exchanging = expert_members(asked_degrees, parallelism, of_experts)
        given = asked.lengths, model, table, parallelism, replicas, deepspeed, exchanging
        training = with_lengths(training, *given)
    check_stored_types(training, asked, table)
    _check_size(model, training, parallelism, every_micro_batch=experiment.simulation.every_micro_batch)
    split = resolve_expert_degrees(
        asked_degrees, parallelism, of_experts, model, placement.world_size, training.micro_batch_tokens,
        placement.gpus_per_node, expert_replicas(table), whole.node_link.nodes_per_domain,
    )  # fmt: skip
    if deepspeed is not None:
        check_experts(deepspeed, split, parallelism)
    check_adapted_experts(model, table, split)
    parallelism = replace(parallelism, experts=split)
    parallelism = with_context_masks(parallelism, model, training.sequence_length)
    if isinstance(table, MegatronTable):
        check_overlap(table, parallelism, training)
        check_router_padding(table, split, training, model)
        unread = (norms_note(table, model), shared_overlap_note(table, parallelism, training, model))
        notes += [note for note in unread if note]
    check_captured(model, table.kind, training, parallelism)
    check_split(model, training, parallelism)
    noted = flex_note(parallelism, cluster.gpus, model, training)
    notes += [note for note in (uneven_shards_note(model, parallelism, deepspeed), noted) if note]
    check_fp8_shapes(model, training, parallelism)
    strategy: Strategy
    cluster = whole
    if deepspeed is not None:
        strategy = deepspeed
    else:
        strategy, cluster = resolve_strategy(table, training, ranks, cluster, len(placement.nodes))
    if isinstance(strategy, Fsdp2):
        strategy = replace(strategy, gpus_of_node=placement.gpus_per_node)
    if isinstance(table, MegatronTable):
        queues = training.device_max_connections
        check_megatron_layout(table, parallelism.pipeline, parallelism.experts.ranks, queues)
    sequences = None
    if not sizes:
        sequences = sequences_of(experiment.training.global_batch_size, training, replicas)
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


def _types_in_use(cluster: Cluster, placement: Placement) -> list[int]:
    return list(distinct(cluster.type_of_node[list(placement.nodes)])) if cluster.nodes else [0]


def _of_types_in_use(cluster: Cluster, placement: Placement) -> Cluster:
    """The cluster with only those types of nodes that the job is on, as all checks of GPUs see it."""
    if not cluster.nodes:
        return cluster
    used = [cluster.nodes[kind] for kind in _types_in_use(cluster, placement)]
    first = {
        key: getattr(used[0], key) for key in ("gpu", "gpus_per_node", "node_link", "pcie", "nic", "host")
    }
    return cluster.model_copy(update={**first, "nodes": tuple(used)})


def _with_first_size(table: TrainingTable, cluster: Cluster, placement: Placement) -> TrainingTable:
    """`[training]` with the micro-batch of the first node of the job."""
    name = cluster.nodes[int(cluster.type_of_node[placement.nodes[0]])].name
    size = table.micro_batch_sizes.get(name, table.micro_batch_size or 1)
    return table.model_copy(update={"micro_batch_size": size})


def _training_table(
    experiment: Experiment, replicas: int, per_micro_batch: int | None = None
) -> TrainingTable:
    """`[training]` with the number of micro-batches of its global batch, of which each of `replicas` has a
    part, and with Megatron's defaults under Megatron. `per_micro_batch`: sequences of all replicas in one
    micro-batch, where they differ."""
    table, strategy = with_fp8_precision(experiment.training), experiment.strategy
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
    if not isinstance(strategy, MegatronTable):
        return table
    return as_megatron_runs(table, strategy.engine, strategy.version)


def _training(
    table: TrainingTable,
    model: ModelSpec,
    cluster: Cluster,
    deepspeed: DeepSpeedConfig | None,
    notes: list[str],
    optimizer: str,
) -> Training:
    precision = deepspeed.precision if deepspeed else table.precision or default_precision(cluster)
    gpu = next((gpu for gpu in cluster.gpus if getattr(gpu.peak, precision) is None), cluster.gpu)
    if getattr(gpu.peak, precision) is None:
        offered = [name for name in ("fp8", "bf16", "fp16", "fp32") if getattr(gpu.peak, name) is not None]
        raise InputError(
            f"training.precision: GPU '{gpu.name}' has no {precision} arithmetic; it has {', '.join(offered)}"
        )
    attention = attention_kind(table.attention, cluster, precision)
    longest = model.max_positions
    length = (
        captured_length(model, table.sequence_length)
        or table.sequence_length
        or min(longest or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
    )
    if longest and length > longest:
        if model.learned_positions:
            raise InputError(
                f"training.sequence_length: found {length}, but '{model.name}' has {longest} learned "
                "positions"
            )
        notes.append(f"sequence_length {length} is beyond the {longest} positions that '{model.name}' states")
    clipping = deepspeed.gradient_clipping if deepspeed else table.gradient_clipping
    connections = table.device_max_connections
    if connections != DEFAULT_CONNECTIONS and gpu.vendor != "nvidia":
        notes.append(f"training.device_max_connections is CUDA's: without effect on GPU '{gpu.name}'")
        connections = DEFAULT_CONNECTIONS
    return Training(
        sequence_length=length,
        micro_batch_size=deepspeed.batch.micro_batch_size if deepspeed else table.micro_batch_size or 1,
        gradient_accumulation_steps=(
            deepspeed.batch.gradient_accumulation_steps
            if deepspeed
            else table.gradient_accumulation_steps or 1
        ),
        precision=precision,
        activation_checkpointing=table.activation_checkpointing,
        attention=attention,
        compile=table.compile,
        optimizer=optimizer,
        paged_states=table.paged_states,
        stochastic_rounding=table.stochastic_rounding,
        gradient_clipping=clipping or 0.0,
        liger=table.liger,
        cross_entropy=cross_entropy_of(table),
        checkpoint_every=table.checkpoint_every,
        checkpoint_stops_early=table.checkpoint_stops_early,
        checkpoint_is_reentrant=table.checkpoint_is_reentrant,
        expandable_segments=table.expandable_segments,
        optimizer_implementation=table.optimizer_implementation,
        device_max_connections=connections,
        autocast=table.autocast,
        stored_dtype=table.stored_dtype,
        deterministic_sms=max(gpu.sm_count if gpu.attention.is_deterministic else 0 for gpu in cluster.gpus),
    )


def _check_size(
    model: ModelSpec, training: Training, parallelism: Parallelism, *, every_micro_batch: bool
) -> None:
    """Raises InputError for a step too large for any machine, whose simulation would exhaust this one's
    memory; of micro-batches that are alike, only those count that are simulated: three for every pipeline
    rank at most."""
    context, micro_batches = parallelism.context, training.gradient_accumulation_steps
    are_alike = parallelism.schedule in ("1f1b", "interleaved-1f1b") and parallelism.passes == 1
    most = 3 * parallelism.pipeline if are_alike and not every_micro_batch else micro_batches
    some = min(micro_batches, most)
    blocks = len(model.blocks) * some
    if blocks > MAX_BLOCKS:
        raise InputError(
            f"training.gradient_accumulation_steps: {micro_batches:,} micro-batches of {len(model.blocks):,} "
            f"blocks are more than zsim simulates; expected at most {MAX_BLOCKS:,} blocks in a step"
        )
    if training.micro_batch_tokens > _MAX_TOKENS * context:
        raise InputError(
            f"training.micro_batch_size: found {training.micro_batch_tokens:,} tokens in a micro-batch, "
            f"expected at most {_MAX_TOKENS * context:,}"
        )
    if model.numel > _MAX_PARAMETERS:
        raise InputError(
            f"model '{model.name}': found {model.numel:,} parameters, expected at most {_MAX_PARAMETERS:,}"
        )
