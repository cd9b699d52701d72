"""The report in three lines, and the length of a run in samples and epochs."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import zsim
from zsim.errors import InputError
from zsim.report.views.text.brief import brief_lines
from zsim.report.views.text.report import print_report
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment

SMALL: dict[str, Any] = {
    "model": "gpt2", "cluster": "dgx-h100", "gpus": 8,
    "training": {"sequence_length": 1024, "micro_batch_size": 2, "gradient_accumulation_steps": 3},
}  # fmt: skip


def test_three_lines_answer_fit_time_and_money() -> None:
    """1e9 tokens at the step's rate; the money is the GPU-hours times the price."""
    report = zsim.simulate(Experiment(**SMALL, cost={"tokens": 1e9, "gpu_hour_price": 2.0})).report
    fit, step, run = brief_lines(report)
    assert fit.startswith("FITS  ")
    assert "% likely: gpt2, " in fit
    low, high = report.step_seconds_range or (0.0, 0.0)
    assert step.startswith("step ")
    assert low < report.step_seconds < high
    assert f"{report.tokens_per_second_per_gpu:,.0f} tokens/s/GPU" in step
    minutes = 1e9 / report.step_tokens * report.step_seconds / 60
    assert 2 < minutes < 120
    assert run.startswith(f"1B tokens: {minutes:,.1f} min (")
    assert run.endswith("USD")


def test_less_than_one_step_takes_one() -> None:
    """10 sequences of the step's 48, or 10,240 tokens of 49,152."""
    report = zsim.simulate(Experiment(**SMALL, cost={"samples": 10, "gpu_hour_price": 2.0})).report
    assert report.cost is not None
    assert report.cost.days == pytest.approx(report.step_seconds / 86400)
    assert report.cost.money == report.cost.step_money
    *_, run = brief_lines(report)
    seconds = f"{report.step_seconds:,.1f} s"
    assert run.startswith(f"10,240 tokens, less than one step, which takes {seconds} (")


def test_a_verdict_in_doubt_says_its_odds() -> None:
    report = zsim.simulate(Experiment(**SMALL)).report
    assert report.allocator is not None
    short = replace(report, allocator=replace(report.allocator, retries=2))
    assert short.verdict.word == "runs short"
    fit, *_ = brief_lines(short)
    assert f"{short.verdict.probability * 100:.0f} % that it fits" in " ".join(fit.split())


def test_a_run_without_a_length_is_answered_for_a_billion_tokens() -> None:
    *_, run = brief_lines(zsim.simulate(Experiment(**SMALL)).report)
    assert run.startswith("1B tokens: ")
    assert " ".join(run.split()).endswith("; --tokens N or --samples N")


def test_samples_and_epochs_are_tokens_of_full_sequences() -> None:
    """8 ranks with 2 sequences of 1,024 tokens, 3 times: 48 sequences a step. 4,800 of them, twice: 200
    steps."""
    report = zsim.simulate(Experiment(**SMALL, cost={"samples": 4800, "epochs": 2})).report
    assert report.cost is not None
    assert report.cost.tokens == 2 * 4800 * 1024
    assert report.cost.days == pytest.approx(200 * report.step_seconds / 86400)


def test_samples_of_padded_documents_are_the_documents_own_tokens() -> None:
    """Lengths 256 and 768 equally often: a sample has 512 tokens, whatever the padding."""
    lengths = {"documents": [256, 768], "batching": "padded"}
    training = {**SMALL["training"], "lengths": lengths}
    report = zsim.simulate(Experiment(**{**SMALL, "training": training}, cost={"samples": 1000})).report
    assert report.cost is not None
    assert report.cost.tokens == pytest.approx(512_000, rel=0.05)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"tokens": 1e9, "samples": 10}, "found both tokens and samples"),
        ({"epochs": 3}, "found epochs of no data set"),
        ({"samples": 0}, "cost.samples: found 0, expected greater than or equal to 1"),
        ({"samples": 2.5}, "cost.samples: found 2.5, expected a whole number"),
    ],
)
def test_lengths_that_contradict_are_refused(cost: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_experiment({**SMALL, "cost": cost}, {}, origin="test")


def test_of_many_notes_the_first_is_told_and_the_others_are_counted() -> None:
    report = zsim.simulate(Experiment(**SMALL)).report
    *_, last = brief_lines(replace(report, input_notes=("one",)))
    assert last == "note: one"
    *_, last = brief_lines(replace(report, input_notes=("one", "two", "three")))
    assert last == "note: one (and 2 more without --brief)"


def test_the_short_report_is_a_screen() -> None:
    """40 lines of 80 columns: what does not fit is counted and told with --full."""
    report = zsim.simulate(Experiment(**SMALL)).report
    notes = tuple(f"note {number} " + "of some length " * 8 for number in range(8))
    report = replace(report, input_notes=notes, notes=(*notes, *report.notes))

    def shown(*, is_full: bool) -> list[str]:
        text = io.StringIO()
        console = Console(file=text, width=80, highlight=False, emoji=False, color_system=None)
        print_report(report, console, is_full=is_full)
        return text.getvalue().splitlines()

    short = shown(is_full=False)
    assert len(short) <= 40
    assert any(line.startswith("note: note 0 ") for line in short)
    told = sum(line.startswith("note: note ") for line in short)
    assert f"notes: {8 - told} more on what was asked" in " ".join(" ".join(short).split())
    assert sum(line.startswith("note: note ") for line in shown(is_full=True)) == 8
