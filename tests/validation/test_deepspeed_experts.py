"""zsim's plans of routed experts against the calls that real DeepSpeed made; DeepSpeed itself is not needed.

`traces/deepspeed/experts.json` was recorded on CPU ranks by `python -m validation.deepspeed_calls.experts`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from validation.cases.cases import ANY_CLUSTER
from validation.deepspeed_calls.experts import (
    CASES,
    EXPERTS,
    LENGTH,
    SHAPE,
    TOP_K,
    with_sorted_gathers,
)
from zsim.comparison.plan_check import calls_of_plan

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "traces" / "deepspeed" / "experts.json").read_text()
)["cases"]
MODEL = {
    "model_type": "mixtral", "hidden_size": SHAPE.hidden_size, "intermediate_size": SHAPE.intermediate_size,
    "num_hidden_layers": SHAPE.num_hidden_layers, "num_attention_heads": SHAPE.num_attention_heads,
    "num_key_value_heads": SHAPE.num_key_value_heads, "vocab_size": SHAPE.vocab_size,
    "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "max_position_embeddings": 64,
}  # fmt: skip


def plan_of(name: str) -> zsim.Plan:
    layer, ranks, micro_batches, keys = CASES[name]
    config = {"gradient_accumulation_steps": micro_batches, **keys}
    if layer == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": ranks, "use_grouped_mm": False}
    training: dict[str, Any] = {"sequence_length": LENGTH, "micro_batch_size": 1, "attention": "math"}
    parallelism: dict[str, Any] = {} if layer == "autoep" else {"expert": ranks}
    parallelism["expert_imbalance"] = 1.0
    if layer == "moe-dropless":  # every token goes to the first two experts
        parallelism["expert_imbalance"] = (1, 1, *(0,) * (EXPERTS - 2))
        training["frozen"] = ["model.layers.*.mlp.gate.weight"]
    experiment = zsim.Experiment(
        model=MODEL,
        cluster=ANY_CLUSTER,
        gpus=4,
        training=training | ({} if "bf16" in keys else {"precision": "fp32"}),
        parallelism=parallelism,
        strategy={"kind": "deepspeed", "config": config, "drops_tokens": layer != "moe-dropless"},
    )
    return zsim.make_plan(experiment)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_makes_the_calls_that_deepspeed_made(name: str) -> None:
    """Kind, bytes, type, ranks and order of every call of a steady step, but for calls of one rank by itself
    and for the order of the gathers of one fetch."""
    ours = [list(call.wire) for call in calls_of_plan(plan_of(name)) if call.group_size > 1]
    theirs = [call for call in RECORDED[name] if call[3] > 1]
    assert with_sorted_gathers(ours) == with_sorted_gathers(theirs)
