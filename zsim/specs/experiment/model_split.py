"""Checks that a model and a batch divide among the ranks of `[parallelism]`."""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.spec import Activation, Attention, Block, ModelSpec
from zsim.specs.strategy.parallelism import FRAMEWORK_NAMES, Parallelism
from zsim.specs.strategy.training import Training


def check_split(model: ModelSpec, training: Training, parallelism: Parallelism) -> None:
    """Raises InputError for heads, widths, tokens or micro-batches that do not divide among the ranks."""
    if parallelism.tensor > 1:
        for block in {id(block): block for block in model.blocks}.values():
            _check_block(block, model, parallelism)
    shards = parallelism.token_shards * (2 if parallelism.context > 1 else 1)
    if training.sequence_length % shards:
        nearest = max(shards, round(training.sequence_length / shards) * shards)
        raise InputError(
            f"training.sequence_length: found {training.sequence_length:,}, which is cut into {shards} equal "
            f"parts (tensor {parallelism.tensor}, context {parallelism.context}); the nearest that divides "
            f"is {nearest:,}"
        )
    steps, passes = training.gradient_accumulation_steps, parallelism.passes
    if steps % passes:
        raise InputError(
            f"parallelism.passes: found {passes}, which does not divide {steps} micro-batches "
            "(training.gradient_accumulation_steps)"
        )


def _check_block(block: Block, model: ModelSpec, parallelism: Parallelism) -> None:
    tensor, name = parallelism.tensor, FRAMEWORK_NAMES[parallelism.style]
    for module in block.modules:
        work = module.work
        if isinstance(work, Attention):
            heads, groups = work.num_heads, work.num_kv_heads
            if parallelism.style == "autotp" and heads % tensor:
                raise NotSimulatedError(
                    f"parallelism.tensor: {heads} heads on {tensor} ranks: DeepSpeed's AutoTP gives the "
                    "first ranks more, which zsim does not simulate"
                )
            _check_divides("heads", heads, tensor, model)
            if parallelism.style == "megatron":
                if groups % tensor and tensor % groups:
                    raise InputError(
                        f"parallelism.tensor: '{model.name}' has {groups} key/value heads, and {name} wants "
                        f"one of {groups} and {tensor} to divide the other; the nearest is "
                        f"{_nearest_divisor(groups, tensor)}"
                    )
            else:
                _check_divides("key/value heads", groups, tensor, model)
        elif isinstance(work, Activation):
            _check_divides("features of the MLP", work.width, tensor, model)


def _check_divides(what: str, count: int, tensor: int, model: ModelSpec) -> None:
    if count % tensor:
        raise InputError(
            f"parallelism.tensor: found {tensor}, which does not divide the {count:,} {what} of "
            f"'{model.name}'; the nearest that does is {_nearest_divisor(count, tensor)}"
        )


def _nearest_divisor(count: int, wanted: int) -> int:
    divisors = [number for number in range(1, min(count, 4 * wanted) + 1) if count % number == 0]
    return min(divisors, key=lambda number: abs(number - wanted))
