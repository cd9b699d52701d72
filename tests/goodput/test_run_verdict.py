"""Whether the steps of a run fit is said first, wherever the run is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.goodput.views import goodput_lines
from zsim.report.fit import fit_of
from zsim.report.memory import allocator_notes
from zsim.study.whole_runs import RunResult, simulate_run
from zsim.ui.whole_run import run_sentences

SAVES = {"every": 100, "blocking": "1 s", "load": "5 s", "bytes": "10 GB"}
LONG, SHORT = 65_536, 512
TOO_LONG = f"""
model = "llama-3-8b"
cluster = "dgx-h100"
nodes = 1

[training]
sequence_length = {LONG}

[strategy]
kind = "fsdp2"

[run]
steps = 1000
seeds = 2

[run.checkpoint]
every = 100
blocking = "1 s"
load = "5 s"
bytes = "10 GB"
"""


def run_of(lengths: tuple[int, ...]) -> RunResult:
    """A run whose phases have these sequences, in tokens."""
    phases = [{"tokens": "10M", "sequence_length": length} for length in lengths]
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=1, strategy={"kind": "fsdp2"},
        training={"sequence_length": lengths[0]},
        run={"phases": phases, "seeds": 2, "checkpoint": SAVES, "failures": {"per_1000_node_days": 0}},
    )  # fmt: skip
    return zsim.simulate_run(experiment, compares=False)


@pytest.fixture(scope="module")
def short() -> RunResult:
    return run_of((SHORT, LONG))


def test_a_run_that_fits_says_so_below_its_name() -> None:
    found = run_of((SHORT,))
    lines = list(goodput_lines(found))
    assert lines[1].startswith("FITS  ")
    assert found.to_dict()["fits"] is True
    assert found.to_dict()["out_of_memory"] is None
    assert found.headline().endswith(" Fits.")


def test_the_phase_that_does_not_fit_is_named_first(short: RunResult) -> None:
    """Sequences of 512 tokens fit, those of 65,536 in the second phase do not."""
    lines = list(goodput_lines(short))
    words = fit_of(short.prepared.phases[1].result.report).words
    assert lines[1].startswith("DOES NOT FIT (phase 2)  GPU memory: ")
    assert " ".join(words.split()) in " ".join(" ".join(lines).split())
    assert short.to_dict()["fits"] is False
    assert short.to_dict()["out_of_memory"]["pool"] == "gpu"
    assert "DOES NOT FIT (phase 2)" in short.page()
    assert "DOES NOT FIT (phase 2)" in " ".join(run_sentences(short))
    assert short.headline().endswith(" Does not fit.")


def test_a_job_that_does_not_fit_is_as_run_says_it_and_ends_with_1(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text(TOO_LONG)
    told = CliRunner().invoke(app, ["goodput", str(file), "--jobs", "1"])
    assert told.exit_code == 1
    assert told.output.splitlines()[1].startswith("DOES NOT FIT  GPU memory: ")
    found = CliRunner().invoke(app, ["goodput", str(file), "--jobs", "1", "--json", "-"])
    assert found.exit_code == 1
    content: dict[str, Any] = json.loads(found.output)
    assert content["fits"] is False
    step = CliRunner().invoke(app, ["run", str(file)])
    assert step.exit_code == 1
    begin = "GPU memory: "
    first, given = (
        " ".join(text[text.index(begin) :].split()).split(",")[0] for text in (step.output, told.output)
    )
    assert first == given


def test_nothing_of_a_runs_text_measures_error_but_the_interval(short: RunResult) -> None:
    said = " ".join(" ".join(goodput_lines(short)).split())
    assert "(80 %)" in said
    assert "at worst" not in said
    assert "off in the mean" not in said


def test_every_way_to_a_run_judges_the_same_step(short: RunResult) -> None:
    again: RunResult = simulate_run(short.prepared.experiment, seeds=2, compares=False)
    assert again.fits is short.fits is False
    assert again.tightest_report.step_seconds == short.tightest_report.step_seconds


def test_the_notes_that_the_verdict_refers_to_are_printed(
    short: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = short.prepared.phases[0]
    report = first.result.report
    assert report.allocator is not None
    row = replace(report.allocator, retries=2)
    notes = tuple(allocator_notes(row, is_expandable=False))
    tight = replace(report, allocator=row, notes=(*report.notes, *notes))
    phase = replace(first, result=replace(first.result, report=tight))
    monkeypatch.setattr(short.prepared, "phases", (phase,))
    told = " ".join(" ".join(goodput_lines(short)).split())
    assert "see the notes" in told
    assert all(" ".join(f"note: {note}".split()) in told for note in notes)
