"""Each function of the Python face gives the numbers of the command with the same name, and shows itself."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.report.views.displayable import Displayable, html_table

TINY: dict[str, Any] = {
    "model": {
        "model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 8, "n_ctx": 512, "vocab_size": 1000,
    },
    "cluster": "dgx-h100",
    "nodes": 1,
    "training": {"micro_batch_size": 2},
}  # fmt: skip
TOML = """
model = { model_type = "gpt2", n_embd = 512, n_layer = 2, n_head = 8, n_ctx = 512, vocab_size = 1000 }
cluster = "dgx-h100"
nodes = 1
training = { micro_batch_size = 2 }
"""
OFFLOADED = {**TINY, "strategy": {"kind": "fsdp2", "cpu_offload": True}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TOML)
    return "tiny.toml"


def told(*arguments: str) -> Any:
    """The object that the command writes to its --json."""
    done = CliRunner().invoke(app, [*arguments, "--json", "found.json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return json.loads(Path("found.json").read_text())


def plain(content: Any) -> Any:
    return json.loads(json.dumps(content))


def check_shown(found: Displayable, columns: set[str]) -> None:
    """It has a text, a table in HTML, a DataFrame with these columns, and figures that plotly accepts."""
    assert str(found) == repr(found) != ""
    page = found._repr_html_()
    assert "<table>" in page
    assert "<script" not in page
    assert columns <= set(found.to_frame().columns)
    assert found.figure().data
    for name in found.figures:
        found.figure(name)


def test_sweep_has_the_rows_of_the_command(file: str) -> None:
    Path("study.toml").write_text(f'experiment = "{file}"\n[axes]\n"training.micro_batch_size" = [1, 2]\n')
    found = zsim.sweep(file, {"training.micro_batch_size": range(1, 3)}, jobs=1)
    check_shown(found, {"training.micro_batch_size", "step_seconds", "fits", "mfu_fraction"})
    assert CliRunner().invoke(app, ["sweep", "study.toml", "--jobs", "1"]).exit_code == 0
    with open("study-results/results.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["step_seconds"] for row in rows] == [str(row["step_seconds"]) for row in found.rows]
    assert found.best(1)[0]["tokens_per_second_per_gpu"] == max(
        row["tokens_per_second_per_gpu"] for row in found.rows
    )
    again = zsim.sweep("study.toml", jobs=1, cache="study-results/points")
    assert (again.cached, again.rows) == (2, found.rows)


def test_sweep_takes_experiments_and_conditions() -> None:
    """Of 2 x 2 points the condition leaves out the two with stage 1 on ZeRO's, labels go with strategies."""
    experiment = zsim.Experiment(**TINY)
    found = zsim.sweep(
        experiment,
        {"training.micro_batch_size": [1, 2]},
        zipped=[{"label": ["fsdp", "ddp"], "strategy": [{"kind": "fsdp2"}, {"kind": "ddp"}]}],
        where="training.micro_batch_size == 1 or label == 'ddp'",
        jobs=1,
    )
    points = [(row["label"], row["training.micro_batch_size"]) for row in found.rows]
    assert points == [("fsdp", 1), ("ddp", 1), ("ddp", 2)]
    assert found.failed == 0


def test_tune_has_the_answer_of_the_command(file: str) -> None:
    found = zsim.tune(TINY, keep=["all"], jobs=1, top=1)
    check_shown(found, {"label", "step_seconds", "gpu_peak_bytes"})
    other = told("tune", file, "--keep", "all", "--jobs", "1", "--top", "1")
    assert plain(found.to_dict()) == other
    assert {path.name for path in found.save("tuned")} >= {"tune.html", "NOTES.txt"}


def test_scaling_has_the_content_of_the_commands_file(file: str) -> None:
    found = zsim.scaling(TINY, [8, 16], jobs=1)
    check_shown(found, {"gpus", "step_seconds", "efficiency_fraction"})
    assert CliRunner().invoke(app, ["scaling", file, "--gpus", "8,16", "--jobs", "1"]).exit_code == 0
    assert plain(found.to_dict()) == json.loads(Path("scaling/scaling.json").read_text())


def test_sensitivity_has_the_content_of_the_commands_file(file: str) -> None:
    arguments = {"target": "step_seconds=1e-6", "resources": ["HBM bandwidth"]}
    found = zsim.sensitivity({**TINY, "nodes": None, "gpus": 1}, jobs=1, **arguments)  # type: ignore[arg-type]
    check_shown(found, {"name", "swing_fraction", "low_step_seconds"})
    options = ["--gpus", "1", "--target", "step_seconds=1e-6", "--resource", "HBM bandwidth"]
    assert CliRunner().invoke(app, ["sensitivity", file, *options, "--jobs", "1"]).exit_code == 0
    assert plain(found.to_dict()) == json.loads(Path("sensitivity/sensitivity.json").read_text())
    assert found.to_dict()["requirements"] != []


