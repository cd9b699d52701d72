"""The validated runs nearest to a job, and why its interval is as wide as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import hypot, log

import pytest

from tests.validated.conftest import FEATURES, estimates
from zsim.validated.runs import ValidatedRun, nearest_runs, validated_runs
from zsim.validated.validation import validation_of
from zsim.validated.width import describe_cell, dtype_of, uncounted_respects, width_stages

Make = Callable[..., ValidatedRun]


def test_runs_of_a_closer_cell_come_first_whatever_else_is_alike(make_run: Make) -> None:
    """The job is FSDP on 2 nodes of H100: an A100 of its size is further than 64 times as many H100."""
    far = make_run("a", 0.1, gpus=1024, nodes=128)
    other = make_run("b", 0.2, gpu="a100-sxm-80gb")
    found = nearest_runs(FEATURES, 8192, [other, far])
    assert [one.run for one in found] == [far, other]
    assert [one.cell for one in found] == [0, 1]


def test_within_a_cell_strategy_then_size_then_length_decide(make_run: Make) -> None:
    longer = make_run("a", 0.0, sequence_length=65536)
    bigger = make_run("b", 0.0, gpus=64)
    hsdp = make_run("c", 0.0, strategy="HSDP")
    same = make_run("d", 0.0)
    found = nearest_runs(FEATURES, 8192, [hsdp, bigger, longer, same])
    assert [one.run for one in found] == [same, longer, bigger, hsdp]


def test_one_source_does_not_fill_the_list_and_the_rest_are_counted(make_run: Make) -> None:
    runs = [*(make_run("many", 0.1) for _ in range(5)), make_run("few", 0.0, gpus=512)]
    found = nearest_runs(FEATURES, 8192, runs, per_source=2)
    assert [one.run.source for one in found] == ["many", "many", "few"]
    assert [one.more for one in found] == [3, 3, 0]


def test_an_error_is_predicted_over_measured_less_one(make_run: Make) -> None:
    """A run measured at 1.25 of the prediction: zsim is 20 % too fast."""
    (found,) = nearest_runs(FEATURES, None, [make_run("a", log(1.25))])
    assert found.error == pytest.approx(-0.2)


def test_the_last_stage_is_the_interval_that_is_printed() -> None:
    """Of every kind of shipped job, known and unknown, the stages end where `validation_of` does."""
    jobs = {run.features.cells[1]: run.features for run in validated_runs()}
    beyond = replace(FEATURES, gpu="gb300", gpus=2**14, nodes=2**11, fabric="EFA", strategy="MiCS")
    for job in [*jobs.values(), beyond]:
        known, last = validation_of(job), width_stages(job)[-1]
        assert (last.low, last.high) == (known.low, known.high)


def test_stages_only_widen_and_say_why(make_run: Make) -> None:
    """One source like the job; nobody ran so many GPUs, 4 doublings more; the loss is left open."""
    runs = [make_run("own", 0.01)]
    numbers = estimates({"any run": 0.05, "several nodes": 0.01}, {"gpus": 0.02}, {"loss": 0.07})
    job = replace(FEATURES, gpus=256, open_settings=("loss", "compile"))
    stages = width_stages(job, runs, numbers)
    assert [stage.why for stage in stages] == [
        "what any run costs, by the errors of 1 run of 1 source, each as a stranger would have written it",
        "several nodes",
        "more GPUs than any validated run of FSDP (16)",
        "whose kernels compute the loss is not stated",
    ]
    assert all(one.low >= other.low and one.high <= other.high for one, other in pairwise(stages))
    assert [log(stage.high) for stage in stages] == pytest.approx([0.05, 0.06, 0.14, hypot(0.14, 0.07)])


def test_a_cell_is_named_with_what_makes_it_one() -> None:
    job = replace(FEATURES, is_mixture=True)
    words = "FSDP over several nodes, FSDP2, of a mixture of experts"
    assert describe_cell(job, 0) == f"{words}, on H100 bound by kernels"
    assert describe_cell(job, 1) == words
    assert describe_cell(job, 2) == "FSDP over several nodes"
    assert describe_cell(job, 3) == "runs of any framework over several nodes"
    assert describe_cell(job, 4) == "all runs"


def test_length_and_precision_beyond_the_runs_are_said(make_run: Make) -> None:
    runs = [make_run("a", 0.0), make_run("b", 0.0, training="amp_fp8, none")]
    assert uncounted_respects(FEATURES, 16384, "bf16", runs) == ()
    assert uncounted_respects(FEATURES, 16385, "fp16", runs) == (
        "sequences of 16,385: the longest of a validated run of FSDP is 8,192",
        "fp16: the validated runs of FSDP are in bf16, fp8",
    )
    assert uncounted_respects(replace(FEATURES, framework="MXNet"), 10**6, "fp16", runs) == ()


@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        ("amp_bf16, none, torch 1.12", "bf16"),
        ("fp8-linear + fp8 all-gather, none", "fp8"),
        ("bf16 + fp32 grad accumulation, none", "bf16"),
        ("fp16, full-layer, torch", "fp16"),
        ("full-layer", ""),
    ],
)
def test_a_runs_precision_is_read_from_its_words(training: str, dtype: str) -> None:
    assert dtype_of(training) == dtype
