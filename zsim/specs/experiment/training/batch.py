"""Sequences per step: `training.global_batch_size`, micro-batches that differ by type of nodes, and the tiles
of a micro-batch's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from zsim.arrays import unique
from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.training.framework_training import kinds_where, training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig

_TILES = "training.mlp_tiles"


def micro_batches_of(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches per step, the last of which may be smaller."""
    return max(1, ceil(global_batch_size / world_size / micro_batch_size))


def sequences_of(global_batch_size: int | None, training: TrainingConfig, world_size: int) -> float | None:
    """Sequences that one rank trains on per step, if they are not a whole number of micro-batches. Else None.

    Raises InputError if `global_batch_size` needs another number of micro-batches than `training` has, or
    leaves ranks without a sequence.
    """
    if global_batch_size is None:
        return None
    size, steps = training.micro_batch_size, training.gradient_accumulation_steps
    full_batch, sequences = size * steps, global_batch_size / world_size
    if sequences == full_batch:
        return None
    if sequences < 1:
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,} sequences for {world_size:,} GPUs; "
            f"expected at least {world_size:,}, one for each of them"
        )
    if not full_batch - size < sequences <= full_batch:
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,} sequences for {world_size:,} GPUs with "
            f"{steps:,} micro-batches of {size:,}; expected {full_batch * world_size:,}, or more than "
            f"{(full_batch - size) * world_size:,}, so that the last micro-batch is smaller"
        )
    return sequences


def micro_batch_sizes_of(
    requested: Mapping[str, int],
    default_size: int,
    kind: str,
    parallelism: ParallelismConfig,
    cluster: Cluster,
    placement: Placement,
) -> tuple[int, ...]:
    """The sequences in a micro-batch by type of the cluster's nodes, or () if all are equal.

    It is `default_size` where `requested` names no size. Raises InputError for types that the cluster does
    not have, and for strategies whose ranks cannot differ.
    """
    key = "training.micro_batch_sizes"
    names = [node_type.name for node_type in cluster.nodes]
    for name in requested:
        if not names:
            raise InputError(
                f"{key}: found a size for '{name}', but all nodes of cluster '{cluster.name}' are alike; set "
                "training.micro_batch_size, or give the cluster several types of nodes"
            )
        if name not in names:
            raise InputError(
                f"{key}: unknown type of nodes '{name}'{did_you_mean(name, names)}; cluster '{cluster.name}' "
                f"has {', '.join(dict.fromkeys(names))}"
            )
    sizes = tuple(requested.get(name, default_size) for name in names)
    used_types = unique(cluster.node_type_indices[list(placement.nodes)]) if names else []
    if len({sizes[number] for number in used_types}) < 2:
        return ()
    framework = training_of(kind)
    if not framework.has_uneven_batches:
        reason = framework.even_batch_reason or f"strategy '{kind}' has one"
        first, *others = kinds_where(lambda candidate: candidate.has_uneven_batches)
        newer = ", ".join(f"'{name}'" for name in reversed(others))
        raise InputError(
            f"{key}: found several sizes with strategy '{kind}': {reason}; expected one size, or strategy "
            f"{newer} or '{first}', whose ranks may differ"
        )
    if not parallelism.is_trivial:
        raise InputError(
            f"{key}: found several sizes with model parallelism, whose ranks train on the same "
            "micro-batches; "
            "expected one size, or data parallelism alone"
        )
    return sizes


def uneven_sequences(sizes: Sequence[int], cluster: Cluster, placement: Placement) -> int:
    """Sequences in one micro-batch of all ranks, `sizes` by type of nodes."""
    node_sizes = np.array(sizes)[cluster.node_type_indices[list(placement.nodes)]]
    return int((node_sizes * np.array(placement.gpus)).sum())


def uneven_micro_batches(global_batch_size: int, sequences: int) -> int:
    """Micro-batches in a step if all ranks combined have `sequences` in one.

    Raises InputError if the batch is not a whole number of them.
    """
    if global_batch_size % sequences:
        lower_multiple = global_batch_size // sequences * sequences
        suggestions = (
            f"{lower_multiple:,} or {lower_multiple + sequences:,}" if lower_multiple else f"{sequences:,}"
        )
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,}, but one micro-batch of all ranks has "
            f"{sequences:,} sequences (training.micro_batch_sizes); expected a multiple, like {suggestions}"
        )
    return global_batch_size // sequences


def resolve_mlp_tiles(
    table: TrainingTable,
    training: TrainingConfig,
    model: ModelSpec,
    kind: str,
    parallelism: ParallelismConfig,
) -> int:
    """The number of tiles: s / h of a rank's s tokens of a sequence and the model's h features, rounded up,
    where it is "auto" (`tiled_mlp_forward_common`, ArcticTraining b28638e6 model/tiled_compute.py).

    Raises InputError for more tiles than tokens and for a framework with layers of its own, NotSimulatedError
    beside tensor parallelism.
    """
    if table.mlp_tiles is None:
        return 1
    if not training_of(kind).tiles_mlps:
        kinds = ", ".join(kinds_where(lambda framework: framework.tiles_mlps))
        raise InputError(
            f"{_TILES}: found {table.mlp_tiles!r} with strategy '{kind}', whose layers are its own; expected "
            f"it left out, or strategy {kinds}"
        )
    if parallelism.tensor > 1:
        raise NotSimulatedError(
            f"{_TILES}: not simulated with tensor parallelism; expected parallelism.tensor = 1, or it left "
            "out"
        )
    tokens = training.sequence_length // parallelism.context
    if table.mlp_tiles == "auto":
        return max(1, -(-tokens // model.hidden_size))
    if table.mlp_tiles > tokens:
        raise InputError(
            f"{_TILES}: found {table.mlp_tiles:,}, expected at most the {tokens:,} tokens that a rank has of "
            "a sequence"
        )
    return table.mlp_tiles
