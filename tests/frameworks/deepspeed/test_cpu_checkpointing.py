"""`cpu_checkpointing` is the engine's affair, whatever shards the states: blocks' inputs wait in host memory.

Llama-3.2-1B, 16 blocks, 1,024 tokens of 2,048 features in bf16: 4 MiB a block.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.plan.ops import Copy, Plan

INPUT = 1024 * 2048 * 2


def plan_of(stage: int, version: str, **zero: Any) -> Plan:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
    }
    training = {"sequence_length": 1024, "micro_batch_size": 1, "activation_checkpointing": "full"}
    return zsim.make_plan(
        zsim.Experiment(
            model="llama-3.2-1b",
            cluster="dgx-h100",
            training=training | {"gradient_accumulation_steps": 2},
            strategy={"kind": "deepspeed", "version": version, "config": config},
        )
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("version", "blocks"), [("0.19.8", 15), ("0.19.5", 16)])
def test_every_stage_sends_checkpoints_away_and_brings_them_back(
    stage: int, version: str, blocks: int
) -> None:
    """In both micro-batches; from 0.19.6 on the newest of each stays on the GPU."""
    plan = plan_of(stage, version)
    works = [op.work for op in plan.ops if op.name.startswith("checkpoint of")]
    crossed = Counter[str]()
    for work in works:
        assert isinstance(work, Copy)
        crossed[work.direction] += work.bytes
    assert crossed == {"d2h": 2 * blocks * INPUT, "h2d": 2 * blocks * INPUT}
    held: Counter[tuple[str, str]] = Counter()
    for change in plan.memory:
        held[change.category, change.device] += change.bytes
    assert not any(held.values())
