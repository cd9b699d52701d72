"""The micro-batches of a training whose documents differ in length."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from zsim.errors import NotSimulatedError
from zsim.specs.experiment.data.draw import BatchPlan, draw_lengths
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.model.spec import Attention, Linear, ModelSpec
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.parallelism import Parallelism
from zsim.specs.strategy.tables import DdpTable, Fsdp1Table, Fsdp2Table, ReferenceTable, StrategyTable
from zsim.specs.strategy.training import Training

_EVERY_MICRO_BATCH = 2  # the stage of ZeRO from which on gradients are reduced in every micro-batch


def with_lengths(
    training: Training,
    table: LengthsTable,
    model: ModelSpec,
    strategy: StrategyTable,
    parallelism: Parallelism,
    replicas: int,
    deepspeed: DeepSpeedConfig | None = None,
    exchanging: int = 1,
) -> Training:
    """The training with sequences of the slowest rank's length; `deepspeed`: the strategy, if it is
    DeepSpeed's; `exchanging`: ranks that share the experts of a layer.

    Raises InputError for a table that names no lengths, NotSimulatedError for documents kept apart by
    attention that does not, or that several ranks share.
    """
    is_apart = table.batching == "packed" and table.attention_by_document
    if is_apart and parallelism.context > 1:
        raise NotSimulatedError(
            f"training.lengths: attention by document is not simulated with parallelism.context = "
            f"{parallelism.context}; expected context = 1, or attention_by_document = false"
        )
    if is_apart and training.attention == "math":
        raise NotSimulatedError(
            "training.lengths: attention 'math' computes all pairs whatever its mask; expected attention "
            "'flash', or attention_by_document = false"
        )
    often = _meets_often(strategy, deepspeed)
    plan = BatchPlan(
        replicas,
        training.gradient_accumulation_steps,
        training.micro_batch_size,
        training.sequence_length,
        meeting=replicas if often else max(1, exchanging // (parallelism.tensor * parallelism.context)),
    )
    multiple = parallelism.token_shards * (2 if parallelism.context > 1 else 1)
    if training.precision == "fp8":
        multiple = lcm(multiple, training.fp8.multiple * parallelism.context)
    drawn = draw_lengths(table, plan, *_flops(model), multiple)
    return replace(training, sequence_length=drawn.length, lengths=drawn)


def _flops(model: ModelSpec) -> tuple[float, float]:
    """FLOPs of a token in the blocks' products, forward and backward, and of a pair of tokens in attention:
    of 4 d, the mask leaves half, and backward is two and a half times forward."""
    products = pairs = 0.0
    for block in model.blocks:
        for module in block.modules:
            work = module.work
            if isinstance(work, Linear):
                products += 6.0 * work.in_features * work.out_features
            elif isinstance(work, Attention):
                pairs += 3.5 * work.num_heads * (work.qk_head_dim + work.v_head_dim)
    return products, pairs


def _meets_often(strategy: StrategyTable, deepspeed: DeepSpeedConfig | None) -> bool:
    """Whether ranks wait for one another in every micro-batch: they gather parameters or reduce gradients
    there."""
    if deepspeed is not None:
        return deepspeed.stage >= _EVERY_MICRO_BATCH
    if isinstance(strategy, ReferenceTable):
        return strategy.stage >= _EVERY_MICRO_BATCH
    if isinstance(strategy, DdpTable):
        return not strategy.no_sync
    return isinstance(strategy, Fsdp1Table | Fsdp2Table)
