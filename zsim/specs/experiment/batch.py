"""Sequences per step: `training.global_batch_size`."""

from __future__ import annotations

from math import ceil

from zsim.errors import InputError
from zsim.specs.strategy.training import Training


def micro_batches_of(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches per step, the last of which may be smaller."""
    return max(1, ceil(global_batch_size / world_size / micro_batch_size))


def sequences_of(global_batch_size: int | None, training: Training, world_size: int) -> float | None:
    """Sequences that one rank trains on per step if they are not a whole number of micro-batches; else None.

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
