"""The micro-batches of a training whose documents differ in length."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from zsim.errors import NotSimulatedError
from zsim.specs.experiment.data.draw import BatchPlan, draw_lengths
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.model.spec import Attention, Linear, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import TrainingConfig


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
    if is_by_document and parallelism.context > 1:
        raise NotSimulatedError(
            f"training.lengths: attention by document is not simulated with parallelism.context = "
            f"{parallelism.context}; expected context = 1, or attention_by_document = false"
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
