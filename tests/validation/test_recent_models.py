"""The page of errors by goal: means over models, and what is left out."""

from __future__ import annotations

from validation.published.recent_models import is_recent, kind_of, lines_of
from validation.published.table import PublishedRun
from zsim.study.measured.prediction import RowResult


def run(model: str, precision: str) -> PublishedRun:
    return PublishedRun("x", "x", "report", {"model": model, "precision": precision}, "row 1")


def result(error: float | None, memory: float | None = None, reason: str | None = None) -> RowResult:
    return RowResult("x", "x", "ok", reason, relative_error=error, memory_relative_error=memory)


def test_a_model_with_many_rows_counts_once() -> None:
    """A of +10 and +30 % has 20 %, B of -4 % has 4 %: 12 % over models, +12 % over rows, one beyond 25 %."""
    lines = lines_of([
        (run("A", "bf16"), result(0.1)), (run("A", "bf16"), result(0.3)), (run("B", "bf16"), result(-0.04)),
        (run("B", "nvfp4"), result(0.05, memory=-0.02)), (run("C", "fp8"), result(None, reason="no width")),
    ], "runs.csv")  # fmt: skip
    assert "| 16 bits | 3 | 2 | 12.0% | +12.0% | 1 | 8% |" in lines
    assert "| fp8 and 4 bits | 1 | 1 | 5.0% | +5.0% | 0 | 12% |" in lines
    assert "| peak memory | 1 | 1 | 2.0% | -2.0% | 0 | 6% |" in lines
    assert lines[-1] == "- 1: no width"


def test_a_goal_without_rows_is_in_the_table_and_the_tables_are_named() -> None:
    lines = lines_of([(run("A", "bf16"), result(0.1))], "runs.csv (rows to 2026-08-18)")
    assert "| peak memory | 0 | 0 | no rows |  |  | 6% |" in lines
    assert any("from runs.csv (rows to 2026-08-18)" in line for line in lines)


def test_a_dense_decoder_is_none_of_these_models() -> None:
    kinds = ("decoder", "decoder-moe", "vlm-decoder", "hybrid-mamba2-dense")
    runs = [PublishedRun("x", "x", "report", {"arch_type": kind}, "row 1") for kind in kinds]
    assert [is_recent(run) for run in runs] == [False, True, True, True]


def test_low_precisions_have_a_goal_of_their_own() -> None:
    kinds = {name: kind_of(run("A", name)) for name in ("bf16", "MXFP8", "fp8 (delayed)", "nvfp4")}
    assert kinds == {
        "bf16": "16 bits",
        **dict.fromkeys(("MXFP8", "fp8 (delayed)", "nvfp4"), "fp8 and 4 bits"),
    }
