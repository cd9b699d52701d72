"""`zsim trust`: how far to believe a step, also from a measured one."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.errors import InputError
from zsim.study.anchoring import anchor_step
from zsim.validated.runs import shipped_estimates

JOB: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "nodes": 4, "strategy": {"kind": "fsdp2"},
       "training": {"sequence_length": 512}}  # fmt: skip
FILE = """
model = "gpt2"
cluster = "dgx-h100"
nodes = 4
strategy = {kind = "fsdp2"}
training = {sequence_length = 512}
"""


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    (tmp_path / "job.toml").write_text(FILE)
    return ["trust", str(tmp_path / "job.toml")]


def test_the_command_prints_and_writes_the_same(asked: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*asked, "--json", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "t.json").read_text())
    result = zsim.simulate(zsim.Experiment(**JOB))
    assert found == json.loads(json.dumps(result.trust.to_dict()))
    assert str(result.trust) in done.output
    assert found["interval"][-1]["low"] * found["step_seconds"] == pytest.approx(
        found["step_seconds_range"][0]
    )


def test_a_measured_step_narrows_the_interval() -> None:
    """Measured at twice the prediction on 1 node: so is this one, as well as [ratios] says of GPUs."""
    experiment = zsim.Experiment(**JOB)
    result, small = zsim.simulate(experiment), zsim.simulate(zsim.Experiment(**{**JOB, "nodes": 1}))
    found = anchor_step(result, experiment, {"nodes": 1}, 2 * small.report.step_seconds)
    bound = exp(shipped_estimates()["ratios"]["GPUs"])
    assert 1.05 < bound < 1.3
    assert found.kinds == ("GPUs",)
    assert found.step_seconds == pytest.approx(2 * result.report.step_seconds)
    assert found.error == pytest.approx(-0.5)
    assert found.high / found.step_seconds == pytest.approx(bound)
    assert found.low / found.step_seconds == pytest.approx(1 / bound)
    assert "with nodes=1" in found.lines()[0]


def test_the_very_job_measured_is_known_to_its_repeats() -> None:
    experiment = zsim.Experiment(**JOB)
    found = anchor_step(zsim.simulate(experiment), experiment, {}, 3.0)
    assert (found.low, found.step_seconds, found.high) == pytest.approx((2.982, 3.0, 3.018))
    assert "measured with this very job" in found.lines()[0]


def test_the_command_takes_a_measured_step(asked: list[str]) -> None:
    done = CliRunner().invoke(app, [*asked, "--measured", "870 ms", "--at", "nodes=1", "--json", "-"])
    found = json.loads(done.stdout)["anchored"]
    assert (found["measured_seconds"], found["settings"]) == (0.87, {"nodes": "1"})
    bare = CliRunner().invoke(app, [*asked, "--measured", "0.87", "--json", "-"])
    assert json.loads(bare.stdout)["anchored"]["measured_seconds"] == 0.87


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at", "nodes=1"], "expected --measured SECONDS"),
        (["--measured", "3 parsecs"], "--measured: unknown unit 'parsecs'"),
        (["--measured", "0 s"], "measured: found 0 s"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_a_wrong_measurement_is_refused(asked: list[str], arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*asked, *arguments])
    assert isinstance(done.exception, InputError)
    assert said in str(done.exception)
