"""From an experiment to a job: names looked up, defaults filled in, all tables checked against each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.batch import micro_batches_of, sequences_of
from zsim.specs.experiment.checkpointing import block_policies
from zsim.specs.experiment.faults import FaultsTable, idle_faults_note
from zsim.specs.experiment.jitter import resolve_jitter
from zsim.specs.experiment.job import Job, Strategy, job_topology, slowdowns_of
from zsim.specs.experiment.kernel_choices import (
    as_megatron_runs,
    attention_kind,
    check_fp8_tokens,
    check_stored_types,
    cross_entropy_of,
    with_attention,
)
from zsim.specs.experiment.other_jobs import neighbours, place_together
from zsim.specs.experiment.placement import Placement, place
from zsim.specs.experiment.tables import (
    DdpTable,
    DeepSpeedTable,
    Experiment,
    Fsdp1Table,
    Fsdp2Table,
    ReferenceTable,
    TrainingTable,
)
from zsim.specs.experiment.trainer import with_trainer
from zsim.specs.library import Library
from zsim.specs.model.config_reader import MAX_BLOCKS
from zsim.specs.model.spec import ModelSpec
from zsim.specs.model.tiling import with_tiled_linears
from zsim.specs.names import check_names
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig, TrainingValues
from zsim.specs.strategy.deepspeed.load import load_deepspeed_config
from zsim.specs.strategy.deepspeed.resolve import with_delayed_update
from zsim.specs.strategy.deepspeed.unsimulated import refuse_what_is_not_simulated
from zsim.specs.strategy.deepspeed.zeropp import check_even_nodes
from zsim.specs.strategy.frameworks import Ddp, Fsdp1, Fsdp2, Reference
from zsim.specs.strategy.megatron import MegatronTable, megatron_strategy, with_padded_vocabulary
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS, Precision, Training

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
        others = neighbours(experiment)
        placement, places = place_together(experiment, others, cluster)
        beside = {name: _resolve(other, library, cluster, places[name]) for name, other in others.items()}
        job = replace(_resolve(experiment, library, cluster, placement), others=beside)
    if experiment.faults != FaultsTable():
        slowdowns_of(job, job_topology(job))
        places = {"this job": placement} | {f"'{name}'": one.placement for name, one in job.others.items()}
        note = idle_faults_note(experiment.faults, places)
        job = replace(job, notes=(*job.notes, note)) if note else job
    return job


def _resolve(experiment: Experiment, library: Library, cluster: Cluster, placement: Placement) -> Job:
    model = library.model(experiment.model)
    cluster = with_attention(cluster, experiment.training.attention)
    if model.not_simulated:
        raise NotSimulatedError(f"model '{model.name}': {model.not_simulated}")
    world_size = placement.world_size
    notes = list(experiment.notes)
    table = experiment.strategy
    if isinstance(table, DeepSpeedTable) and table.tile_numel is not None:
        model = with_tiled_linears(model, table.tile_numel)
    if isinstance(table, MegatronTable):
        model, unpadded = with_padded_vocabulary(model), model.vocab_size
        if model.vocab_size != unpadded:
            notes.append(f"Megatron pads the vocabulary of {unpadded:,} to {model.vocab_size:,}")
    deepspeed: DeepSpeedConfig | None = None
    if isinstance(table, DeepSpeedTable):
        deepspeed = _deepspeed(table, experiment, model, cluster, placement)
        notes += deepspeed.notes
    training = _training(_training_table(experiment, world_size), model, cluster, deepspeed, notes)
    check_stored_types(training, table.kind)
    _check_size(model, training)
    check_fp8_tokens(training)
    strategy: Strategy
    if deepspeed is not None:
        strategy = deepspeed
    elif isinstance(table, DdpTable):
        strategy = Ddp(
            bucket_cap_bytes=round(table.bucket_cap_mb * 2**20),
            first_bucket_cap_bytes=2**20 if table.bucket_cap_mb == 25 else round(table.bucket_cap_mb * 2**20),
            gradient_as_bucket_view=table.gradient_as_bucket_view,
            no_sync=table.no_sync,
        )
    elif isinstance(table, Fsdp2Table):
        strategy = _fsdp2(table, training, world_size, cluster)
    elif isinstance(table, MegatronTable):
        strategy = megatron_strategy(table, training, world_size)
    elif isinstance(table, ReferenceTable):
        strategy, cluster = _reference(table, training, cluster)
    else:
        assert isinstance(table, Fsdp1Table)
        strategy = _fsdp1(table, training, world_size, len(placement.nodes))
    sequences = sequences_of(experiment.training.global_batch_size, training, world_size)
    return Job(
        experiment,
        with_trainer(model, experiment.trainer),
        cluster,
        placement,
        training,
        strategy,
        tuple(notes),
        sequences=sequences,
        simulation=experiment.simulation,
        faults=experiment.faults,
        jitter=resolve_jitter(experiment.jitter),
        cost=experiment.cost,
    )


def _training_table(experiment: Experiment, world_size: int) -> TrainingTable:
    """`[training]` with the number of micro-batches of its global batch, and with Megatron's defaults under
    Megatron."""
    table, strategy = experiment.training, experiment.strategy
    if table.global_batch_size is not None and table.gradient_accumulation_steps is None:
        steps = micro_batches_of(table.global_batch_size, table.micro_batch_size or 1, world_size)
        table = table.model_copy(update={"gradient_accumulation_steps": steps})
    return as_megatron_runs(table, strategy.engine) if isinstance(strategy, MegatronTable) else table


def _training(
    table: TrainingTable,
    model: ModelSpec,
    cluster: Cluster,
    deepspeed: DeepSpeedConfig | None,
    notes: list[str],
) -> Training:
    gpu = cluster.gpu
    precision = deepspeed.precision if deepspeed else table.precision or _default_precision(cluster)
    if getattr(gpu.peak, precision) is None:
        offered = [name for name in ("fp8", "bf16", "fp16", "fp32") if getattr(gpu.peak, name) is not None]
        raise InputError(
            f"training.precision: GPU '{gpu.name}' has no {precision} arithmetic; it has {', '.join(offered)}"
        )
    attention = attention_kind(table.attention, cluster, precision)
    longest = model.max_positions
    length = table.sequence_length or min(longest or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
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
        optimizer=table.optimizer,
        gradient_clipping=clipping or 0.0,
        liger=table.liger,
        cross_entropy=cross_entropy_of(table),
        checkpoint_every=table.checkpoint_every,
        block_checkpointing=block_policies(table, len(model.blocks)),
        checkpoint_stops_early=table.checkpoint_stops_early,
        checkpoint_is_reentrant=table.checkpoint_is_reentrant,
        expandable_segments=table.expandable_segments,
        optimizer_implementation=table.optimizer_implementation,
        device_max_connections=connections,
        autocast=table.autocast,
        stored_dtype=table.stored_dtype,
    )


def _check_size(model: ModelSpec, training: Training) -> None:
    """Raises InputError for a step too large for any machine, whose simulation would exhaust this one's
    memory."""
    micro_batches = training.gradient_accumulation_steps
    blocks = len(model.blocks) * micro_batches
    if blocks > MAX_BLOCKS:
        raise InputError(
            f"training.gradient_accumulation_steps: {micro_batches:,} micro-batches of {len(model.blocks):,} "
            f"blocks are more than zsim simulates; expected at most {MAX_BLOCKS:,} blocks in a step"
        )
    if training.micro_batch_tokens > _MAX_TOKENS:
        raise InputError(
            f"training.micro_batch_size: found {training.micro_batch_tokens:,} tokens in a micro-batch, "
            f"expected at most {_MAX_TOKENS:,}"
        )
    if model.numel > _MAX_PARAMETERS:
        raise InputError(
            f"model '{model.name}': found {model.numel:,} parameters, expected at most {_MAX_PARAMETERS:,}"
        )


def _default_precision(cluster: Cluster) -> Precision:
    return "bf16" if cluster.gpu.peak.bf16 is not None else "fp16"


def _deepspeed(
    table: DeepSpeedTable,
    experiment: Experiment,
    model: ModelSpec,
    cluster: Cluster,
    placement: Placement,
) -> DeepSpeedConfig:
    """The resolved DeepSpeed JSON of the user, or of a stage with defaults; if both give a stage, it must be
    equal."""
    config: str | Path | dict[str, Any]
    if table.config is None:
        if table.stage is None:
            raise InputError("strategy: deepspeed needs 'stage' or 'config'")
        config = {"zero_optimization": {"stage": table.stage}}
    else:
        config = table.config
    training = _training_table(experiment, placement.world_size)
    precision, micro_batch_size = training.precision, training.micro_batch_size
    if table.config is None:
        precision, micro_batch_size = precision or _default_precision(cluster), micro_batch_size or 1
    values = TrainingValues(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        precision=precision,
        gradient_clipping=training.gradient_clipping,
        auto_precision=_default_precision(cluster),
    )
    resolved = load_deepspeed_config(
        config,
        version=table.version,
        world_size=placement.world_size,
        gpus_per_node=placement.gpus_per_node,
        hidden_size=model.hidden_size,
        training=values,
        name=table.config_name,
    )
    if table.config is not None and table.stage is not None and table.stage != resolved.zero.stage:
        raise InputError(
            f"strategy.stage: found {table.stage}, but {resolved.name} says zero_optimization.stage "
            f"{resolved.zero.stage}"
        )
    check_even_nodes(resolved, placement.gpus)
    refuse_what_is_not_simulated(resolved)
    if table.delayed_parameter_update:
        resolved = with_delayed_update(resolved)
    if table.fetches_one_by_one and resolved.stage != 3:
        raise InputError(
            f"strategy.fetches_one_by_one: found true with stage {resolved.stage}, which fetches no "
            "parameters; expected stage 3"
        )
    return replace(resolved, zero_init=table.zero_init, fetches_one_by_one=table.fetches_one_by_one)


def _fsdp_dtypes(table: Fsdp1Table | Fsdp2Table, training: Training) -> tuple[str, str]:
    low = "bf16" if training.precision == "fp8" else training.precision
    return table.param_dtype or low, table.reduce_dtype or "fp32"


def _check_replicate(replicate: int, world_size: int) -> None:
    if world_size % replicate:
        raise InputError(f"strategy.replicate: found {replicate}, expected a divisor of {world_size} GPUs")


def _fsdp2(table: Fsdp2Table, training: Training, world_size: int, cluster: Cluster) -> Fsdp2:
    replicate = table.replicate or 1
    _check_replicate(replicate, world_size)
    shard = world_size // replicate
    reshard = table.reshard_after_forward
    group = None if reshard is None or isinstance(reshard, bool) else reshard
    if group is not None and (shard % group or not 1 < group < shard):
        raise InputError(
            f"strategy.reshard_after_forward: found group size {group}, expected a divisor of the {shard} "
            f"ranks that shard, larger than 1 and smaller than {shard}, or true or false"
        )
    param, reduce = _fsdp_dtypes(table, training)
    return Fsdp2(
        reshard, replicate, table.wrapping, param, reduce, table.no_sync, cpu_offload=table.cpu_offload
    )


def _reference(table: ReferenceTable, training: Training, cluster: Cluster) -> tuple[Reference, Cluster]:
    """The reference engine has its own reduce-scatter, which replaces gloo's all-reduce, and AdamW only."""
    if training.optimizer != "adamw":
        raise InputError(
            f"training.optimizer: found '{training.optimizer}', expected 'adamw': the reference engine has "
            "no other"
        )
    if table.parameter_place != "device" and table.stage != 3:
        raise InputError(
            f"strategy.parameter_place: found '{table.parameter_place}' with stage {table.stage}, which "
            "shards no parameters; expected stage 3 or 'device'"
        )
    if table.stage == 0 and table.optimizer_place == "nvme":
        raise InputError("strategy.optimizer_place: found 'nvme' with stage 0, expected stage 1, 2 or 3")
    costs = cluster.collectives
    is_gloo = costs.backend == "gloo"
    if is_gloo:
        cluster = cluster.model_copy(
            update={"collectives": costs.model_copy(update={"reduce_scatter": "native"})}
        )
    low = "bf16" if training.precision == "fp8" else training.precision
    strategy = Reference(
        table.stage,
        table.param_dtype or low,
        table.reduce_dtype,
        table.bucket_bytes,
        table.prefetch,
        table.max_reductions_in_flight,
        table.keep_gathered,
        is_gloo,
        table.optimizer_place,
        table.parameter_place,
    )
    return strategy, cluster


def _fsdp1(table: Fsdp1Table, training: Training, world_size: int, num_nodes: int) -> Fsdp1:
    is_hybrid = "HYBRID" in table.sharding_strategy
    replicate = table.replicate or (num_nodes if is_hybrid else 1)
    if replicate > 1 and not is_hybrid:
        raise InputError(
            f"strategy.replicate: {table.sharding_strategy} has no replicas; expected HYBRID_SHARD or "
            "_HYBRID_SHARD_ZERO2"
        )
    _check_replicate(replicate, world_size)
    param, reduce = _fsdp_dtypes(table, training)
    return Fsdp1(
        table.sharding_strategy,
        replicate,
        table.wrapping,
        table.backward_prefetch,
        table.forward_prefetch,
        table.limit_all_gathers,
        param,
        reduce,
        table.no_sync,
        table.cpu_offload,
        table.before_torch_2,
    )
