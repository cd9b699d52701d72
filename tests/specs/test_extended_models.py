"""A model that is a preset with a few keys of its own: `[model] extends = "llama-3-8b"`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve

HALF = {"extends": "llama-3-8b", "num_hidden_layers": 16}
# A block of Llama 3 8B: q and o of 4096 x 4096, k and v of 4096 x 1024, an MLP of 14336, two norms.
BLOCK = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
WHOLE = 8_030_261_248


def experiment(model: object) -> zsim.Experiment:
    return build_experiment({"model": model, "cluster": "dgx-h100"}, {}, origin="test")


def test_a_table_extends_a_preset() -> None:
    assert resolve(experiment("llama-3-8b")).model.numel == WHOLE
    assert resolve(experiment(HALF)).model.numel == WHOLE - 16 * BLOCK


def test_it_is_the_preset_that_a_setting_changed() -> None:
    changed = build_experiment(
        {"model": "llama-3-8b", "cluster": "dgx-h100"}, {"model.num_hidden_layers": 16}, origin="test"
    )
    assert resolve(experiment(HALF)).model == resolve(changed).model


def test_a_setting_changes_it_further() -> None:
    job = resolve(
        build_experiment(
            {"model": HALF, "cluster": "dgx-h100"}, {"model.num_hidden_layers": 8}, origin="test"
        )
    )
    assert job.model.numel == WHOLE - 24 * BLOCK


def test_python_takes_it_and_gives_the_whole_config(tmp_path: Path) -> None:
    built = zsim.Experiment(model=HALF, cluster="dgx-h100")
    assert isinstance(built.model, dict)
    assert built.model["num_hidden_layers"] == 16
    assert built.model["hidden_size"] == 4096


def test_a_path_is_of_the_file_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "e.toml").write_text(
        'cluster = "dgx-h100"\n[model]\nextends = "config.json"\nnum_hidden_layers = 3\n'
    )
    assert len(resolve(load_experiment(folder / "e.toml")).model.blocks) == 3


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"extends": "llama-3-8b", "num_hiden_layers": 16},
            "num_hiden_layers.*did you mean 'num_hidden_layers'",
        ),
        ({"extends": "llama-3-8bb"}, "llama-3-8bb"),
        ({"extends": 3}, "extends: found 3"),
        ({"preset": "llama-3-8b", "num_hidden_layers": 16}, "extends"),
    ],
)
def test_what_it_cannot_extend_is_said(model: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        resolve(experiment(model))
