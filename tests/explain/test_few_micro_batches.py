"""A pipeline of which some micro-batches are simulated, against the same pipeline simulated whole."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.engine.micro_batches import simulate_step
from zsim.explain.report_of import report_of_step
from zsim.report.report import Report
from zsim.report.views.html.pipeline import schedule_caption
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def report(**simulation: Any) -> Report:
    """GPT-2 on 2 pipeline ranks, 16 micro-batches; 2 of them fill the pipeline, 2 go round once more."""
    job = resolve(
        Experiment(
            model="gpt2",
            cluster="dgx-h100",
            gpus=4,
            training={"sequence_length": 1024, "micro_batch_size": 8, "gradient_accumulation_steps": 16},
            strategy={"kind": "megatron"},
            parallelism={"pipeline": 2},
            simulation=simulation,
        )
    )
    return report_of_step(simulate_step(job), 0.0)


def test_a_step_of_which_few_micro_batches_are_simulated_has_the_bubbles_of_the_whole() -> None:
    few, whole = report(every_micro_batch=False), report()
    assert few.pipeline is not None
    assert whole.pipeline is not None
    assert (few.pipeline.drawn_micro_batches, whole.pipeline.drawn_micro_batches) == (4, 16)
    assert few.pipeline.micro_batches == whole.pipeline.micro_batches == 16
    assert few.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert few.pipeline.bubble_fraction == pytest.approx(whole.pipeline.bubble_fraction, rel=1e-2)
    for own, other in zip(few.pipeline.rows, whole.pipeline.rows, strict=True):
        assert own.busy_seconds == pytest.approx(other.busy_seconds, rel=1e-3)
        assert own.peak == other.peak
    assert few.rank == whole.rank
    assert sum(few.breakdown.seconds.values()) == pytest.approx(few.step_seconds, rel=1e-3)
    assert few.pipeline.drawn_seconds < few.step_seconds
    assert "16 micro-batches, of which 4 are simulated and drawn: bubbles" in schedule_caption(few.pipeline)
    assert schedule_caption(whole.pipeline).startswith("16 micro-batches: bubbles")
