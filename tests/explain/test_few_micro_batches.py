"""A pipeline of which some micro-batches are simulated, against the same pipeline simulated whole."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.engine.micro_batches import simulate_step
from zsim.explain.report_of import report_of_step
from zsim.explain.sampled_micro_batches import full_variants
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


def routing_ends(**simulation: Any) -> tuple[float, float]:
    """OLMoE's shape with a quarter of its layers over 8 GPUs, 12 micro-batches: the step with even and with
    uneven loads of experts, over the step."""
    job = resolve(
        Experiment(
            model={
                "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": 50304,
                "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024,
                "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
            },
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 4096, "micro_batch_size": 4, "gradient_accumulation_steps": 12},
            strategy={"kind": "megatron", "moe_grouped_gemm": True},
            parallelism={"expert": 8, "dispatcher": "all-to-all"},
            simulation=simulation,
        )
    )  # fmt: skip
    step = simulate_step(job)
    validation = report_of_step(step, 0.0, full_variants(step)).validation
    assert validation is not None
    (routing,) = [one for one in validation.inputs if one.what == "how even the router is"]
    return routing.fast, routing.slow


def test_even_and_uneven_routing_are_of_the_whole_step_where_few_micro_batches_are_simulated() -> None:
    few, whole = routing_ends(every_micro_batch=False), routing_ends()
    assert few == pytest.approx(whole, rel=5e-3)
    assert 0.5 < few[0] < 1 < few[1]
