"""Blocks that are issued as copies of the block before, against the same blocks walked one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.plan import walk
from zsim.plan.make import make_plan
from zsim.plan.ops import Plan
from zsim.specs.experiment.resolve import resolve

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
# every third block without a window
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 64,
    "sliding_window": 128,
    "sliding_window_pattern": 3,
}
# two dense blocks before those with experts
MIXTURE = LLAMA | {
    "model_type": "qwen2_moe",
    "mlp_only_layers": [0, 1],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def plan_of(model: dict[str, Any], blocks: int, training: dict[str, Any], zero: dict[str, Any]) -> Plan:
    layers = "n_layer" if model is GPT2 else "num_hidden_layers"
    config = {
        "zero_optimization": {"stage": 3, **zero},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.get("gradient_accumulation_steps", 1),
    }
    experiment = zsim.Experiment(
        model={**model, layers: blocks},
        cluster="dgx-h100",
        gpus=8,
        training={"sequence_length": 512, **training},
        strategy={"kind": "deepspeed", "version": "0.19.8", "config": config},
    )
    return make_plan(resolve(experiment))


def walked_plan_of(*asked: Any) -> Plan:
    """The plan without copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Zero3Schedule, "block_position", lambda self, segment: None)
        return plan_of(*asked)


@settings(max_examples=40)
@given(
    model=st.sampled_from([LLAMA, GPT2, GEMMA, MIXTURE]),
    blocks=st.integers(2, 14),
    training=st.fixed_dictionaries(
        {
            "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
            "gradient_accumulation_steps": st.integers(1, 2),
            "checkpoint_every": st.sampled_from([1, 1, 5]),  # else all but every fifth block are recomputed
        }
    ),
    zero=st.fixed_dictionaries(
        {
            "reduce_bucket_size": st.sampled_from([1, 5_000_000, 13_000_000, 500_000_000]),
            "stage3_prefetch_bucket_size": st.sampled_from([0, 1_000_000, 5_000_000, 40_000_000]),
            "stage3_max_live_parameters": st.sampled_from([0, 10_000_000, 20_000_000, 1_000_000_000]),
            "stage3_max_reuse_distance": st.sampled_from([0, 30_000_000, 1_000_000_000]),
            "stage3_param_persistence_threshold": st.sampled_from([0, 10_000, 2_000_000]),
            "overlap_comm": st.booleans(),
            "contiguous_gradients": st.booleans(),
            "memory_efficient_linear": st.booleans(),
        }
    ),
)
def test_copied_blocks_are_those_that_a_walk_issues(
    model: dict[str, Any], blocks: int, training: dict[str, Any], zero: dict[str, Any]
) -> None:
    asked = model, blocks, training, zero
    (program,), (walked,) = plan_of(*asked).programs, walked_plan_of(*asked).programs
    assert program.ops == walked.ops
    assert program.memory == walked.memory
    assert len(program.unique_work) == len(walked.unique_work)


def test_a_deep_model_is_walked_at_its_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 blocks, recomputed in backward. A fetch looks ahead by no more parameters than a block has, and
    every gradient is reduced by itself, so that blocks begin alike from the third on, in forward from the
    fourth, as the first gathers that were joined are still those that a stream waited for last."""
    copied: list[int] = []
    copy = walk._copy

    def counted(*arguments: Any) -> None:
        copied.append(arguments[-1])
        copy(*arguments)

    monkeypatch.setattr(walk, "_copy", counted)
    zero = {
        "stage3_prefetch_bucket_size": 1_000_000, "stage3_max_live_parameters": 10_000_000,
        "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1,
    }  # fmt: skip
    asked = LLAMA, 40, {"activation_checkpointing": "full"}, zero
    (program,), (walked,) = plan_of(*asked).programs, walked_plan_of(*asked).programs
    assert program == walked
    assert copied == [35, 36]  # forward, backward
