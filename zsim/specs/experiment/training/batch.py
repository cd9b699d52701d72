"""Sequences per step: `training.global_batch_size`, and micro-batches that differ by type of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from zsim.arrays import distinct
from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.placement import Placement
from zsim.specs.strategy.parallelism import Parallelism
from zsim.specs.strategy.training import Training


def micro_batches_of(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches per step, the last of which may be smaller."""
    return max(1, ceil(global_batch_size / world_size / micro_batch_size))


def sequences_of(global_batch_size: int | None, training: Training, world_size: int) -> float | None:
    """Sequences that one rank trains on per step, if they are not a whole number of micro-batches. Else None.

    Raises InputError if `global_batch_size` needs another number of micro-batches than `training` has, or
    leaves ranks without a sequence.
    """
    if global_batch_size is None:
        return None
    size, steps = training.micro_batch_size, training.gradient_accumulation_steps
    whole, sequences = size * steps, global_batch_size / world_size
    if sequences == whole:
        return None
    if sequences < 1:
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,} sequences for {world_size:,} GPUs; "
            f"expected at least {world_size:,}, one for each of them"
        )
    if not whole - size < sequences <= whole:
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,} sequences for {world_size:,} GPUs with "
            f"{steps:,} micro-batches of {size:,}; expected {whole * world_size:,}, or more than "
            f"{(whole - size) * world_size:,}, so that the last micro-batch is smaller"
        )
    return sequences


_UNEVEN = ("ddp", "fsdp1", "fsdp2")
_EVEN = {
    "deepspeed": "DeepSpeed has one train_micro_batch_size_per_gpu, and asserts that its batch is that times "
    "the number of GPUs",
    "megatron": "Megatron has one --micro-batch-size, which shapes all its messages",
    "reference": "the reference engine runs the same step on every rank",
}


def micro_batch_sizes_of(
    asked: Mapping[str, int],
    other: int,
    kind: str,
    parallelism: Parallelism,
    cluster: Cluster,
    placement: Placement,
) -> tuple[int, ...]:
    """The sequences in a micro-batch by type of the cluster's nodes, or () if all are equal.

    It is `default_size` where `requested` names no size. Raises InputError for types that the cluster does
    not have, and for strategies whose ranks cannot differ.
    """
    key = "training.micro_batch_sizes"
    names = [one.name for one in cluster.nodes]
    for name in asked:
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
    sizes = tuple(asked.get(name, other) for name in names)
    used = distinct(cluster.type_of_node[list(placement.nodes)]) if names else []
    if len({sizes[number] for number in used}) < 2:
        return ()
    if kind not in _UNEVEN:
        why = _EVEN.get(kind, f"strategy '{kind}' has one")
        raise InputError(
            f"{key}: found several sizes with strategy '{kind}': {why}; expected one size, or strategy "
            "'fsdp2', 'fsdp1' or 'ddp', whose ranks may differ"
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
    each = np.array(sizes)[cluster.type_of_node[list(placement.nodes)]]
    return int((each * np.array(placement.gpus)).sum())


def uneven_micro_batches(global_batch_size: int, sequences: int) -> int:
    """Micro-batches in a step if all ranks combined have `sequences` in one.

    Raises InputError if the batch is not a whole number of them.
    """
    if global_batch_size % sequences:
        below = global_batch_size // sequences * sequences
        near = f"{below:,} or {below + sequences:,}" if below else f"{sequences:,}"
        raise InputError(
            f"training.global_batch_size: found {global_batch_size:,}, but one micro-batch of all ranks has "
            f"{sequences:,} sequences (training.micro_batch_sizes); expected a multiple, like {near}"
        )
    return global_batch_size // sequences
