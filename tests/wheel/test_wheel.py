"""What is installed is complete: files, command, plugin. `make wheel` runs it on the built wheel."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import zsim
from zsim.specs.cluster.files import load_cluster
from zsim.specs.model.huggingface import load_model
from zsim.specs.presets import gpu_preset_names, model_preset_names, topology_preset_names

PACKAGE = Path(zsim.__file__).parent


@pytest.mark.skipif("site-packages" not in PACKAGE.parts, reason="of an installed wheel: `make wheel`")
def test_its_version_is_the_packages() -> None:
    assert importlib.metadata.version("zsim") == zsim.__version__


def test_it_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", topology_preset_names())
def test_every_cluster_is_there(name: str) -> None:
    assert load_cluster(name).name == name


def test_models_and_gpus_are_there() -> None:
    assert sum(one.numel for _, one in load_model("llama-3-8b").named_parameters()) == 8_030_261_248
    assert "h100-sxm-80gb" in gpu_preset_names()
    assert len(model_preset_names()) > 40


def test_the_table_of_errors_is_there_and_what_it_is_made_from_is_not() -> None:
    """What is known of single published sources stays in the repository's validation/."""
    names = {path.name for path in PACKAGE.rglob("*")}
    assert {"validated_runs.csv", "validated_errors.toml", "validated_memory.csv"} <= names
    assert not {"published_sources.toml", "coverage.py", "validation_rows.py"} & names


def test_the_command_writes_its_report(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("zsim")
    if not command.exists():
        pytest.skip("the command is not installed beside this Python")
    asked = [str(command), "run", "--model", "gpt2", "--out", "out"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["fits"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 1_000_000


def test_pytest_finds_its_fixtures() -> None:
    names = {point.name for point in importlib.metadata.entry_points(group="pytest11")}
    assert "zsim" in names
