"""Errors by framework and parallelism, and as means over sources."""

from __future__ import annotations

import pytest

from validation.published.frameworks import framework_lines
from validation.published.parallelism import kind_of_parallelism
from validation.published.table import PublishedRun
from zsim.study.measured.prediction import RowResult, mean_of_sources, summarise


def row(source: str, error: float | None, framework: str = "Megatron", parallelism: str = "TP") -> RowResult:
    return RowResult("r", source, "ok", relative_error=error, framework=framework, parallelism=parallelism)


def test_sources_count_alike_however_many_rows_they_have() -> None:
    """One source of four rows, all +10 %, and one of a row of -30 %: mean 14 % over rows, 20 % over sources;
    bias 2 % and -10 %."""
    rows = [*(row("many", 0.1) for _ in range(4)), row("one", -0.3), row("none", None)]
    assert mean_of_sources(rows) == {
        "mean_absolute_error": pytest.approx(0.2),
        "median_absolute_error": pytest.approx(0.2),
        "bias": pytest.approx(-0.1),
    }
    assert summarise(rows)["mean_absolute_error"] == pytest.approx(0.14)
    assert summarise(rows)["mean_of_sources"]["bias"] == pytest.approx(-0.1)
    assert mean_of_sources([]) == {"mean_absolute_error": None, "median_absolute_error": None, "bias": None}


def test_the_tables_split_by_framework_and_by_what_ranks_share() -> None:
    rows = [
        row("a", 0.05),
        row("a", -0.15),
        row("b", 0.2, "nanotron", "mixed"),
        row("c", 0.01, "FSDP", "data parallel"),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in framework_lines(rows)]
    cells = {line[0]: line[1:] for line in lines if len(line) > 4}
    assert cells["Megatron, TP"][:4] == ["2", "1", "10.0%", "10.0%"]
    assert cells["Megatron, TP"][6:9] == ["-5.0%", "-5.0%", "50%"]
    assert cells["nanotron, mixed"][:3] == ["1", "1", "20.0%"]
    assert "FSDP, data parallel" not in cells
    assert cells["FSDP"][:3] == ["1", "1", "1.0%"]
    assert cells["mixed"][0] == "1"


def test_without_shared_replicas_there_is_the_first_table_only() -> None:
    lines = framework_lines([row("c", 0.01, "FSDP", "data parallel")])
    assert [line for line in lines if line.startswith("## ")] == ["## By framework"]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"tp": "8", "pp": "1"}, "TP"),
        ({"tp": "1", "pp": "4.0"}, "PP"),
        ({"cp": "2"}, "CP"),
        ({"tp": "8", "cp": "2"}, "mixed"),
        ({}, "data parallel"),
    ],
)
def test_a_row_says_what_its_ranks_share(cells: dict[str, str], kind: str) -> None:
    assert kind_of_parallelism(PublishedRun("r", "s", "", cells, "")) == kind
