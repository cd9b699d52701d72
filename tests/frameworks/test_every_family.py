"""Every family of models under every framework: its plan is made, or it is refused by name.

`refused_families.toml` has the families that a setting refuses, by words of the reason.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zsim import Experiment, make_plan
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.huggingface import load_model, model_from_config
from zsim.specs.model.multimodal import MULTIMODAL_FAMILIES
from zsim.specs.model.spec import ModelSpec
from zsim.specs.presets import model_preset_names

HERE = Path(__file__).parent
REFUSED = tomllib.loads((HERE / "refused_families.toml").read_text())
COUNTED = json.loads((HERE.parent / "specs" / "decoder_counts.json").read_text())["models"]
TEXT = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 64,
}  # fmt: skip
VISION = {
    "image_size": 896, "patch_size": 14, "vision_use_head": False, "out_hidden_size": 512,
    "projection_dim": 512, "output_proj_dims": 3840, "projection_hidden_size": 1152,
}  # fmt: skip
ODD_HEADS = ("smollm2-135m", "smollm2-360m", "smolvlm-256m", "smolvlm-500m", "falcon-7b")
ONE_KEY_HEAD = ("gemma-2b", "gemma3-1b", "gemma-4-e2b")

MEGATRON: dict[str, Any] = {"strategy": {"kind": "megatron"}}
ZERO: dict[str, Any] = {"strategy": {"kind": "deepspeed", "stage": 3}}
FSDP: dict[str, Any] = {"strategy": {"kind": "fsdp2"}}
DDP: dict[str, Any] = {"strategy": {"kind": "ddp"}}
LORA = {"training": {"lora": {"rank": 8, "targets": "all-linear"}}}
FULL = {"training": {"activation_checkpointing": "full"}}
TENSOR, CONTEXT = {"parallelism": {"tensor": 2}}, {"parallelism": {"context": 2}}
SEQUENCE = {"parallelism": {"tensor": 2, "sequence_parallel": True}}
STAGES = {"parallelism": {"pipeline": 2}, "training": {"gradient_accumulation_steps": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": DDP,
    "fsdp2": FSDP,
    "fsdp2, lora": FSDP | LORA,
    "fsdp2, full": FSDP | FULL,
    "fsdp2, tensor": FSDP | TENSOR,
    "fsdp2, context": FSDP | CONTEXT,
    "deepspeed": ZERO,
    "deepspeed, lora": ZERO | LORA,
    "deepspeed, tensor": {"strategy": {"kind": "deepspeed", "stage": 1}} | TENSOR,
    "deepspeed, context": ZERO | CONTEXT,
    "megatron": MEGATRON,
    "megatron, lora": MEGATRON | LORA,
    "megatron, full": MEGATRON | FULL,
    "megatron, tensor": MEGATRON | SEQUENCE,
    "megatron, context": MEGATRON | CONTEXT,
    "megatron, pipeline": MEGATRON | STAGES,
}


def _models() -> dict[str, ModelSpec]:
    """The smallest preset of each family, and a small model of those without one."""
    smallest: dict[str, ModelSpec] = {}
    for name in model_preset_names():
        model = load_model(name)
        known = smallest.get(model.family)
        is_smaller = known is None or model.numel < known.numel
        if name not in ODD_HEADS + ONE_KEY_HEAD and is_smaller:
            smallest[model.family] = model
    for entry in COUNTED:
        family = entry["config"]["model_type"]
        if family not in smallest:
            smallest[family] = model_from_config(entry["config"], family, "config.json")
    for family in MULTIMODAL_FAMILIES:
        if family not in smallest:
            parts = {"audio_config": {"output_dim": 512}, "vision_config": VISION}
            builders = MULTIMODAL_FAMILIES[family].builders
            config = {"model_type": family, "text_config": TEXT, **{key: parts[key] for key in builders}}
            smallest[family] = model_from_config(config, family, "config.json")
    return smallest


def _few_blocks(model: ModelSpec) -> ModelSpec:
    """The model with two blocks of each kind, where no name says which block is which."""
    has_lenders = any(module.lender for block in model.unique_blocks for module in block.modules)
    if model.block_names or model.registration or has_lenders:
        return model
    return replace(model, blocks=model.unique_blocks * 2)


MODELS = _models()


def outcome(model: ModelSpec, settings: dict[str, Any]) -> str:
    """Empty for a plan, else the reason why there is none."""
    training = {"sequence_length": min(512, model.learned_positions or 512), **settings.get("training", {})}
    rest = {**settings, "training": training}
    try:
        make_plan(Experiment(model=model, cluster="dgx-h100", nodes=1, **rest))
    except (InputError, NotSimulatedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", MODELS)
def test_a_family_has_a_plan_or_is_refused_by_name(family: str) -> None:
    model = _few_blocks(MODELS[family])
    expected = {
        setting: words
        for words, settings in REFUSED.items()
        for setting, families in settings.items()
        if family in families
    }
    outcomes = {setting: outcome(model, values) for setting, values in SETTINGS.items()}
    assert {setting for setting, reason in outcomes.items() if reason} == set(expected)
    for setting, words in expected.items():
        assert words in outcomes[setting]


def test_the_table_names_families_and_settings_that_exist() -> None:
    listed: dict[str, set[str]] = defaultdict(set)
    for settings in REFUSED.values():
        for setting, families in settings.items():
            listed[setting] |= set(families)
    assert set(listed) <= set(SETTINGS)
    assert set().union(*listed.values()) <= set(MODELS)
