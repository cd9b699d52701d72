"""validation/published/recorded.py: validated runs of tables that the checkout has not."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from tests.validation.test_published_megatron import CELLS
from validation.published.predict import predict_row
from validation.published.recorded import merge_runs, record, recorded_runs
from validation.published.table import PublishedRun
from zsim.study.measured.prediction import RowResult
from zsim.validated.runs import ValidatedRun


@pytest.fixture(scope="module")
def run() -> PublishedRun:
    cells = {
        **CELLS, "strategy": "TP2 PP1 DP4", "tp": "2", "dp": "4", "inter_gbps_per_gpu": "", "n_gpus": "8",
        "n_layers": "2", "grad_accum": "1", "global_batch": "16", "tier": "A", "step_time_s": "0.25",
    }  # fmt: skip
    return PublishedRun("a-1", "mine", "report", cells, "runs.csv: line 2")


@pytest.fixture(scope="module")
def result(run: PublishedRun) -> RowResult:
    return predict_row(run)


def test_a_predicted_run_is_recorded_with_what_it_is_like(
    run: PublishedRun, result: RowResult, tmp_path: Path
) -> None:
    path = tmp_path / "recorded.csv"
    record([(run, result)], path)
    (found,) = recorded_runs(path)
    assert result.predicted_seconds is not None
    assert found.error == pytest.approx(log(0.25 / result.predicted_seconds), abs=1e-5)
    assert found.features.strategy.endswith("+ TP")
    assert (found.row_id, found.tier, found.features.is_mixture) == ("a-1", "A", False)


def test_a_later_prediction_takes_its_place_and_a_skipped_one_goes(
    run: PublishedRun, result: RowResult, tmp_path: Path
) -> None:
    path = tmp_path / "recorded.csv"
    record([(run, result)], path)
    record([(run, replace(result, predicted_seconds=0.5))], path)
    assert [one.error for one in recorded_runs(path)] == [pytest.approx(log(0.5), abs=1e-5)]
    record([(run, replace(result, validation=None))], path)
    assert recorded_runs(path) == []


def test_incomplete_rows_are_not_recorded(run: PublishedRun, result: RowResult, tmp_path: Path) -> None:
    record([(run, replace(result, tier="C"))], tmp_path / "recorded.csv")
    assert recorded_runs(tmp_path / "recorded.csv") == []


@pytest.mark.parametrize(
    ("flags", "counts"),
    [("4 steps only; padded", False), ("smoke test, few steps", False), ("14 steps", True)],
)
def test_a_few_first_steps_vouch_for_nothing(
    run: PublishedRun, result: RowResult, tmp_path: Path, flags: str, counts: bool
) -> None:
    noted = PublishedRun(run.row_id, run.source, run.role, {**run.cells, "flags": flags}, run.where)
    record([(noted, result)], tmp_path / "recorded.csv")
    assert len(recorded_runs(tmp_path / "recorded.csv")) == counts


def test_a_tables_own_runs_go_before_recorded_ones(three_runs: list[ValidatedRun]) -> None:
    own, older, other = three_runs
    assert merge_runs([own], [replace(older, row_id=own.row_id), other]) == [own, other]


@pytest.fixture
def three_runs(run: PublishedRun, result: RowResult, tmp_path: Path) -> list[ValidatedRun]:
    path = tmp_path / "recorded.csv"
    record([(run, result)], path)
    (one,) = recorded_runs(path)
    return [one, replace(one, error=0.5), replace(one, row_id="b-1")]
