"""The block `activation_checkpointing` is the engine's affair, whatever shards the states.

Llama-3.2-1B, 16 blocks, 1,024 tokens of 2,048 features in bf16: inputs of 4 MiB, of which each of two
tensor-parallel ranks keeps 2 MiB.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Copy, Plan

INPUT, BLOCKS, MICRO_BATCHES = 1024 * 2048 * 2, 16, 2
PARTITIONED = {"partition_activations": True}
CONTIGUOUS = {**PARTITIONED, "contiguous_memory_optimization": True, "number_checkpoints": 20}


def experiment(
    block: dict[str, Any], stage: int = 1, version: str = "0.19.8", tensor: int = 1, **zero: Any
) -> zsim.Experiment:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
        "activation_checkpointing": block,
        "tensor_parallel": {"autotp_size": tensor},
    }
    training = {"sequence_length": 1024, "micro_batch_size": 1, "activation_checkpointing": "full"}
    return zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        training=training | {"gradient_accumulation_steps": MICRO_BATCHES},
        strategy={"kind": "deepspeed", "version": version, "config": config},
    )


def copies_of(plan: Plan) -> Counter[str]:
    """Bytes of checkpoints that cross PCIe, by direction."""
    crossed = Counter[str]()
    for op in plan.ops:
        if op.name.startswith("checkpoint of") and isinstance(op.work, Copy):
            crossed[op.work.direction] += op.work.bytes
    return crossed


def gathered(plan: Plan) -> list[int]:
    """The full bytes of every gather of a checkpoint."""
    return [
        op.work.bytes
        for op in plan.ops
        if op.name.startswith("all_gather checkpoint") and isinstance(op.work, Collective)
    ]


def checkpoint_levels(plan: Plan, device: str) -> dict[str, int]:
    """Bytes of activations that wait on a device between forward and backward of the first micro-batch, by
    owner."""
    first = next(number for number, op in enumerate(plan.ops) if op.phase == "backward")
    levels = Counter[str]()
    for change in plan.memory:
        if change.op < first and change.category == "activations" and change.device == device:
            levels[change.owner] += change.bytes
    return {owner: size for owner, size in levels.items() if size}


def ends_empty(plan: Plan) -> bool:
    held: Counter[tuple[str, str]] = Counter()
    for change in plan.memory:
        held[change.category, change.device] += change.bytes
    live = {change.tensor for change in tensor_changes(plan.program) if change.bytes}
    freed = {change.tensor for change in tensor_changes(plan.program) if not change.bytes}
    return not any(held.values()) and live == freed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("version", "blocks"), [("0.19.8", 15), ("0.19.5", 16)])
def test_every_stage_sends_checkpoints_away_and_brings_them_back(
    stage: int, version: str, blocks: int
) -> None:
    """In both micro-batches; from 0.19.6 on the newest of each stays on the GPU."""
    plan = zsim.make_plan(experiment({"cpu_checkpointing": True}, stage, version))
    size = MICRO_BATCHES * blocks * INPUT
    assert copies_of(plan) == {"d2h": size, "h2d": size}
    assert ends_empty(plan)


def test_partitioned_checkpoints_never_go_by_the_stream_of_their_own() -> None:
    """`_get_cpu_offload_engine` is None with them: all 16 cross, in pageable copies."""
    plan = zsim.make_plan(experiment({"cpu_checkpointing": True, **PARTITIONED}))
    size = MICRO_BATCHES * BLOCKS * INPUT
    assert copies_of(plan) == {"d2h": size, "h2d": size}
    copies = [op.work for op in plan.ops if op.name.startswith("checkpoint of")]
    assert not any(work.is_pinned for work in copies if isinstance(work, Copy))
    assert ends_empty(plan)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_ranks_keep_their_parts_and_gather_the_whole_again(stage: int) -> None:
    plan = zsim.make_plan(experiment(PARTITIONED, stage, tensor=2))
    assert gathered(plan) == [INPUT] * (MICRO_BATCHES * BLOCKS)
    parts = {owner: size for owner, size in checkpoint_levels(plan, "gpu").items() if "checkpoint" in owner}
    assert parts == {f"model.layers.{block} checkpoint": INPUT // 2 for block in range(BLOCKS)}
    assert ends_empty(plan)


def test_without_tensor_ranks_a_clone_is_all_that_is_left() -> None:
    plan = zsim.make_plan(experiment(PARTITIONED))
    assert gathered(plan) == []
    clones = [op for op in plan.ops if op.name.startswith("part of checkpoint")]
    assert len(clones) == MICRO_BATCHES * BLOCKS
    assert sum(checkpoint_levels(plan, "gpu")[f"model.layers.{block} checkpoint"] for block in range(16)) == (
        BLOCKS * INPUT
    )
    assert ends_empty(plan)


@pytest.mark.parametrize("device", ["gpu", "host"])
def test_contiguous_buffers_are_there_for_all_layers_and_go_one_by_one(device: str) -> None:
    """20 buffers of 2 MiB, though 16 are used. The first layer of backward drops the other four."""
    block = {**CONTIGUOUS, "cpu_checkpointing": device == "host"}
    plan = zsim.make_plan(experiment(block, tensor=2))
    assert checkpoint_levels(plan, device)["contiguous checkpoints"] == 20 * INPUT // 2
    backwards = [op for op in plan.ops if op.name.startswith("all_gather checkpoint")]
    assert len(backwards) == MICRO_BATCHES * BLOCKS
    frees = [
        change.bytes
        for change in plan.memory
        if change.owner == "contiguous checkpoints" and change.bytes < 0 and change.device == device
    ]
    assert frees == ([-4 * INPUT // 2] + [-INPUT // 2] * BLOCKS) * MICRO_BATCHES
    assert ends_empty(plan)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"contiguous_memory_optimization": True, "number_checkpoints": 16},
            "contiguous_memory_optimization: found true without partition_activations",
        ),
        ({**PARTITIONED, "contiguous_memory_optimization": True}, "number_checkpoints: missing"),
        ({**CONTIGUOUS, "number_checkpoints": 15}, "found 15, and the model has 16 checkpointed layers"),
    ],
)
def test_what_deepspeed_refuses_or_fails_at_is_an_error(block: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        zsim.make_plan(experiment(block))


def test_boundaries_that_synchronize_make_the_host_wait_around_every_layer() -> None:
    """Before and after forward, before and after backward: four waits a layer."""
    plan = zsim.make_plan(experiment({"synchronize_checkpoint_boundary": True}))
    waits = [op for op in plan.ops if op.name.startswith("synchronized at checkpoint")]
    assert len(waits) == 4 * MICRO_BATCHES * BLOCKS
    assert all(op.host_waits for op in waits)
