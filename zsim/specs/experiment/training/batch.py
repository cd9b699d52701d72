"""Sequences per step: `training.global_batch_size`, micro-batches that differ by type of nodes, and the tiles
of a micro-batch's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, lcm

import numpy as np

from zsim.arrays import unique
from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.data.draw import BatchPlan, draw_lengths
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.placement import Placement
from zsim.specs.experiment.training.framework_training import kinds_where, training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import Attention, Linear, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
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
            "micro-batches; expected one size, or data parallelism alone"
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


def apply_lengths(
    training: TrainingConfig,
    table: LengthsTable,
    model: ModelSpec,
    strategy: StrategyTable,
    parallelism: ParallelismConfig,
    replicas: int,
    nodes: int = 1,
    config: StrategyConfig | None = None,
    expert_ranks: int = 1,
) -> TrainingConfig:
    """The training with sequences of the slowest rank's length.

    `nodes` is the job's number of nodes. `config` is that of `FrameworkTraining`. `expert_ranks` is the
    number of ranks that share the experts of a layer.

    Raises InputError for a table that names no lengths. Raises NotSimulatedError for attention by document
    where the attention does not support it, or where several ranks share a sequence.
    """
    is_by_document = table.batching == "packed" and table.attention_by_document
    is_ring = parallelism.style.context_library == "te" and parallelism.ring_hops == parallelism.context
    if is_by_document and parallelism.context > 1 and not is_ring:
        raise NotSimulatedError(
            f"training.lengths: attention by document is not simulated with parallelism.context = "
            f"{parallelism.context} but by Transformer Engine's ring; expected context = 1, or "
            "attention_by_document = false"
        )
    if is_by_document and training.attention == "math":
        raise NotSimulatedError(
            "training.lengths: attention 'math' computes all pairs whatever its mask; expected attention "
            "'flash', or attention_by_document = false"
        )
    plan = batch_plan(training, strategy, parallelism, replicas, nodes, config, expert_ranks)
    multiple = parallelism.token_shards * (2 if parallelism.context > 1 else 1)
    if training.precision == "fp8":
        multiple = lcm(multiple, training.fp8.dimension_multiple * parallelism.context)
    drawn_lengths = draw_lengths(table, plan, *_flops(model), multiple)
    return replace(training, sequence_length=drawn_lengths.length, lengths=drawn_lengths)


def batch_plan(
    training: TrainingConfig,
    strategy: StrategyTable,
    parallelism: ParallelismConfig,
    replicas: int,
    nodes: int,
    config: StrategyConfig | None,
    expert_ranks: int,
) -> BatchPlan:
    """A step's micro-batches, and the replicas that wait for one another in each."""
    sync_group_size = training_of(strategy.kind).synchronized_replicas(strategy, config, replicas, nodes)
    replicas_per_expert_group = expert_ranks // (parallelism.tensor * parallelism.context)
    return BatchPlan(
        replicas,
        training.gradient_accumulation_steps,
        training.micro_batch_size,
        training.sequence_length,
        sync_group_size=max(sync_group_size, replicas_per_expert_group),
    )


def _flops(model: ModelSpec) -> tuple[float, float]:
    """FLOPs of a token in the blocks' products, and of a pair of tokens in attention, forward and backward.

    The causal mask leaves half of attention's 4 d per pair, and backward takes two and a half times as many
    as forward.
    """
    products = pairs = 0.0
    for block in model.blocks:
        for module in block.modules:
            work = module.op_spec
            if isinstance(work, Linear):
                products += 6.0 * work.in_features * work.out_features
            elif isinstance(work, Attention):
                pairs += 3.5 * work.num_heads * (work.qk_head_dim + work.v_head_dim)
            elif work.mixer_title:
                products += module.training_flops(1)
    return products, pairs
