"""docs/goodput.md is what its script finds, and Meta's formula is met where it holds."""

from __future__ import annotations

import pytest

from validation.published.goodput import LEFT_OUT, PAGE, RUNS, PublishedRun, _is_close, _row, scenario_of
from zsim.goodput.runs import run_seeds

BY_ROW = {run.row: run for run in RUNS}


@pytest.mark.parametrize("row", ["rs-0033", "rs-0235", "rs-0238"])
def test_a_line_of_the_page_is_what_its_run_gives(row: str) -> None:
    run = BY_ROW[row]
    found = run_seeds(scenario_of(run), 40)
    line = _row(run.row, run.told, run.published, found, _is_close(found, run.published), is_bound=False)
    assert line in PAGE.read_text().splitlines()


def test_the_page_counts_its_lines() -> None:
    """Every run has a line, and the number that are met is the number of lines that say so."""
    text = PAGE.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| rs-") and line.count("|") == 8]
    assert len(lines) == len(RUNS) + 2  # FT-HSDP twice
    met = sum(line.endswith("| yes |") for line in lines)
    assert f"**{met} of {len(lines)}**" in text
    assert all(f"| {rows} |" in text for rows, _, _ in LEFT_OUT)


@pytest.mark.parametrize(("nodes", "work"), [(128, 1800.0), (512, 900.0), (1024, 600.0)])
def test_ettr_by_metas_formula(nodes: int, work: float) -> None:
    """E[ETTR] = (1 - N r (u0 + dt / 2)) / (1 + w / dt), no queue (Kokolis et al., arXiv 2410.21680): to first
    order in N r, so within the square of what it says is lost; dt: between saves of w seconds."""
    write, start, rate = 5.0, 300.0, 6.5
    run = PublishedRun("", "", 0.0, nodes, rate, restart=start, work=work, blocking=write)
    per_second = rate * nodes / (1000 * 86_400)
    expected = (1 - per_second * (start + work / 2)) / (1 + write / work)
    found = run_seeds(scenario_of(run), 60)
    lost = 1 - expected
    assert found.goodput_fraction == pytest.approx(expected, abs=lost**2 + 0.003)
