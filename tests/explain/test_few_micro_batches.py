"""A pipeline of which some micro-batches are simulated, against the same pipeline simulated whole."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.engine.micro_batches import simulate_step
from zsim.explain.notes import domains_note
from zsim.explain.report_of import report_of_step
from zsim.explain.variants import full_variants
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
    rows = (whole.notes, whole.ranks, whole.jobs, whole.gpu_types)
    assert all(isinstance(each, tuple) for each in rows), "a frozen report would hold what changes"
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


# -- NVLink domains of several nodes: how a report says that a job does not fill them ----------------------


def note(count: int, cluster: str = "gb200-nvl72", **placement: object) -> str | None:
    experiment = Experiment(model="llama-3-8b", cluster=cluster, nodes=count, placement=placement)
    return domains_note(resolve(experiment))


@pytest.mark.parametrize("nodes", [18, 36])
def test_a_job_that_fills_its_domains_says_nothing(nodes: int) -> None:
    assert note(nodes) is None


def test_a_job_on_part_of_a_domain_says_how_many_gpus_are_left() -> None:
    """Four of 18 trays of four GPUs: 14 x 4 are left."""
    assert note(4) == (
        "the job has 4 of the 18 nodes of an NVLink domain: 56 of its GPUs are left to others, or empty"
    )


def test_a_job_over_a_domain_and_a_bit_is_uneven() -> None:
    """19 nodes have no equal segments: 18 are in the first domain and one in the second, whose other 17 x 4
    GPUs are left."""
    sentence = note(19)
    assert sentence is not None
    assert "1 to 18 of the 18 nodes of its 2 NVLink domains, unevenly" in sentence
    assert "68 of their GPUs" in sentence


def test_a_job_of_several_domains_has_equal_segments() -> None:
    """20 nodes are twice ten, 256 sixteen times 16."""
    assert "10 of the 18 nodes of each of its 2 NVLink domains" in str(note(20))
    assert "16 of the 18 nodes of each of its 16 NVLink domains" in str(note(256))


def test_equal_parts_of_domains_are_not_uneven() -> None:
    """Nine nodes of each of two domains."""
    found = note(18, nodes=[*range(9), *range(18, 27)], fabric_nodes=36)
    assert found is not None
    assert "9 of the 18 nodes of each of its 2 NVLink domains;" in found
    assert "72 of their GPUs" in found


def test_nodes_of_one_domain_each_have_none_to_fill() -> None:
    assert note(3, "dgx-h100") is None
