"""Another model in an experiment: [training] stays, and what the model cannot do is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.commands.options import ExperimentOptions
from zsim.errors import InputError
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.ui.form import make_form

FILE = """
model = "llama-3-70b"
cluster = "hgx-h200"
nodes = 16
[training]
sequence_length = 8192
activation_checkpointing = "full"
[strategy]
kind = "deepspeed"
stage = 3
"""
STAYS = (
    "'{}' in place of 'llama-3-70b', with the same [training]: sequence_length 8192, "
    "activation_checkpointing full"
)


def ways(folder: Path, model: str) -> dict[str, Experiment]:
    """The example with another model: with a file, without one, and on the page."""
    path = folder / "mine.toml"
    path.write_text(FILE)
    form = make_form(load_experiment(path))
    return {
        "a file": ExperimentOptions(path, model).load(),
        "the example": ExperimentOptions(model=model).load(),
        "--set": ExperimentOptions(path, set_=[f"model={model}"]).load(),
        "the page": form.experiment({**form.initial, "model": model}),
    }


def test_how_it_trains_stays_and_is_said_wherever_the_model_is_changed(tmp_path: Path) -> None:
    for way, experiment in ways(tmp_path, "llama-3-8b").items():
        assert experiment.training.sequence_length == 8192, way
        assert experiment.training.activation_checkpointing == "full", way
        assert STAYS.format("llama-3-8b") in resolve(experiment).notes, way


def test_a_sequence_beyond_learned_positions_becomes_them_and_that_is_said(tmp_path: Path) -> None:
    """GPT-2's positions are a table of 1,024 rows."""
    for way, experiment in ways(tmp_path, "gpt2").items():
        assert experiment.training.sequence_length == 1024, way
        notes = resolve(experiment).notes
        assert "sequence_length 8192 becomes 1024: 'gpt2' has no more learned positions" in notes, way
        assert any("with the same [training]: activation_checkpointing full" in note for note in notes), way


def test_a_length_that_is_asked_for_with_the_model_is_not_changed() -> None:
    asked = ExperimentOptions(model="gpt2", set_=["training.sequence_length=4096"]).load()
    with pytest.raises(InputError, match=r"found 4096, but 'gpt2' has 1024 learned positions"):
        resolve(asked)


def test_the_same_model_is_no_change_and_nothing_is_said() -> None:
    assert not ExperimentOptions(model="llama-3-70b").load().notes


def test_a_length_in_thousands_is_said_beside_the_binary_one() -> None:
    asked = ExperimentOptions(model="llama-3-8b", set_=["training.sequence_length=128k"]).load()
    assert asked.training.sequence_length == 128_000
    note = "training.sequence_length 128k is 128,000 tokens; 128Ki is 131,072"
    assert note in resolve(asked).notes
    binary = ExperimentOptions(model="llama-3-8b", set_=["training.sequence_length=128Ki"]).load()
    assert not any("128Ki is" in text for text in resolve(binary).notes)
