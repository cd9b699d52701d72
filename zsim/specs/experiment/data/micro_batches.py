"""The micro-batches of a training whose documents differ in length."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from zsim.errors import NotSimulatedError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.frameworks.reference.settings import ReferenceTable
from zsim.specs.experiment.data.draw import BatchPlan, draw_lengths
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.model.spec import Attention, Linear, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import TrainingConfig

_GRADIENT_SHARDING_STAGE = 2  # the stage of ZeRO from which on gradients are reduced in every micro-batch


def apply_lengths(
    training: TrainingConfig,
    table: LengthsTable,
    model: ModelSpec,
    strategy: StrategyTable,
    parallelism: ParallelismConfig,
    replicas: int,
    nodes: int = 1,
    deepspeed: DeepSpeedConfig | None = None,
    expert_ranks: int = 1,
) -> TrainingConfig:
    """The training with sequences of the slowest rank's length.

    `nodes` is the job's number of nodes. `deepspeed` is the strategy if it is DeepSpeed's. `expert_ranks` is
    the number of ranks that share the experts of a layer.

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
    replicas_per_expert_group = expert_ranks // (parallelism.tensor * parallelism.context)
    plan = BatchPlan(
        replicas,
        training.gradient_accumulation_steps,
        training.micro_batch_size,
        training.sequence_length,
        sync_group_size=max(
            _sync_group_size(strategy, deepspeed, replicas, nodes), replicas_per_expert_group
        ),
    )
    multiple = parallelism.token_shards * (2 if parallelism.context > 1 else 1)
    if training.precision == "fp8":
        multiple = lcm(multiple, training.fp8.dimension_multiple * parallelism.context)
    drawn_lengths = draw_lengths(table, plan, *_flops(model), multiple)
    return replace(training, sequence_length=drawn_lengths.length, lengths=drawn_lengths)


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
    return products, pairs


def _sync_group_size(
    strategy: StrategyTable, deepspeed: DeepSpeedConfig | None, replicas: int, nodes: int
) -> int:
    """The number of consecutive replicas that wait for one another in every micro-batch.

    They are those that gather parameters or reduce gradients there.

    # [Note: FSDP's no_sync]
    Gradients stay whole until the last micro-batch, and nothing synchronizes the replicas of the sharded
    group before. The group's own ranks still gather parameters in every micro-batch, except where FSDP1 keeps
    them gathered (torch 2.13 `_runtime_utils._should_free_in_backward`: without a reduction only strategies
    that reshard after forward free them).
    """
    if deepspeed is not None:
        return replicas if deepspeed.stage >= _GRADIENT_SHARDING_STAGE else 1
    if isinstance(strategy, ReferenceTable):
        return replicas if strategy.stage >= _GRADIENT_SHARDING_STAGE else 1
    if isinstance(strategy, DdpTable):
        return 1 if strategy.no_sync else replicas
    if isinstance(strategy, MegatronTable):
        shards_gradients = strategy.fsdp_sharding in ("optim_grads", "optim_grads_params")
        return max(1, replicas // strategy.optimizer_instances) if shards_gradients else 1
    if not isinstance(strategy, Fsdp1Table | Fsdp2Table):
        return 1
    if not strategy.no_sync:
        return replicas
    default = 1
    if isinstance(strategy, Fsdp1Table):
        if strategy.sharding_strategy not in ("FULL_SHARD", "HYBRID_SHARD"):
            return 1
        default = nodes if strategy.sharding_strategy == "HYBRID_SHARD" else 1
    return max(1, replicas // (strategy.replicate or default))
