"""Times of a recorded run are judged where its machine was calibrated, `cluster.toml` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from validation.cases.cases import case_rows
from zsim.errors import InputError
from zsim.study.check import targets

RECORDED = Path(__file__).resolve().parents[2] / "traces" / "gloo" / "zero2-even-2ranks" / "summary.json"
CLUSTER = 'schema = 1\nextends = "cpu-gloo"\nname = "this machine"\n'


@pytest.fixture
def content() -> dict[str, Any]:
    """A recording whose times are what zsim says."""
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    report = zsim.simulate(zsim.Experiment(cluster="cpu-gloo", **recorded["experiment"])).report
    seconds = report.breakdown.seconds
    thread = seconds["compute"] + seconds["optimizer"] + seconds["host_bound"]
    recorded["step_seconds"] = {
        "mean": report.step_seconds,
        "median": report.step_seconds / 2,  # means count: sums of medians are short
        "foreign_cpu_fraction": 0.01,
    }
    recorded["step_cpu_seconds"] = {"mean_by_rank": [thread, 9.0]}
    return recorded


def verdicts(content: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Of the step's time on the clock, and of its thread's on the processor."""
    rows = {row.name: row.outcome for row in case_rows("run", folder / "summary.json", content)}
    return rows["step"], rows["processor time of the main thread"]


def test_without_a_calibrated_cluster_times_are_only_shown(content: dict[str, Any], tmp_path: Path) -> None:
    assert verdicts(content, tmp_path) == ("inconclusive", "inconclusive")


@pytest.mark.parametrize(
    ("wall", "thread", "foreign", "expected"),
    [
        (1.0, 1.0, 0.01, ("pass", "pass")),
        (1.15, 1.08, 0.01, ("pass", "pass")),
        (1.3, 1.2, 0.01, ("fail", "fail")),
        (0.7, 0.8, 0.01, ("fail", "fail")),
        (3.0, 1.05, 0.5, ("inconclusive", "pass")),  # others were busy: the thread's own time still counts
    ],
)
def test_with_one_they_are_judged(
    content: dict[str, Any],
    tmp_path: Path,
    wall: float,
    thread: float,
    foreign: float,
    expected: tuple[str, str],
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    content["step_seconds"]["mean"] *= wall
    content["step_seconds"]["foreign_cpu_fraction"] = foreign
    content["step_cpu_seconds"]["mean_by_rank"][0] *= thread
    assert verdicts(content, tmp_path) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step_seconds": {"mean": "x", "foreign_cpu_fraction": 0.0}}, "not whole"),
        ({"step_seconds": {"mean": 1.0, "median": 1.0, "foreign_cpu_fraction": "x"}}, "not whole"),
        ({"experiment": {"model": "gpt2", "gpus": 2, "nonsense": 1}}, "unknown key 'nonsense'"),
    ],
)
def test_a_damaged_recording_is_named(
    content: dict[str, Any], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "summary.json"
    with pytest.raises(InputError, match=reason) as error:
        case_rows("run", path, content | change)
    assert str(path) in str(error.value)


def test_outside_of_a_checkout_a_recorded_case_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"case": {}, "calls": [], "peak_bytes": {}}))
    monkeypatch.setattr(targets, "CHECKOUT", tmp_path)
    with pytest.raises(InputError, match="their checks come with the source checkout only"):
        targets.case_rows("case", path, json.loads(path.read_text()))
