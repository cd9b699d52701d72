"""Predictions of real runs from a machine's microbenchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim

pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

from validation.predict import RUNS, line, machine_text, run_text, runs
from validation.record.cases import LARGER_MODELS, experiment
from zsim.specs.cluster.files import load_cluster
from zsim.study.check.baseline import CheckRow

MACHINE = Path(__file__).resolve().parents[2] / "traces" / "cpu-2core-epyc"


def test_every_strategy_is_run_with_every_model_and_none_is_a_recorded_case() -> None:
    wanted = runs()
    assert {(strategy.name, model) for strategy, model in wanted} == {
        (name, model) for name in RUNS for model in LARGER_MODELS
    }
    assert all(experiment(strategy, model, 2) is not None for strategy, model in wanted)


def test_the_machine_is_known_from_microbenchmarks_alone(tmp_path: Path) -> None:
    """What a step takes comes out within a factor of what its matrix products alone would take."""
    (tmp_path / "cluster.toml").write_text(machine_text(MACHINE / "microbench.json", ranks=2))
    cluster = load_cluster(str(tmp_path / "cluster.toml"))
    assert cluster.gpu.gemm.evidence == cluster.gpu.memory_bound.evidence == "calibrated"
    strategy, model = next((s, m) for s, m in runs() if s.name == "zero3" and m == "large")
    made = experiment(strategy, model, 2)
    assert made is not None
    seconds = zsim.simulate(
        zsim.Experiment(cluster=str(tmp_path / "cluster.toml"), **made)
    ).report.step_seconds
    products = 6 * 16.9e6 * 4 * 128 / ((cluster.gpu.peak.fp32 or 0.0) * cluster.gpu.gemm.max_fraction)
    assert products < seconds < 2 * products


def test_a_run_is_predicted_at_the_speed_its_cores_had(tmp_path: Path) -> None:
    """A core that takes twice as long for both probes takes twice as long for the step."""
    machine = tmp_path / "machine.toml"
    machine.write_text(machine_text(MACHINE / "microbench.json", ranks=2))
    strategy, model = next((s, m) for s, m in runs() if s.name == "ddp" and m == "large")
    made = experiment(strategy, model, 1)
    assert made is not None
    seconds = []
    for name, factor in (("first", 1.0), ("second", 2.0)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "cluster.toml"
        path.write_text(run_text(machine, {"product": 3e-3 * factor, "addition": 2e-3 * factor}))
        seconds.append(zsim.simulate(zsim.Experiment(cluster=str(path), **made)).report.step_seconds)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.02)


def test_the_committed_runs_name_their_machine() -> None:
    for path in sorted(MACHINE.glob("runs/*/summary.json")):
        content = json.loads(path.read_text())
        assert (path.parent / "cluster.toml").exists()
        assert content["model"] in LARGER_MODELS.values()


def test_a_line_says_how_far_off_a_prediction_is() -> None:
    row = CheckRow("zero3", "step", "pass", "1 s simulated, 2 s measured", 1.0, 2.0, -0.5, 0.2)
    assert line(row).split() == ["zero3", "step", "-50.0%", "pass", *row.sentence.split()]