def test_needs_are_the_commands(file: str) -> None:
    found = zsim.needs(OFFLOADED, ["pcie"])
    check_shown(found, {"resource", "needed", "sentence"})
    other = told("needs", file, "--set", "strategy.cpu_offload=true", "--resource", "pcie")
    assert plain(found.to_dict()) == other
    assert (len(found), found[0].resource) == (1, "pcie")


def test_memory_is_the_commands(file: str) -> None:
    found = zsim.memory(TINY)
    assert isinstance(found, zsim.MemoryResult)
    check_shown(found, {"owner", "category", "total_bytes"})
    assert plain(found.to_dict()) == told("memory", file)


def test_varied_memory_is_the_commands(file: str) -> None:
    found = zsim.memory(TINY, vary={"training.micro_batch_size": [1, 2]}, by="time")
    check_shown(found, {"training.micro_batch_size", "fits", "peak_bytes", "step_seconds"})
    other = told("memory", file, "--vary", "training.micro_batch_size=1,2", "--by", "time")
    assert plain(found.to_dict()) == other


def test_compared_topologies_are_the_commands(file: str) -> None:
    found = zsim.compare_topologies(["dgx-h100", "dgx-a100-80gb"], TINY, gpus=8)
    check_shown(found, {"cluster", "step_seconds", "switches"})
    arguments = [
        "topology",
        "compare",
        "dgx-h100",
        "dgx-a100-80gb",
        "-e",
        file,
        "--gpus",
        "8",
        "--out",
        "out",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    other = json.loads(Path("out/compare.json").read_text())
    assert [row["step_seconds"] for row in other] == [row.report.step_seconds for row in found]
    assert plain(found.to_dict()) == other


def test_a_bench_is_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = zsim.bench_collectives("dgx-h100", nodes=2, collective="all_gather")
    check_shown(found, {"size_bytes", "bus_bytes_per_second", "algorithm"})
    assert plain(found.to_dict()) == told(
        "topology", "bench", "dgx-h100", "--nodes", "2", "--collective", "all_gather"
    )


def test_a_run_is_the_commands(file: str) -> None:
    found = zsim.simulate_run(TINY, overrides={"run.steps": 100_000}, seeds=4, jobs=1)
    check_shown(found, {"part", "days", "time_fraction"})
    assert sum(row["time_fraction"] for row in found.records()) == pytest.approx(1)
    other = told("goodput", file, "--set", "run.steps=100000", "--seeds", "4", "--jobs", "1")
    ours = plain(found.to_dict())
    for content in (ours, other):
        content["experiment"].pop("origin", None)
    assert ours == other


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: zsim.sweep(None), "sweep: nothing varies"),
        (lambda: zsim.sweep(TINY, {"training.micro_batch": [1]}), "did you mean 'training.micro_batch_size'"),
        (lambda: zsim.scaling(TINY, [8], mode="weakly"), "did you mean 'weak'"),
        (lambda: zsim.tune(TINY, "fast"), "did you mean 'fastest'"),
        (lambda: zsim.memory(3), "experiment: found int, expected a path"),  # type: ignore[arg-type]
        (lambda: zsim.needs(TINY), "nothing is offloaded"),
        (lambda: zsim.compare_topologies([], TINY), "expected at least one cluster"),
        (lambda: zsim.bench_collectives("dgx-h10"), "did you mean 'dgx-h100'"),
        (lambda: zsim.memory(TINY).figure("phase"), "did you mean 'phases'"),
        (lambda: zsim.memory(TINY).save("x"), "MemoryResult has no files to save"),
    ],
)
def test_wrong_input_is_one_paragraph(call: Any, said: str) -> None:
    with pytest.raises(zsim.InputError) as error:
        call()
    assert said in str(error.value)


def test_a_table_escapes_names_and_writes_units() -> None:
    page = html_table("a < b", [{"step_seconds": 0.5, "x_bytes": 2_000_000_000, "name": "<i>", "y": None}])
    assert page == (
        "<p>a &lt; b</p><table><thead><tr><th scope='col'>step</th><th scope='col'>x</th>"
        "<th scope='col'>name</th><th scope='col'>y</th></tr></thead><tbody><tr><td>500.00 ms</td>"
        "<td>2.00 GB</td><td>&lt;i&gt;</td><td></td></tr></tbody></table>"
    )


def test_importing_zsim_and_its_names_loads_neither_pandas_nor_plotly_nor_scipy() -> None:
    code = (
        "import sys, zsim; zsim.sweep, zsim.tune, zsim.scaling, zsim.memory, zsim.sensitivity, zsim.needs, "
        "zsim.compare_topologies, zsim.bench_collectives, zsim.simulate_run\n"
        "print(sorted({'pandas', 'plotly', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
