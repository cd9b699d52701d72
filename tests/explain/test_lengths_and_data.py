"""Reports of steps whose documents differ in length, and of steps that wait for their samples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import zsim
from zsim.explain.job import step_work
from zsim.plan.ops import Kernels
from zsim.report.report import Report
from zsim.specs.experiment.resolve import resolve


def simulated(data: Any = None, **training: Any) -> Report:
    experiment = zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 2048, **training},
        data=data or {},
    )
    return zsim.simulate(experiment).report


def attention_flops(**training: Any) -> float:
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", nodes=1, training={"sequence_length": 2048, **training}
    )
    works = [op.work for op in zsim.make_plan(experiment).programs[0].ops if isinstance(op.work, Kernels)]
    kernels = [kernel for work in works for kernel in work.kernels]
    return sum(kernel.flops for kernel in kernels if kernel.kind == "attention_forward")


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_equal_lengths_are_the_fixed_length(batching: str) -> None:
    plain = simulated()
    equal = simulated(lengths={"documents": [2048], "batching": batching})
    assert equal.step_seconds == pytest.approx(plain.step_seconds, rel=1e-12)
    same = pytest.approx(plain.tokens_per_second_per_gpu, rel=1e-12)
    assert equal.tokens_per_second_per_gpu == same
    found = equal.to_dict()["lengths"]
    assert found["padded_tokens_per_second_per_gpu"] == same
    assert "lengths" not in plain.to_dict()


def test_packing_saves_the_pairs_between_documents() -> None:
    """Llama-3.2-1B: 16 layers of 32 heads of 64; 2,048 tokens of four documents of 512: 4 x 512^2 / 2 pairs,
    4 x 64 FLOPs each."""
    packed = {"law": "constant", "mean": 512}
    assert attention_flops(lengths=packed) == 16 * 32 * (4 * 512**2 / 2) * 4 * 64
    assert attention_flops() == 4 * attention_flops(lengths=packed)
    whole = attention_flops(lengths={**packed, "attention_by_document": False})
    assert whole == attention_flops()


def test_tokens_are_those_of_documents_and_with_padding() -> None:
    """Half of the documents are half as long: padded to the longest of two, a quarter of the batches has none
    of 2,048; real tokens are 3/4 of 2,048."""
    report = simulated(
        lengths={"documents": [1024, 2048], "batching": "padded"},
        micro_batch_size=2,
        gradient_accumulation_steps=4,
    )
    found = report.to_dict()["lengths"]
    assert found["padding_fraction"] == pytest.approx(1 - 0.75 / 0.875, abs=0.02)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(
        found["padded_tokens_per_second_per_gpu"] * 0.75 / 0.875, rel=0.02
    )
    assert any("of the tokens are padding" in note for note in report.notes)


@seed(41)
@settings(max_examples=25, deadline=None)
@given(
    law=st.sampled_from(
        [
            {"law": "exponential", "mean": 400.0},
            {"law": "exponential", "mean": 20.0},
            {"law": "uniform", "low": 3, "high": 40},
            {"law": "lognormal", "median": 30.0, "sigma": 1.0},
            {"law": "constant", "mean": 12.0},
        ]
    ),
    batching=st.sampled_from(["packed", "padded"]),
    drawn=st.integers(0, 1000),
    length=st.sampled_from([1, 17, 64]),
    sequences=st.integers(1, 3),
)
def test_padding_is_a_part_of_the_tokens_and_none_where_a_sequence_is_alone(
    law: dict[str, Any], batching: str, drawn: int, length: int, sequences: int
) -> None:
    """Documents of one sequence are as long as the longest of it, and packed ones fill theirs. Means over
    drawn steps are no whole tokens: 16.53 were counted as 17, so that less than nothing was padding."""
    lengths = {**law, "batching": batching, "seed": drawn}
    training = {"sequence_length": length, "micro_batch_size": sequences, "lengths": lengths}
    found = zsim.Experiment(
        model="gpt2", cluster="dgx-h100", gpus=2, training=training, strategy={"kind": "ddp"}
    )
    padding = step_work(resolve(found)).padding
    assert padding is not None
    fraction = padding.to_dict(1.0, 1)["padding_fraction"]
    assert 0 <= fraction < 1
    if batching == "packed" or sequences == 1:
        assert fraction == 0


def test_a_step_that_waits_for_its_samples_says_so() -> None:
    """Eight sequences at two a second: 4 s, hidden but for the step itself."""
    plain, waits = simulated(), simulated({"samples_per_second_per_host": 2.0})
    assert waits.step_seconds == pytest.approx(4.0)
    assert waits.breakdown.seconds["data_loading"] == pytest.approx(4.0 - plain.step_seconds)
    assert sum(waits.breakdown.seconds.values()) == pytest.approx(waits.step_seconds)
    assert waits.limit.startswith("Bound by data loading")
    ready = simulated({"samples_per_second_per_host": 1e4})
    assert ready.step_seconds == plain.step_seconds
    assert "data_loading" not in plain.to_dict()["breakdown_seconds"]
