"""The shipped models and topologies are found by name."""

from __future__ import annotations

import json
import tomllib

import pytest

from zsim.errors import InputError
from zsim.files import PRESETS
from zsim.specs.model.families import decoders
from zsim.specs.model.huggingface import FAMILIES, load_model
from zsim.specs.model.multimodal import MULTIMODAL_FAMILIES
from zsim.specs.presets import (
    gpu_preset_path,
    model_preset_names,
    model_preset_path,
    server_of_gpu,
    topology_preset_names,
    topology_preset_path,
)


def test_the_promised_models_are_there() -> None:
    """Names that people will type."""
    promised = {
        "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b",
        "llama-3.1-405b", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-3-175b", "gpt-neox-20b",
        "mistral-7b", "mixtral-8x7b", "qwen2-7b", "qwen3-8b", "qwen3-30b-a3b", "falcon-7b", "falcon-40b",
        "mpt-7b", "mpt-30b", "bloom-7b1", "bloom-176b", "opt-6.7b", "opt-175b", "gemma2-9b", "phi3-mini",
        "deepseek-v3",
    }  # fmt: skip
    assert promised <= set(model_preset_names())


@pytest.mark.parametrize("name", model_preset_names())
def test_every_preset_loads_and_names_its_source(name: str) -> None:
    """A model of a known family, with a sentence about where the numbers come from."""
    assert len(json.loads(model_preset_path(name).read_text())["_source"]) > 20
    model = load_model(name)
    assert model.name == name
    assert model.numel > 0


def test_every_family_has_a_preset() -> None:
    """So that each is exercised by name, but for those of the table of decoders, Megatron's own, which is
    that of a command line, and some whose files are those of others, or are not known to the last number.
    """
    without = {"megatron", "bamba", "falcon_h1", "lfm2_moe", "lfm3", "xlm-roberta", "camembert", "rwkv7_fla"}
    without |= {"mt5", "umt5", "minimax_m3", "mllama_text_model"}
    without |= {"gemma4_unified_text", "lara_mini", *decoders.names()}
    models = [load_model(name) for name in model_preset_names()]
    text_of_others = {name for name in FAMILIES if "_vl_" in name or "_omni_" in name}
    assert {model.family for model in models if model.vision_tower is None} >= (
        set(FAMILIES) - without - text_of_others
    )
    assert {model.family for model in models if model.vision_tower is not None} < set(MULTIMODAL_FAMILIES)


def test_an_unknown_model_gets_the_nearest_name_and_a_short_list() -> None:
    """`llama3-70b` is a slip of `llama-3-70b`."""
    with pytest.raises(InputError) as refused:
        model_preset_path("llama3-70b")
    assert "unknown model 'llama3-70b'; did you mean 'llama-3-70b'?" in str(refused.value)
    assert "a path to a config.json" in str(refused.value)


@pytest.mark.parametrize("name", ["../models/gpt2", "", "models/gpt2", ".."])
def test_a_path_is_not_a_preset_name(name: str) -> None:
    """Names stay inside the folder."""
    with pytest.raises(InputError):
        model_preset_path(name)


def test_topologies_and_gpus_are_found_by_name() -> None:
    """The cluster of the README, and its GPU's file."""
    assert "dgx-h100" in topology_preset_names()
    assert topology_preset_path("dgx-h100").suffix == ".toml"
    with pytest.raises(InputError, match="unknown cluster 'dgx-h10'; did you mean 'dgx-h100'"):
        topology_preset_path("dgx-h10")
    with pytest.raises(InputError, match="unknown GPU 'no-such-gpu'"):
        gpu_preset_path("no-such-gpu")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("a100", "dgx-a100-40gb"),
        ("v100", "dgx-1"),
        ("dgx-h200", "hgx-h200"),
        ("MI250", "mi300x-x8"),
        ("gaudi", "gaudi2-x8"),
        ("p5.48xlarge", "aws-p5"),
        ("a3-highgpu-8g", "dgx-h100"),
        ("Standard_ND96isr_H100_v5", "azure-ndv5"),
    ],
)
def test_a_name_that_people_use_proposes_a_machine_of_its_kind(name: str, near: str) -> None:
    with pytest.raises(InputError, match=f"^unknown cluster '{name}'; the nearest machine is '{near}'"):
        topology_preset_path(name)


def test_every_machine_that_is_proposed_for_an_absent_processor_exists() -> None:
    content = tomllib.loads((PRESETS / "near_machines.toml").read_text())
    assert {name for names in content.values() for name in names} <= set(topology_preset_names())
    assert all(name.isalnum() and name == name.lower() for name in content)


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("h100", "dgx-h100"),
        ("H100-SXM", "dgx-h100"),
        ("H200", "hgx-h200"),
        ("a100-80gb", "dgx-a100-80gb"),
        ("a6000", "rtx-a6000-x8"),
        ("RTX 4090", "rtx-4090-x8"),
        ("3090", "rtx-3090-x8"),
        ("gb200", "gb200-nvl72"),
        ("mi300x", "mi300x-x8"),
        ("T4", "aws-g4dn"),
        ("a100", None),
        ("v100", None),
        ("mi250", None),
        ("dgx-h200", None),
        ("x8", None),
    ],
)
def test_a_gpu_stands_for_its_usual_server(name: str, server: str | None) -> None:
    """An A100 has 40 or 80 GB, and V100s are in six presets."""
    assert server_of_gpu(name) == server
    if server is not None:
        assert topology_preset_path(name).stem == server
