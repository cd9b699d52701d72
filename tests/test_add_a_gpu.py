"""docs/add-a-gpu.md, followed: its files make a GPU, a node and a mixed cluster that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment

PAGE = Path(__file__).parents[1] / "docs" / "add-a-gpu.md"
_FILE = re.compile(r'```toml title="(\S+)"\n(.*?)```', re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for name, text in _FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    return tmp_path


def experiment(cluster: Path, **overrides: object) -> Experiment:
    given = {
        "model": "gpt2", "cluster": str(cluster), "training": {"sequence_length": 1024},
        "strategy": {"kind": "fsdp2"},
    }  # fmt: skip
    return build_experiment(given, overrides, origin="test")


def test_the_page_has_three_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["mixed.toml", "x100-x8.toml", "x100.toml"]


def test_the_new_gpu_runs_and_says_what_it_is_made_of(folder: Path) -> None:
    report = zsim.simulate(experiment(folder / "x100-x8.toml")).report
    assert report.fits
    assert report.work.peak_flops_per_second == 800e12
    assert report.evidence["compute"] == "assumed"
    assert report.validation is not None
    assert "GPU x100 without a validated run" in report.validation.extrapolates


def test_its_power_can_be_limited(folder: Path) -> None:
    """(450 / 600) ^ 0.806, the exponent of the H100 that it extends: 0.793 of 0.65."""
    asked = experiment(folder / "x100-x8.toml", **{"gpu.power_limit": "450 W"})
    assert isinstance(asked.cluster, dict)
    gpu = load_cluster(asked.cluster).gpu
    assert gpu.gemm.max_fraction == pytest.approx(0.65 * 0.793, rel=1e-3)
    assert gpu.power is not None
    assert gpu.power.maximum == 450


def test_it_runs_beside_another_type(folder: Path) -> None:
    report = zsim.simulate(experiment(folder / "mixed.toml")).report
    assert [row.name for row in report.gpu_types] == ["x100", "dgx-a100-80gb"]
    sizes = {"x100": 4, "dgx-a100-80gb": 2}
    uneven = zsim.simulate(experiment(folder / "mixed.toml", **{"training.micro_batch_sizes": sizes})).report
    assert uneven.step_tokens == 16 * (4 + 2) * 1024


def test_a_node_names_the_gpu_file_that_is_not_there(folder: Path) -> None:
    (folder / "x100.toml").unlink()
    said = r"x100-x8.toml: gpu: no file '.*x100.toml'; expected the path"
    with pytest.raises(InputError, match=said):
        load_cluster(folder / "x100-x8.toml")
    with pytest.raises(InputError, match=said):
        zsim.simulate(experiment(folder / "x100-x8.toml"))


def test_a_board_draws_no_more_than_its_maximum(folder: Path) -> None:
    path = folder / "x100.toml"
    path.write_text(path.read_text().replace('"380 W"', '"0.7 kW"'))
    with pytest.raises(InputError, match=r"x100.toml: power: memory_bound is 700 W, above the max"):
        load_cluster(folder / "x100-x8.toml")
