"""Studies of whole runs: columns of a sweep, goodput by the number of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.study.scaling.page import scaling_dict, scaling_page
from zsim.study.scaling.scaling import run_scaling
from zsim.study.scaling.whole_runs import run_lines
from zsim.study.sweep.study_file import load_study
from zsim.study.sweep.sweep import run_sweep

STATED = {"every": "20 min", "blocking": "5 s", "durable": "60 s", "load": "1 min", "bytes": "96 GB"}


def experiment(**run: Any) -> zsim.Experiment:
    tables = {"tokens": "200B", "checkpoint": STATED, "recovery": {"restart": "4 min", "spares": 2},
              "failures": {"preset": "opt-175b"}, "seeds": 8, **run}  # fmt: skip
    return zsim.Experiment(
        model="gpt2", cluster="dgx-h100", nodes=2, run=tables, training={"sequence_length": 256},
        cost={"gpu_hour_price": 2.0},
    )  # fmt: skip


STUDY = """
[base]
model = "gpt2"
cluster = "dgx-h100"
nodes = 2
[base.training]
sequence_length = 256
[base.run]
tokens = "200B"
seeds = 8
[base.run.checkpoint]
every = "20 min"
blocking = "5 s"
load = "1 min"
bytes = "96 GB"
[base.run.recovery]
restart = "4 min"
[axes]
"run.recovery.spares" = [0, 1, 3]
"run.failures.per_1000_node_days" = [0, 40]
"""


def test_a_sweep_over_keys_of_the_run_has_its_answers(tmp_path: Path) -> None:
    """Without failures spares change nothing; with them fewer days; more spares than nodes are no run, with
    the reason, beside a step that is one."""
    (tmp_path / "study.toml").write_text(STUDY)
    done = run_sweep(load_study(tmp_path / "study.toml"), tmp_path / "out", jobs=1, is_quiet=True)
    found = {(row["run.recovery.spares"], row["run.failures.per_1000_node_days"]): row for row in done.rows}
    assert found[0, 0]["expected_days"] == found[1, 0]["expected_days"]
    assert found[0, 40]["expected_days"] > found[1, 40]["expected_days"] > found[1, 0]["expected_days"]
    assert found[0, 40]["lost_seconds.waiting"] > 0
    assert found[0, 40]["checkpoint.bytes"] == 96_000_000_000
    row = found[3, 40]
    assert row["status"] == "ok"
    assert "more than the 2 nodes that train" in row["run_error"]
    assert row["expected_days"] is None
    assert row["step_seconds"] > 0


def test_a_row_says_what_the_run_alone_says(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    study = load_study(tmp_path / "study.toml")
    rows = run_sweep(study, tmp_path / "out", jobs=1, is_quiet=True).rows
    row = next(
        row for row in rows if (row["run.recovery.spares"], row["failures"]) != (0, 0) and row["failures"]
    )
    own = experiment(
        checkpoint={"every": "20 min", "blocking": "5 s", "load": "1 min", "bytes": "96 GB"},
        failures={"per_1000_node_days": 40},
        recovery={"restart": "4 min", "spares": row["run.recovery.spares"]},
    )
    found = zsim.simulate_run(own, compares=False).to_dict()
    for name in ("ideal_days", "expected_days", "goodput_fraction", "failures", "interval_seconds"):
        assert row[name] == pytest.approx(found[name]), name


def test_goodput_falls_with_the_number_of_gpus(tmp_path: Path) -> None:
    """The same tokens and spares on more GPUs: fewer days, as long as failures do not take them back."""
    done = run_scaling(experiment(), [16, 64, 256], "weak", tmp_path / "points", is_quiet=True)
    runs = [scale.whole_run for scale in done.scales]
    goodput = [run["goodput_fraction"] for run in runs if run is not None]
    assert len(goodput) == 3
    assert goodput[0] > goodput[1] > goodput[2]
    days = [run["expected_days"] for run in runs if run is not None]
    assert days[0] > days[1] > days[2]
    lines = list(run_lines(done))
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"The fewest days: {days[2]:.2f}, on 256 GPUs")
    text = scaling_page(done)
    assert 'id="plot-goodput"' in text
    assert 'id="plot-days"' in text
    assert json.loads(json.dumps(scaling_dict(done)))["scales"][2]["run"]["goodput_fraction"] == goodput[2]


def test_a_study_without_a_run_has_no_days(tmp_path: Path) -> None:
    alone = experiment().model_copy(update={"run": None})
    done = run_scaling(alone, [8], "weak", tmp_path / "points", is_quiet=True)
    assert list(run_lines(done)) == []
    assert "run" not in scaling_dict(done)["scales"][0]
