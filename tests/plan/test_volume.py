"""Bytes that one rank sends and receives per step, in units of the parameters (2 bytes each).

An all-reduce moves every element twice (it is a reduce-scatter and an all-gather), an all-gather, a
reduce-scatter and a reduce once; the factor (n-1)/n is left out, as in the ZeRO paper (1910.02054, sec. 7).
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.ops import Collective, Plan

MOVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "reduce": 1}
GPUS = 64


def volume(plan: Plan) -> dict[str, float]:
    """Elements moved per kind of collective."""
    totals = dict.fromkeys(MOVES, 0.0)
    for op in plan.ops:
        if isinstance(op.work, Collective):
            totals[op.work.kind] += MOVES[op.work.kind] * op.work.bytes / DTYPE_BYTES[op.work.dtype]
    return totals


def plan_of(model: str = "llama-2-7b", checkpointing: str = "none", **strategy: Any) -> tuple[Plan, int]:
    experiment = zsim.Experiment(
        model=model,
        cluster="dgx-h100",
        gpus=GPUS,
        training={"sequence_length": 1024, "activation_checkpointing": checkpointing, "gradient_clipping": 0},
        strategy=strategy,
    )
    from zsim.specs.experiment.resolve import resolve

    return zsim.make_plan(experiment), resolve(experiment).model.numel


def relative(model: str = "llama-2-7b", checkpointing: str = "none", **strategy: Any) -> float:
    plan, numel = plan_of(model, checkpointing, **strategy)
    return sum(volume(plan).values()) / numel


def deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
    }
    return {"config": config}


@pytest.mark.parametrize("is_distributed", [False, True])
def test_megatron_moves_twice_the_parameters(is_distributed: bool) -> None:
    """An all-reduce, or a scatter and a gather: 2 either way, in elements. Llama-2-7B pads nothing."""
    assert relative(kind="megatron", distributed_optimizer=is_distributed) == pytest.approx(2, rel=1e-6)


def test_data_parallelism_moves_twice_the_parameters() -> None:
    """One all-reduce of every gradient: 2."""
    assert relative(kind="ddp") == pytest.approx(2, rel=1e-6)
    assert relative(**deepspeed(0)) == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_two_when_every_owner_gets_only_its_slice(stage: int) -> None:
    """Gradients reduced to their owners (1) and one all-gather of the updated parameters (1)."""
    assert relative(**deepspeed(stage, use_multi_rank_bucket_allreduce=False)) == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_three_by_default(stage: int) -> None:
    """DeepSpeed all-reduces the buckets (2) and then gathers (1): use_multi_rank_bucket_allreduce."""
    assert relative(**deepspeed(stage)) == pytest.approx(3, rel=1e-6)


def test_stage_3_moves_three_when_nothing_is_kept() -> None:
    """Gathered in forward (1), again in backward (1), gradients reduce-scattered (1)."""
    strategy = deepspeed(
        3, stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0
    )
    assert relative(**strategy) == pytest.approx(3, rel=1e-4)


def test_stage_3_moves_less_than_three_by_default() -> None:
    """Where forward turns into backward, what is used again within 1e9 elements is not let go, and small
    parameters are gathered once: 7B parameters save some 1e9 of their second gathering, about 1/7."""
    assert 2.8 < relative(**deepspeed(3)) < 2.9


def test_stage_3_moves_more_than_three_when_recomputing_large_blocks() -> None:
    """A block of GPT-3 has 1.8e9 elements, more than the reuse distance: its first modules are gathered for
    forward, for recomputation and for backward."""
    value = relative("gpt-3-175b", "full", **deepspeed(3))
    assert 3.3 < value < 4


def test_stage_3_recomputes_small_blocks_from_what_it_kept() -> None:
    """Llama-2-7B's blocks have 0.2e9 elements: recomputation and backward share one gathering."""
    assert relative("llama-2-7b", "full", **deepspeed(3)) < 3


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fsdp2_gathers_root_and_last_block_once(checkpointing: str) -> None:
    """2 (root + last) + 3 others, with the last block kept and checkpoints inside the units."""
    plan, numel = plan_of("llama-2-7b", checkpointing, kind="fsdp2", wrapping="torchtitan-0.1")
    root, block = 262_148_096, 202_383_360
    expected = 2 * (root + block) + 3 * 31 * block
    assert numel == root + 32 * block
    assert sum(volume(plan).values()) == pytest.approx(expected, rel=1e-6)


def test_fsdp2_without_resharding_moves_two() -> None:
    assert relative(kind="fsdp2", reshard_after_forward=False) == pytest.approx(2, rel=1e-5)


def test_hsdp_gathers_inside_the_node_and_reduces_shards_across() -> None:
    """8 replicas of 8: 3 as in FSDP inside, and an all-reduce of one eighth: 2/8."""
    plan, numel = plan_of(kind="fsdp2", replicate=8, wrapping="huggingface")
    moved = volume(plan)
    assert moved["all_reduce"] / numel == pytest.approx(2 / 8, rel=1e-6)
    groups = {op.work.group for op in plan.ops if isinstance(op.work, Collective)}
    assert groups == {"shard", "replicate"}


def test_accumulation_sends_what_each_stage_must() -> None:
    """4 micro-batches: stage 1 reduces once; stage 2 reduces every time; stage 3 gathers and reduces every
    time."""

    def accumulated(stage: int) -> float:
        strategy = deepspeed(stage)
        strategy["config"]["gradient_accumulation_steps"] = 4
        return relative(**strategy)

    assert accumulated(1) == pytest.approx(3, rel=1e-6)
    assert accumulated(2) == pytest.approx(2 * 4 + 1, rel=1e-6)
    assert accumulated(3) == pytest.approx(4 * relative(**deepspeed(3)), rel=1e-3)
