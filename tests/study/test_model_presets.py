"""The models that ship with zsim: sizes, kinds and what published runs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zsim.cli import app
from zsim.commands.reference import presets
from zsim.errors import InputError
from zsim.study.presets import model_preset, model_presets


def test_every_row_fits_a_terminal_of_80_columns() -> None:
    found = model_presets()
    assert max(len(one.row()) for one in found) <= 80
    assert max(len(line) for one in found for text in one.details() for line in text.splitlines()) < 80


def test_kinds_of_models() -> None:
    names = ("llama-3-8b", "rwkv7-1.5b", "mixtral-8x7b", "bert-large", "t5-3b")
    kinds = {name: model_preset(name).kind for name in names}
    assert kinds == {
        "llama-3-8b": "dense",
        "rwkv7-1.5b": "dense",
        "mixtral-8x7b": "MoE",
        "bert-large": "encoder",
        "t5-3b": "enc-dec",
    }


def test_runs_are_those_of_models_of_as_many_parameters() -> None:
    """Command R7B has 0.03 % fewer parameters than Llama 3 8B, whose runs are not its own."""
    assert model_preset("llama-3-8b").validated_runs > 0
    assert model_preset("command-r7b").validated_error is None


def test_details_say_what_is_counted_apart() -> None:
    lines = list(model_preset("deepseek-v3").details())
    assert "  active       37,552,282,624 for one token" in lines
    assert "  besides      11,610,067,968 for multi-token prediction (`mtp_layers`)" in lines


def test_json_has_models_and_clusters(tmp_path: Path) -> None:
    path = tmp_path / "presets.json"
    presets(json_=path)
    written = json.loads(path.read_text())
    assert {"bert-base", "llama-3-8b"} <= {model["name"] for model in written["models"]}
    assert "dgx-h100" in written["clusters"]


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'llama-2-70b'"):
        presets("llama-2-70")


def test_a_clusters_name_shows_the_cluster() -> None:
    said = CliRunner().invoke(app, ["presets", "dgx-h100"])
    assert said.exit_code == 0
    assert "node      8 GPUs h100-sxm-80gb\n" in said.output
    assert "network   single-switch (data sheet): " in said.output
    assert "`zsim topology show dgx-h100`" in said.output
