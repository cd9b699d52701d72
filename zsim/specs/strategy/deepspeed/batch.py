"""The batch-size triangle: two of three numbers give the third."""

from __future__ import annotations

import math

from zsim.errors import InputError
from zsim.specs.strategy.deepspeed.config import BatchSizes

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


def resolve_batch(
    where: str,
    *,
    world_size: int,
    train_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
) -> BatchSizes:
    """`train_batch_size = micro_batch_size x gradient_accumulation_steps x world_size`, in sequences.

    Missing values follow DeepSpeed: two numbers give the third, and one alone means one accumulation step.
    `where` begins the message of an error.

    Raises InputError for a value below 1, if neither of the first two is given, and if the product does not
    hold.
    """
    assert world_size >= 1
    train, micro, steps = train_batch_size, micro_batch_size, gradient_accumulation_steps
    for key, value in ((_TRAIN, train), (_MICRO, micro), (_STEPS, steps)):
        if value is not None and value < 1:
            raise InputError(f"{where}: {key}: found {value}, expected at least 1")
    if train is None and micro is None:
        raise InputError(
            f"{where}: {_MICRO}: missing; give it, or {_TRAIN}, here or as [training] micro_batch_size"
        )
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * world_size, micro, steps)
    factors = [(key, value) for key, value in ((_MICRO, micro), (_STEPS, steps)) if value is not None]
    if micro is None:
        steps = steps or 1
        micro = train // (world_size * steps)
    elif steps is None:
        steps = train // (micro * world_size)
    if train != micro * steps * world_size:
        raise InputError(f"{where}: {_TRAIN}: found {train}, {_describe_expected(factors, world_size)}")
    return BatchSizes(train, micro, steps)


def _describe_expected(factors: list[tuple[str, int]], world_size: int) -> str:
    product = math.prod(value for _, value in factors) * world_size
    terms = " x ".join([f"{key} {value}" for key, value in factors] + [f"{world_size} GPUs"])
    if len(factors) == 2:
        return f"expected {terms} = {product}"
    missing = [key for key in (_MICRO, _STEPS) if key not in dict(factors)]
    follows = f"{missing[0]} follows" if factors else f"{_MICRO} follows, {_STEPS} is 1"
    return f"expected a multiple of {terms} = {product} ({follows})"
