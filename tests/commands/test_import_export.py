"""`zsim import` and `zsim export`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from zsim.cli import app
from zsim.errors import InputError

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 2048
[job]
x = 1
"""


def zsim(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.toml"
    path.write_text(TOML)
    return str(path)


def test_an_imported_file_is_an_experiment_that_runs(train: str, tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.toml"
    text = zsim("import", train, "--cluster", "dgx-h100", "--training.seq_len=1024", "-o", str(experiment))
    assert f"note: {train}: no effect on a step: [job]" in " ".join(text.split())
    written = experiment.read_text()
    assert 'model = "llama-3-8b"' in written
    assert "sequence_length = 1024" in written
    assert "FITS" in zsim("run", str(experiment))


def test_a_file_that_is_an_experiment_is_for_run(train: str, tmp_path: Path) -> None:
    """What was imported, imported once more; a model alone is one too."""
    experiment = tmp_path / "experiment.toml"
    zsim("import", train, "--cluster", "dgx-h100", "-o", str(experiment))
    with pytest.raises(InputError, match=r"already is an experiment.*zsim run .*experiment.toml"):
        zsim("import", str(experiment))
    experiment.write_text('model = "llama-3-8b"\n')
    with pytest.raises(InputError, match="already is an experiment"):
        zsim("import", str(experiment), "--cluster", "dgx-h100")


def test_a_training_file_may_stand_in_an_experiments_place(train: str) -> None:
    assert "llama-3-8b | FSDP2 | dgx-h100 | 8 GPUs" in zsim("run", train, "--cluster", "dgx-h100")
    with pytest.raises(InputError, match="names no cluster: give it"):
        zsim("run", train)


def test_export_writes_what_can_say_it_and_names_what_cannot(tmp_path: Path) -> None:
    text = zsim(
        "export",
        "--model",
        "llama-3-8b",
        "--nodes",
        "2",
        "--set",
        "strategy.kind=fsdp2",
        "--out",
        str(tmp_path / "out"),
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "experiment.toml", "fsdp2.py", "torchtitan.toml",
    ]  # fmt: skip
    assert "no accelerate.yaml: it gathers and reduces in mixed_precision" in text


def test_notes_are_paragraphs_of_80_columns(tmp_path: Path) -> None:
    """Exporting the README's example has notes on the script and on accelerate's file."""
    done = CliRunner().invoke(app, ["export", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    notes = done.output.partition("note: ")[2].splitlines()
    assert len(notes) > 2
    assert max(map(len, notes)) <= 80
    assert "accelerate launch --machine_rank NUMBER" in " ".join(notes)
