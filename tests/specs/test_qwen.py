"""Qwen of 2023, whose code lies beside its weights."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.specs.model.huggingface import model_from_config

CONFIG: dict[str, Any] = {
    "model_type": "qwen",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "kv_channels": 128,
    "no_bias": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
LARGER = {
    "hidden_size": 8192,
    "intermediate_size": 49152,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("changes", "numel"),
    [({}, 7_721_324_544), (LARGER, 72_287_920_128)],
    ids=["7B", "72B"],
)
def test_its_parameters_are_the_published_ones(changes: dict[str, Any], numel: int) -> None:
    """7B: two embeddings of 151,936 x 4,096; in each of 32 layers 12,288 x 4,096 with a bias and 4,096 x
    4,096 of attention, three of 4,096 x 11,008 in the MLP and two norms; the last norm."""
    assert model_from_config({**CONFIG, **changes}, "qwen", "config.json").numel == numel


def test_a_block_has_five_products() -> None:
    """One for q, k and v: PEFT adapts five linear layers of a block, not Qwen 2's seven."""
    block = model_from_config(CONFIG, "qwen", "config.json").blocks[0]
    products = [module.name for module in block.modules if type(module.op_spec).__name__ == "Linear"]
    assert products == ["attn.c_attn", "attn.c_proj", "mlp.w1", "mlp.w2", "mlp.c_proj"]
