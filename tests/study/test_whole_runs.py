"""Studies of whole runs: columns of a sweep, goodput by the number of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import there
from tests.study.tune.conftest import tune
from zsim.study.scaling.result import run_lines
from zsim.study.scaling.scaling import run_scaling
from zsim.study.sensitivity.runs import run_bar_dict, run_bar_lines, run_bar_section, run_sensitivity_of
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
    runs = [scale.whole_run for scale in done.points]
    goodput = [run["goodput_fraction"] for run in runs if run is not None]
    assert len(goodput) == 3
    assert goodput[0] > goodput[1] > goodput[2]
    days = [run["expected_days"] for run in runs if run is not None]
    assert days[0] > days[1] > days[2]
    lines = list(run_lines(done))
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"The fewest days: {days[2]:.2f}, on 256 GPUs")
    text = done.page()
    assert 'id="plot-goodput"' in text
    assert 'id="plot-days"' in text
    assert json.loads(json.dumps(done.to_dict()))["scales"][2]["run"]["goodput_fraction"] == goodput[2]


def test_a_study_without_a_run_has_no_days(tmp_path: Path) -> None:
    alone = experiment().model_copy(update={"run": None})
    done = run_scaling(alone, [8], "weak", tmp_path / "points", is_quiet=True)
    assert list(run_lines(done)) == []
    assert "run" not in done.to_dict()["scales"][0]


# -- what a run depends on -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turned() -> Any:
    return run_sensitivity_of(experiment(failures={"per_1000_node_days": 400}, tokens="2T"))


def test_fewer_failures_and_quicker_ways_back_save_days(turned: Any) -> None:
    """All numbers that only cost time: halved, the run is shorter, doubled, longer."""
    bars = {bar.name: bar for bar in turned.bars}
    for name in ("failures", "start-up", "detection", "loading", "blocking of a save"):
        assert bars[name].low_days < turned.days < bars[name].high_days, name


def test_halved_failures_lose_half_of_what_failures_cost(turned: Any) -> None:
    """To first order: saves cost 5 s in 1,205, failures the rest of what is lost."""
    lost = turned.days * (1 - turned.goodput_fraction * 1_205 / 1_200)
    halved = next(bar.low_days for bar in turned.bars if bar.name == "failures")
    assert turned.days - halved == pytest.approx(lost / 2, rel=0.15)


def test_the_answer_is_told_in_words_numbers_and_a_figure(turned: Any) -> None:
    lines = list(run_bar_lines(turned))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("Most is won with") and "USD" in line for line in lines)
    assert {bar["name"] for bar in run_bar_dict(turned)["bars"]} >= {"failures", "interval of saves"}
    assert there(run_bar_section(turned).table).rows


def test_a_faster_store_is_a_faster_synchronous_save() -> None:
    """A store of 0.2 GB/s a node takes a synchronous save longer than all else: half of it costs days."""
    slow = experiment(
        checkpoint={"mode": "sync", "every": "20 min"}, storage={"write_bandwidth": "20 MB/s"},
        failures={"per_1000_node_days": 40},
    )  # fmt: skip
    found = run_sensitivity_of(slow)
    store = next(bar for bar in found.bars if bar.name == "store's bandwidth")
    assert store.low_days is not None
    assert store.high_days is not None
    assert store.high_days < found.days < store.low_days


# -- the fewest days -------------------------------------------------------------------------------------


def test_the_fewest_days_count_saves_and_failures() -> None:
    """Every simulated configuration has the days of its run, at the best mode of saving; the best has the
    fewest, and no fewer than its steps take."""
    given = experiment(
        tokens="20B", checkpoint={"mode": "sync"}, storage={"write_bandwidth_per_node": "0.2 GB/s"},
        failures={"per_1000_node_days": 4000},
    )  # fmt: skip
    keep = ("offload", "checkpointing", "micro-batch", "cross-entropy", "bucket")
    found = tune(given, "fewest-days", kinds=("deepspeed",), keep=keep, top=2)
    days = [one.days for one in found.measured if one.days is not None]
    assert len(days) == len(found.measured)
    best = found.best[0].days
    assert best is not None
    assert best.days == min(one.days for one in days)
    assert best.days > best.ideal_days > 0
    assert best.settings()["run.checkpoint.mode"] == best.mode
    assert any("goodput: mode" in line for line in found.lines())
    assert found.to_dict()["best"][0]["run"]["days"] == best.days


def test_the_fewest_days_need_a_length() -> None:
    with pytest.raises(zsim.InputError, match="how far does the run go"):
        tune(experiment(tokens=None), "fewest-days", keep=("all",))


def test_other_goals_do_not_mind_a_run() -> None:
    """Units of `[run]` are no part of a candidate."""
    found = tune(experiment(storage={"write_bandwidth": "1 GB/s"}), keep=("all",), top=1)
    assert found.best[0].days is None
