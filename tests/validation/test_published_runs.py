"""validation/published/goodput.md is what its script finds, and Meta's formula is met where it holds."""

from __future__ import annotations

import pytest

from validation.published.goodput import (
    LEFT_OUT,
    LLAMA,
    PAGE,
    RUNS,
    PublishedRun,
    _is_close,
    _row,
    scenario_of,
)
from zsim.engine.micro_batches import simulate_step
from zsim.explain.report_of import report_of_step
from zsim.goodput.runs import run_seeds
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve

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


def test_the_step_of_llama_3_405b_is_about_as_fast_as_published() -> None:
    """Interleaved, on 16,384 H100: 400 TFLOP/s a GPU and 41 % MFU in the paper's Table 4, 38 to 43 % in all;
    1F1B would be 226 TFLOP/s. A step is 6.76 s at 400. Megatron-Core's gradients of 405.9e9 / 128 parameters
    are 12.7 GB in fp32, and the activations of 16 micro-batches are whole."""
    job = resolve(load_experiment(LLAMA))
    report = report_of_step(simulate_step(job), 0.0)
    flops, mfu = report.model_flops_per_second_per_gpu, report.mfu_fraction
    assert flops is not None
    assert mfu is not None
    assert job.parallelism.virtual_stages == 4
    assert job.parallelism.layers_per_stage == (1, *[2] * 62, 1)
    assert flops == pytest.approx(400e12, rel=0.1)
    assert 0.38 < mfu < 0.45
    assert report.step_seconds == pytest.approx(6.76, rel=0.1)
    assert report.peaks["gpu"].by_category["gradients"] == pytest.approx(12.7e9, rel=0.02)
    assert report.peaks["gpu"].by_category["activations"] > 60e9
    assert not report.fits
