"""`[training]` as the framework runs it: the framework's own settings, and the micro-batches of the global
batch.
"""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.fp8.recipe import infer_fp8_precision
from zsim.specs.experiment.kernel_choices import (
    apply_megatron_deepspeed_defaults,
    apply_megatron_defaults,
    limit_device_connections,
)
from zsim.specs.experiment.layout import Layout
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.tables import Experiment, TrainingTable
from zsim.specs.experiment.training.batch import micro_batches_of, uneven_micro_batches, uneven_sequences
from zsim.specs.strategy.megatron_table import MegatronTable


def apply_framework_settings(experiment: Experiment, layout: Layout, sizes: tuple[int, ...]) -> TrainingTable:
    """`[training]` with the settings of the framework's layers.

    `sizes` are the micro-batches by type of nodes, if they differ. Raises InputError for a global batch that
    is not made of the micro-batches.
    """
    full_cluster, placement, parallelism = layout.full_cluster, layout.placement, layout.parallelism
    per_micro_batch = uneven_sequences(sizes, full_cluster, placement) if sizes else None
    training_table = _resolve_micro_batches(experiment, layout.replicas, per_micro_batch)
    if experiment.training.micro_batch_sizes:
        training_table = _apply_first_size(training_table, full_cluster, placement)
    if parallelism.style == "deepspeed" and parallelism.has_megatron_layers:
        training_table = apply_megatron_deepspeed_defaults(training_table)
    if parallelism.style == "megatron" and parallelism.tensor * parallelism.context > 1:
        table = experiment.strategy
        is_fsdp = isinstance(table, MegatronTable) and table.fsdp_sharding is not None
        training_table = (
            training_table if is_fsdp else limit_device_connections(training_table, layout.cluster)
        )
    return training_table


def _resolve_micro_batches(
    experiment: Experiment, replicas: int, per_micro_batch: int | None = None
) -> TrainingTable:
    """`[training]` with the number of micro-batches of its global batch, and with Megatron's defaults under
    Megatron.

    Each of `replicas` has a part of the global batch. `per_micro_batch` is the number of sequences of all
    replicas in one micro-batch, where they differ.
    """
    table, strategy = infer_fp8_precision(experiment.training), experiment.strategy
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
    return apply_megatron_defaults(table, strategy.engine, strategy.version)


def _apply_first_size(table: TrainingTable, cluster: Cluster, placement: Placement) -> TrainingTable:
    """`[training]` with the micro-batch of the first node of the job."""
    name = cluster.nodes[int(cluster.node_type_indices[placement.nodes[0]])].name
    size = table.micro_batch_sizes.get(name, table.micro_batch_size or 1)
    return table.model_copy(update={"micro_batch_size": size})
