"""Keys of config.json, changed one at a time: a sample of validation/models/config_keys.py, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from validation.models import config_keys
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.huggingface import model_from_config

TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
VISION = {"hidden_size": 64, "num_heads": 4, "depth": 2, "out_hidden_size": 64}


@pytest.mark.parametrize("model_type", ["minicpm3", "phi", "exaone", "zamba2", "internvl", "umt5", "whisper"])
def test_every_changed_key_changes_as_many_parameters_as_in_transformers(model_type: str) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install zsim[capture]")
    pytest.importorskip("transformers", reason="needs transformers: pip install zsim[transformers]")
    if config_keys.class_of(model_type) is None:
        pytest.skip(f"this release of transformers has no {model_type}")
    assert [str(difference) for difference in config_keys.differences(model_type)] == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "helium", "head_dim": 32}, "64 features"),
        ({"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 6}, "ratio"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
        ({"model_type": "zamba2", "layer_types": ["hybrid"] * 2, "tie_word_embeddings": False}, "tie_word"),
        ({"model_type": "qwen3_vl", "vision_config": {**VISION, "in_channels": 1}}, "in_channels"),
        (
            {"model_type": "qwen3_vl", "vision_config": {**VISION, "out_hidden_size": None}},
            "left out.* 3,584",
        ),
        ({"model_type": "gemma3", "vision_config": None}, r"model\.text_only = true"),
        ({"model_type": "paligemma", "vision_config": {"vision_use_head": False}}, "projection_dim"),
    ],
)
def test_what_no_model_of_the_class_can_have_is_refused_by_its_key(config: dict[str, Any], key: str) -> None:
    values = {**config, "text_config": TEXT} if "vision_config" in config else {**TEXT, **config}
    with pytest.raises(InputError, match=key):
        model_from_config(values, "tiny", "config.json")


@pytest.mark.parametrize(
    "model_type", ["qwen4_exp", "qwen4_exp_text", "inkling_mm_model", "inkling_text", "kimi_k3"]
)
def test_a_type_of_this_year_without_a_plan_is_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(NotSimulatedError, match=f"'{model_type}' is not simulated: its "):
        model_from_config({"model_type": model_type, **TEXT}, "tiny", "config.json")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"model_type": "kimi_linear", "routed_expert_hidden_size": 32}, "routed_expert_hidden_size"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}, "EagleLlamaForCausalLM"),
        ({"model_type": "llama", "architectures": ["MedusaModel"]}, "MedusaModel"),
    ],
)
def test_a_model_that_bears_the_type_of_another_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    """Kimi K3's language model says kimi_linear, and draft models say the type of their blocks."""
    with pytest.raises(NotSimulatedError, match=name):
        model_from_config({**TEXT, **values}, "tiny", "config.json")


def test_eagle_2_5_vl_sees_images_and_drafts_nothing() -> None:
    """NVIDIA's vision model shares a name with the drafts. Its language model is a Qwen2."""
    text = {**TEXT, "model_type": "qwen2"}
    names = ["Eagle2_5_VLForConditionalGeneration"]
    parts = {"text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
    config = {"model_type": "eagle_2_5_vl", "architectures": names, **parts}
    with pytest.raises(NotSimulatedError, match=r"has vision_config .* asked for by model.text_only = true"):
        model_from_config(config, "tiny", "config.json")
    alone = model_from_config({**config, "text_only": True}, "tiny", "config.json")
    assert alone.numel == model_from_config(text, "tiny", "config.json").numel


def test_a_null_of_mpts_keys_is_as_left_out() -> None:
    config = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 96}
    null = {**config, "expansion_ratio": None, "attn_config": {"kv_n_heads": None}}
    plain = model_from_config(config, "tiny", "config.json")
    assert model_from_config(null, "tiny", "config.json").numel == plain.numel


def test_a_head_of_values_is_as_wide_as_the_heads_of_the_model_in_minicpm3() -> None:
    """64 / 4: an output's product of 4 x 16 features to 64."""
    config = {**TEXT, "model_type": "minicpm3", "v_head_dim": None}
    block = model_from_config(config, "tiny", "config.json").blocks[0]
    product = next(module for module in block.modules if module.name == "self_attn.o_proj")
    assert product.parameters[0].shape == (64, 64)


def test_an_absent_tower_of_gemma_4_is_not_there_and_that_of_llava_has_the_sizes_of_its_class() -> None:
    gemma = {"model_type": "gemma4", "text_config": {**TEXT, "num_hidden_layers": 6}}
    assert model_from_config(gemma, "tiny", "config.json").towers == ()
    tower = model_from_config({"model_type": "llava", "text_config": TEXT}, "tiny", "c.json").vision_tower
    assert tower is not None
    assert (tower.hidden_size, len(tower.blocks)) == (1024, 24)
