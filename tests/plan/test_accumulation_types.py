"""Gradients are kept between micro-batches in the type that the framework sums them in; bf16 weights that are
rounded stochastically take no more room."""

from __future__ import annotations

from typing import Any

import pytest

import zsim

# Two blocks of 4 * 256^2 + 3 * 256 * 512 + 2 * 256, a norm of 256, twice 1,024 * 256.
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
NUMEL = 2 * (4 * 256**2 + 3 * 256 * 512 + 512) + 256 + 2 * 1024 * 256


def gradient_bytes(strategy: dict[str, Any], **training: Any) -> int:
    experiment = zsim.Experiment(
        model=MODEL, cluster="dgx-h100", nodes=1, strategy=strategy,
        training={
            "sequence_length": 128, "gradient_accumulation_steps": 2, "precision": "bf16", **training,
        },
    )  # fmt: skip
    found = zsim.simulate(experiment).report.to_dict()["peak_bytes"]["gpu"]["gradients"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_zero_keeps_its_eighth_of_the_gradients_in_the_type_it_sums_in(
    stage: int, dtype: str, size: int
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": dtype},
        "zero_optimization": {"stage": stage},
    }
    assert gradient_bytes({"kind": "deepspeed", "config": config}) == size * NUMEL // 8


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2 + 4), ("fp32", 4)])
def test_megatron_sums_in_its_buffer_and_updates_in_fp32(dtype: str, size: int) -> None:
    """A buffer in bf16 is copied to fp32 for the update, beside it."""
    assert gradient_bytes({"kind": "megatron", "grad_reduce_dtype": dtype}) == size * NUMEL


@pytest.mark.parametrize("rounds", [False, True])
def test_stochastic_rounding_keeps_bf16_gradients_of_bf16_weights(rounds: bool) -> None:
    training = {
        "optimizer": "adamw-8bit-torchao",
        "stored_dtype": "bf16",
        "stochastic_rounding": rounds,
    }
    assert gradient_bytes({"kind": "fsdp1"}, **training) == 2 * NUMEL // 8
