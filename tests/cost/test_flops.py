"""FLOPs in the conventions that people quote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cost.flops import (
    active_numel,
    attention_flops_per_token,
    hardware_flops_per_token,
    model_flops_per_token,
)
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.spec import Embedding, ModelSpec
from zsim.specs.strategy.training import Checkpointing


def forward_flops_per_token(model: ModelSpec, length: int) -> float:
    """The sum over all modules."""
    blocks = [module for block in model.blocks for module in block.modules]
    return sum(module.forward_flops(length) for module in (*model.before, *blocks, *model.after))


def formula_flops_per_token(model: ModelSpec, length: int) -> float:
    """2 (P - P_emb - P_pos) + 4 S A L: P is every parameter, biases and norms included, tied weights once;
    P_emb the token embedding where it is not tied (a tied one is the head's matrix); P_pos the positions."""
    tables = [module for module in model.before if isinstance(module.op_spec, Embedding)]
    uncounted = sum(table.numel for table in tables[1 if model.is_tied else 0 :])
    return 2.0 * (active_numel(model) - uncounted) + attention_flops_per_token(model, length)


def test_the_sum_over_modules_is_what_flop_counter_mode_counts() -> None:
    """GPT-2 at S = 1024, products only: blocks 12 * 2 * 12 * 768^2 + head 2 * 768 * 50257 + attention
    12 * 4 * 1024 * 768 = 169,869,312 + 77,194,752 + 37,748,736. torch's FlopCounterMode says the same."""
    assert forward_flops_per_token(load_model("gpt2"), 1024) == 169_869_312 + 77_194_752 + 37_748_736


@pytest.mark.parametrize(
    ("name", "length", "tolerance"),
    [("llama-2-7b", 2048, 1e-4), ("llama-3-8b", 8192, 1e-4), ("gpt2", 1024, 1e-2), ("opt-6.7b", 2048, 1e-3)],
)
def test_the_formula_agrees_with_the_sum_but_for_biases_and_norms(
    name: str, length: int, tolerance: float
) -> None:
    """Measured against FlopCounterMode: 4e-5 for Llama, below 1e-2 for GPT-2."""
    model = load_model(name)
    ratio = formula_flops_per_token(model, length) / forward_flops_per_token(model, length)
    assert 0 < ratio - 1 < tolerance


def test_model_flops_follow_the_mfu_convention() -> None:
    """Llama-3-70B at S = 8192: 6 * 70,553,706,496 + 12 * 80 * 8192 * 8192."""
    expected = 6 * 70_553_706_496 + 12 * 80 * 8192 * 8192
    assert model_flops_per_token(load_model("llama-3-70b"), 8192) == expected


def test_heads_need_not_add_up_to_the_hidden_size() -> None:
    """d is heads * head_dim: 4 heads of 32 on hidden 64 give attention 12 * S * 128 per layer."""
    config = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32,
    }  # fmt: skip
    model = model_from_config(config, "tiny", "tiny.json")
    assert model_flops_per_token(model, 10) - model_flops_per_token(model, 0) == 12 * 10 * 128


def test_recomputation_adds_to_the_hardware_flops_only() -> None:
    """GPT-3 175B at S = 2048: full adds 2 * 96 * 1,812,099,072 + 4 * 96 * 12288 * 2048, selective only
    the latter."""
    model = load_model("gpt-3-175b")
    attention = 4 * 96 * 12288 * 2048
    base = model_flops_per_token(model, 2048)
    assert hardware_flops_per_token(model, 2048) == base
    assert hardware_flops_per_token(model, 2048, ["selective"] * 96) == base + attention
    full = hardware_flops_per_token(model, 2048, ["full"] * 96)
    assert full == base + attention + 2 * 96 * 1_812_099_072
    half = hardware_flops_per_token(model, 2048, ["full", "none"] * 48)
    assert half == base + attention / 2 + 96 * 1_812_099_072


@pytest.mark.parametrize(
    ("name", "modules", "again"),
    [
        ("llama-3-8b", ["mlp", "layernorm"], 32 * 2 * 3 * 4096 * 14336),
        ("llama-3-8b", ["moe", "shared_experts"], 0),
        # 8 of 256 experts, a shared one and the gate behind 3 dense layers
        ("deepseek-v3", ["moe"], 58 * 2 * (9 * 3 * 7168 * 2048 + 7168 * 256)),
        ("deepseek-v3", ["shared_experts"], 58 * 2 * 3 * 7168 * 2048),
        ("deepseek-v3", ["mlp"], 3 * 2 * 3 * 7168 * 18432),
        ("deepseek-v3", ["mla_up_proj"], 61 * 2 * (1536 * 128 * 192 + 512 * 128 * 256)),
    ],
)
def test_modules_that_run_again_add_their_products(name: str, modules: list[str], again: int) -> None:
    model = load_model(name)
    policies: list[Checkpointing] = ["none"] * len(model.blocks)
    base = model_flops_per_token(model, 64)
    assert hardware_flops_per_token(model, 64, policies, modules) - base == pytest.approx(again)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # 2 of 8 experts of 3 * 4096 * 14336 in 32 layers
        ("mixtral-8x7b", 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336),
        # 8 of 128 experts of 3 * 2048 * 768 in 48 layers
        ("qwen3-30b-a3b", 30_532_122_624 - 48 * 120 * 3 * 2048 * 768),
        ("llama-2-7b", 6_738_415_616),
    ],
)
def test_only_active_experts_compute(name: str, active: int) -> None:
    """Total less the experts a token is not routed to."""
    assert active_numel(load_model(name)) == active


def test_keys_and_values_of_a_sounds_rows_count_once_a_row() -> None:
    """Whisper small, 256 tokens to 1,500 rows: 12 layers with two products of 768 x 768 and a bias."""
    model = load_model("whisper-small")
    decoder = replace(model, towers=())
    once = 6.0 * decoder.trainable_numel + 3.0 * attention_flops_per_token(decoder, 256)
    oftener = 6.0 * 12 * (2 * 768 * 768 + 768) * (1500 / 256 - 1)
    assert model_flops_per_token(model, 256) == pytest.approx(once + oftener)
    assert attention_flops_per_token(decoder, 256) == 12 * 4.0 * 768 * (256 + 1500)
