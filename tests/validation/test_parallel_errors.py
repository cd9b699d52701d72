"""validation/published/parallel.py: the table of errors that grows row by row, and its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from validation.published import parallel
from validation.published.table import PublishedRun
from zsim.study.measured.prediction import RowResult

FAST = RowResult(
    "a-1", "a", "ok", measured_seconds=2.0, predicted_seconds=1.9, relative_error=-0.05, role="report",
    tier="A", framework="Megatron", parallelism="TP", memory_kind="allocated", memory_relative_error=0.02,
)  # fmt: skip
SLOW = replace(FAST, row_id="b-1", source="b", predicted_seconds=2.3, relative_error=0.15, role="calibrate")
SKIPPED = RowResult("c-1", "c", "skipped", reason="7 GPUs, no network", role="report", tier="B")


def run_of(**cells: str) -> PublishedRun:
    return PublishedRun(cells["row_id"], "s", cells.get("role", "report"), cells, "runs.csv: line 2")


RUNS = [run_of(row_id="a-1"), run_of(row_id="b-1"), run_of(row_id="c-1")]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the rows that are recorded, call by call, with a table of errors in `tmp_path`."""
    calls: list[list[str]] = []
    monkeypatch.setattr(parallel, "TABLE", tmp_path / "errors.csv")
    monkeypatch.setattr(
        parallel, "record", lambda pairs: calls.append([run.row_id for run, row in pairs if row.row_id])
    )
    return calls


@pytest.mark.usefixtures("recorded")
def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    parallel.append(RUNS[:1], iter([FAST]), float("inf"))
    parallel.append(RUNS[1:], iter([SKIPPED, SLOW]), float("inf"))
    assert list(parallel.read_errors(tmp_path / "errors.csv").values()) == [FAST, SKIPPED, SLOW]


def test_no_row_is_begun_after_the_time_is_over(recorded: list[list[str]], tmp_path: Path) -> None:
    rows = iter([FAST, SLOW])
    parallel.append(RUNS, rows, 0.0)
    assert list(parallel.read_errors(tmp_path / "errors.csv")) == ["a-1"]
    assert next(rows) is SLOW
    assert recorded == [["a-1"]]


def test_what_is_interrupted_is_recorded_as_far_as_it_is_in_the_table(
    recorded: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded one by one, and the third is not made."""

    def rows() -> Iterator[RowResult]:
        yield FAST
        yield SLOW
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "_RECORDED_AT_ONCE", 1)
    with pytest.raises(KeyboardInterrupt):
        parallel.append(RUNS, rows(), float("inf"))
    assert [name for call in recorded for name in call] == ["a-1", "b-1"]
    assert list(parallel.read_errors(tmp_path / "errors.csv")) == ["a-1", "b-1"]


def test_chosen_rows_share_a_replica_of_a_dense_model() -> None:
    runs = [
        run_of(row_id="tp", tp="2"),
        run_of(row_id="pp", pp="4", ep="1"),
        run_of(row_id="alone", tp="1"),
        run_of(row_id="experts", tp="2", notes="moe{8}"),
        run_of(row_id="expert-parallel", pp="2", ep="2"),
        run_of(row_id="trend", tp="2", role="trend"),
    ]
    assert sorted(run.row_id for run in parallel.chosen(runs)) == ["pp", "tp"]


def test_the_page_has_unfitted_rows_apart_and_every_reason() -> None:
    text = "\n".join(parallel.page([FAST, SLOW, SKIPPED]))
    report, whole = text.split("## All rows")
    assert "| a | 1 | -5.0% | 5.0% |" in " ".join(report.split())
    assert "| b |" not in report
    assert "| b | 1 | +15.0% | 15.0% |" in " ".join(whole.split())
    assert "1 of 3 rows of tiers A and B" in whole
    assert "n GPUs, no network" in whole
