"""The error bar of an offloaded step."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import zsim
from zsim.engine.simulate import simulate_job
from zsim.explain import variants as module
from zsim.explain.variants import no_range_note, offload_range
from zsim.report.views.html.figures import range_sentence
from zsim.report.views.text.report import print_report
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.units import format_bytes, format_seconds

CPU = {"device": "cpu"}


def experiment_of(**zero: Any) -> zsim.Experiment:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return zsim.Experiment(
        model="gpt2", cluster="dgx-h100", gpus=4, training={"sequence_length": 256, "micro_batch_size": 1},
        strategy={"config": config},
    )  # fmt: skip


def test_the_step_lies_between_its_ends_and_the_report_says_so() -> None:
    report = zsim.simulate(experiment_of(offload_optimizer=CPU)).report
    assert report.offload is not None
    assert report.offload.range_seconds is not None
    fast, slow = report.offload.range_seconds
    assert fast < report.step_seconds < slow
    assert report.to_dict()["offload"]["range_seconds"] == (fast, slow)
    assert report.evidence["offload"] == "assumed"


def test_a_step_that_offloads_nothing_has_none() -> None:
    assert offload_range(simulate_job(resolve(experiment_of()))) is None


def test_a_table_that_says_nothing_of_pinned_memory_may_mean_it(tmp_path: Path) -> None:
    """Its fast end is that of pinned memory, and a note says so. A file of the user's means what it says."""

    def fast_end(experiment: zsim.Experiment) -> float:
        ends = offload_range(simulate_job(resolve(experiment)))
        assert ends is not None
        return ends[0]

    silent, pinned, pageable = (
        experiment_of(offload_optimizer={**CPU, **keys})
        for keys in ({}, {"pin_memory": True}, {"pin_memory": False})
    )
    old = [change_experiment(each, {"strategy.version": "0.19.2"}) for each in (silent, pinned, pageable)]
    assert fast_end(old[0]) == fast_end(old[1]) < fast_end(old[2])
    assert any(note.startswith("pin_memory is left out") for note in zsim.simulate(old[0]).report.notes)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(silent.strategy.config), encoding="utf-8")  # type: ignore[attr-defined]
    file = change_experiment(old[0], {"strategy.config": str(path)})
    assert fast_end(file) == fast_end(old[2])


def test_a_long_plan_is_not_run_again(monkeypatch: Any) -> None:
    outcome = simulate_job(resolve(experiment_of(offload_optimizer=CPU)))
    assert no_range_note(outcome) is None
    monkeypatch.setattr(module, "_MAX_OPS", len(outcome.plan.ops) - 1)
    assert offload_range(outcome) is None


def test_a_range_that_is_missing_is_missed_in_a_note(monkeypatch: Any) -> None:
    """The note says why, and what to do; a report with the range, or without offloading, has no such note."""
    offloaded = experiment_of(offload_optimizer=CPU)
    missed = "no range is given for the offloaded step: "
    assert not any(missed in note for note in zsim.simulate(offloaded).report.notes)
    monkeypatch.setattr(module, "_MAX_OPS", 100)
    assert not any(missed in note for note in zsim.simulate(experiment_of()).report.notes)
    report = zsim.simulate(offloaded).report
    assert report.offload is not None
    assert report.offload.range_seconds is None
    count = len(simulate_job(resolve(offloaded)).plan.ops)
    assert report.notes[-1] == (
        f"{missed}its plan of {count:,} ops is too long to be run twice more; zsim sensitivity turns PCIe, "
        "host memory, CPU and drives one at a time"
    )


def test_drawn_and_shared_steps_say_why_they_have_no_range() -> None:
    outcome: Any = simulate_job(resolve(experiment_of(offload_optimizer=CPU)))
    drawn, shared = replace(outcome, jitter_run=object()), replace(outcome, concurrent_jobs=(object(),))
    for other, why in ((drawn, "the step is drawn with jitter"), (shared, "other jobs share the cluster")):
        assert offload_range(other) is None
        assert f"offloaded step: {why}; zsim sensitivity" in (no_range_note(other) or "")


def test_the_range_has_a_line_of_its_own_and_page_locked_memory_stands_with_the_hosts() -> None:
    report = zsim.simulate(experiment_of(offload_optimizer={**CPU, "pin_memory": True})).report
    assert report.offload is not None
    assert report.offload.range_seconds is not None
    fast, slow = map(format_seconds, report.offload.range_seconds)
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=80, highlight=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    said = " ".join(text.split())
    assert f"weakest), the step takes {fast} to {slow}; the step range (80 %) counts that" in said
    assert "step range " in said[: said.index("weakest)")]  # the line that it speaks of
    alone = replace(report, validation=None)
    assert range_sentence(alone, report.offload).endswith(f"the step takes {fast} to {slow}.")
    host = text[text.index("Host memory, fullest node") :].split("\n\n")[0]
    (line,) = [line for line in host.splitlines() if "page-locked" in line]
    assert line.split() == ["of", "it", "page-locked", *format_bytes(report.offload.pinned_bytes).split()]
    unpinned = zsim.simulate(experiment_of(offload_optimizer={**CPU, "pin_memory": False})).report
    stream = io.StringIO()
    print_report(unpinned, Console(file=stream, width=80, highlight=False))
    assert "page-locked" not in stream.getvalue()
