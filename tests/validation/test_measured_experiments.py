"""Measured experiments: predicted as they stand, with errors by group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from validation.published.coverage import judge_runs
from validation.published.measured_experiments import (
    TABLE,
    main,
    memory_figures,
    memory_lines,
    merge_experiments,
    predict_experiment,
    read_experiments,
    recorded_experiments,
    validated_experiments,
)
from validation.published.sources import changes_of_source
from validation.published.strangers_page import strangers_lines
from zsim.validated.runs import validated_runs
from zsim.validated.spread import spread_estimates

EXPERIMENT: dict[str, Any] = {
    "model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1,
    "training": {"sequence_length": 4096}, "strategy": {"kind": "fsdp2"},
}  # fmt: skip


def test_the_error_is_that_of_the_experiment_as_it_stands() -> None:
    """A step measured at half of the predicted one is 100 % off; torch's own bytes leave the context out."""
    report = zsim.simulate(zsim.Experiment(**EXPERIMENT)).report.to_dict()
    own = report["peak_bytes"]["gpu"]["total"] - report["peak_bytes"]["gpu"]["framework"]
    row = {
        "row_id": "a-1", "source": "a", "experiment": EXPERIMENT,
        "measured_step_seconds": report["step_seconds"] / 2, "measured_allocated_gb": own / 2e9,
    }  # fmt: skip
    found = predict_experiment(row)
    assert found.error == pytest.approx(1.0)
    assert found.memory_error == pytest.approx(1.0, abs=1e-6)
    assert found.kind == "fsdp2, None"


def test_memory_is_compared_with_the_same_figure_and_with_what_was_found_out() -> None:
    """What torch reserves and what nvidia-smi shows are not what it allocates: measured as predicted, each
    has no error. A rule on a source sets its keys where the experiment is as the rule asks: Halo's loss
    keeps 6 bytes of a logit (151,936 of a token) where the loss with the head has none."""
    figures = memory_figures(zsim.simulate(zsim.Experiment(**EXPERIMENT)).report)
    assert figures["allocated"] < figures["reserved"] < figures["device"]
    for name, size in figures.items():
        row = {
            "row_id": "a-1", "source": "a", "experiment": EXPERIMENT, f"measured_{name}_gb": size / 1e9,
        }  # fmt: skip
        assert predict_experiment(row).memory_error == pytest.approx(0.0, abs=1e-9)
    assert changes_of_source("halo-b300", {"training": {"liger": False}}) == {}
    training = {"sequence_length": 16384, "activation_checkpointing": "full", "stored_dtype": "bf16"}
    experiment = {
        "model": "qwen3-8b", "cluster": "hgx-b300", "nodes": 1, "gpus": 1,
        "training": training | {"liger": True}, "strategy": {"kind": "ddp"},
    }  # fmt: skip
    row = {"row_id": "b-1", "source": "halo-b300", "experiment": experiment, "measured_allocated_gb": 1.0}
    asked, studied = (predict_experiment(row, is_studied=studied) for studied in (False, True))
    assert asked.predicted_bytes is not None
    assert studied.predicted_bytes is not None
    assert changes_of_source("halo-b300", experiment) == {"training.cross_entropy": "liger"}
    assert studied.predicted_bytes > asked.predicted_bytes
    assert any("mean of sources" in line for line in memory_lines([studied]))


def test_what_is_refused_is_named_and_the_others_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = EXPERIMENT | {"model": "no-such-model"}
    rows = [
        {"row_id": "a-1", "source": "a", "experiment": wrong, "measured_step_seconds": 1.0},
        {"row_id": "a-2", "source": "a", "experiment": EXPERIMENT, "measured_step_seconds": 1.0},
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    assert main([str(path), "--json", str(tmp_path / "errors.json")]) == 0
    printed = capsys.readouterr().out
    assert "no-such-model" in printed.splitlines()[0]
    assert "by source" in printed
    first, second = json.loads((tmp_path / "errors.json").read_text())
    assert first["error"] is None
    assert second["error"] == pytest.approx(second["predicted_seconds"] - 1)


def test_recorded_experiments_are_judged_by_the_interval_of_the_prediction() -> None:
    """A step measured as predicted lies inside, one of three times that outside and above; both stand in the
    page's first table, which has no column for what was found out."""
    row = {"row_id": "a-1", "source": "a", "experiment": EXPERIMENT, "measured_step_seconds": 1.0}
    found = predict_experiment(row)
    assert found.predicted_seconds is not None
    exact, slow = (replace(found, measured_seconds=factor * found.predicted_seconds) for factor in (1.0, 3.0))
    assert exact.is_within
    assert slow.is_within is False
    experiments = validated_experiments([row, row], [exact, slow])
    judged = judge_runs(experiments, validated_runs(), spread_estimates())
    assert [row.is_covered for row in judged] == [True, False]
    assert [row.is_above for row in judged] == [False, True]
    low, high = found.predicted_range_seconds or (0.0, 0.0)
    half_width = (high - low) / 2 / found.predicted_seconds
    assert judged[0].half_width == pytest.approx(half_width)
    studied = [replace(row, run=replace(row.run, role="report")) for row in judged]
    page = "\n".join(strangers_lines([*judged, *studied]))
    section = page[page.index("## Sources predicted before") : page.index("developed with")]
    assert "| **all** | 2 | 1 | 33.3% |" in section
    assert "as studied, mean" not in section


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    path.write_text('{"row_id": "a"}')
    assert main([str(path)]) == 2
    assert "expected a list of objects with row_id" in capsys.readouterr().err


def test_recording_replaces_the_rows_of_its_file_alone() -> None:
    """Of two recorded rows one is predicted anew, and one is in another file. A third, in the file, could
    not be simulated and loses what was recorded of it. The first error stays the stranger's.
    """
    first = recorded_experiments()[0]
    runs = [replace(first, row_id=name) for name in ("a", "b", "c")]
    anew = replace(first, row_id="b", error=0.5, stranger_error=0.5)
    merged = merge_experiments(runs, [{"row_id": "b"}, {"row_id": "c"}], [anew])
    assert [(run.row_id, run.error, run.stranger_error) for run in merged] == [
        ("a", first.error, first.stranger_error), ("b", 0.5, first.stranger_error)
    ]  # fmt: skip


def test_every_row_here_is_an_experiment_with_a_citation() -> None:
    rows = read_experiments(TABLE.with_name("experiments.json"))
    assert len({row["row_id"] for row in rows}) == len(rows)
    for row in rows:
        zsim.Experiment(**row["experiment"])
        assert row["reference"], row["row_id"]
        assert row["measured_step_seconds"] > 0, row["row_id"]
