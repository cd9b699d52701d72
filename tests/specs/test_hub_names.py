"""Models are found by the names that people use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.specs.model import hub_names
from zsim.specs.model.hub_names import preset_of_folder
from zsim.specs.model.huggingface import load_model, model_from_config, read_model_config
from zsim.specs.presets import model_preset_names, model_preset_path

PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-2-27b-it": 27_227_128_320,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "01-ai/Yi-1.5-34B-Chat": 34_388_917_248,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "google/gemma-7b-it": 8_537_680_896,
    "microsoft/phi-2": 2_779_683_840,
    "codellama/CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
}
"""Totals of the model pages."""


@pytest.mark.parametrize("hub_id", PARAMETERS)
def test_a_hub_id_is_a_preset_with_the_parameters_of_its_page(hub_id: str) -> None:
    assert load_model(hub_id).numel == PARAMETERS[hub_id]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("QWEN2.5-7b-instruct", "qwen2.5-7b"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama-3.2-1b"),
        ("NousResearch/Meta-Llama-3-8B", "llama-3-8b"),
        ("gemma-2-9b-it", "gemma2-9b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama-3.1-405b"),
        ("casperhansen/llama-3-70b-fp16", "llama-3-70b"),
    ],
)
def test_capitals_copies_and_tuned_checkpoints_are_the_model_of_their_shape(name: str, preset: str) -> None:
    assert read_model_config(name) == read_model_config(preset)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B-VL", "meta-llama/Llama-3.1-80B", "models/llama/llama-2-7b"]
)
def test_another_name_is_no_preset(name: str) -> None:
    """Neither another size, nor an ending that names another model, nor a path."""
    assert hub_names.preset_of(name) is None


def test_no_hub_id_belongs_to_two_presets() -> None:
    ids = [
        hub_id
        for name in model_preset_names()
        for hub_id in json.loads(model_preset_path(name).read_text()).get("_hub", ())
    ]
    assert len({hub_id.lower() for hub_id in ids}) == len(ids)


def test_a_model_of_the_local_hub_cache_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the commit that `refs/main` names, whatever other snapshots lie beside it."""
    repository = tmp_path / "models--lab--tiny"
    config = {**json.loads(model_preset_path("llama-3.2-1b").read_text()), "num_hidden_layers": 2}
    for commit, layers in (("a1", 2), ("b2", 3)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = load_model("lab/tiny")
    assert (model.name, len(model.blocks)) == ("tiny", 2)


def test_an_unknown_hub_id_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError) as refused:
        load_model("lab/none")
    for words in ("no preset has this Hub id", "local Hub cache", "hf download lab/none config.json"):
        assert words in str(refused.value)


def test_a_multimodal_model_is_refused_with_the_name_of_its_language_model() -> None:
    """The text part is asked for by name and never taken in silence."""
    with pytest.raises(InputError, match=r"towers besides its language model.* preset 'gemma3-12b'"):
        load_model("google/gemma-3-12b-it")
    with pytest.raises(InputError, match=r"towers besides its language model.* preset 'qwen3.5-9b'"):
        load_model("Qwen/Qwen3.5-9B")
    model = load_model("Qwen/Qwen3.6-27B")
    assert model.vision_tower is not None
    assert model.numel - model.vision_tower.numel == load_model("qwen3.5-27b").numel


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl", "llama5"])
def test_no_other_architecture_is_proposed_for_an_unknown_one(model_type: str) -> None:
    with pytest.raises(InputError) as refused:
        model_from_config({"model_type": model_type, "vocab_size": 8}, "m", "m.json")
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("${HOME}/verl/models/Qwen3-8B", "qwen3-8b"),
        ("/data/models/Qwen/Qwen2.5-7B-Instruct/", "qwen2.5-7b"),
        ("$HDFS_ROOT/model/nothing-known", None),
        ("Qwen/Qwen3-8B", None),  # a Hub id, not a folder
    ],
)
def test_a_folder_of_another_machine_is_named_for_its_model(path: str, preset: str | None) -> None:
    assert preset_of_folder(path) == preset
