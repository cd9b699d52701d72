"""The table of validated runs, which of them are like a job, the nearest, and how wide its interval is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import hypot, log
from typing import Any

import numpy as np
import pytest

from tests.validated.conftest import FEATURES, estimates
from validation.published.shipped import format_validated_table
from zsim.validated.features import binding_of
from zsim.validated.runs import (
    BLIND,
    FIRST_DISSIMILAR_CELL,
    ValidatedRun,
    nearest_runs,
    quantiles,
    read_validated,
    similar_runs,
    validated_runs,
)
from zsim.validated.validation import validation_of
from zsim.validated.width import describe_cell, dtype_of, uncounted_respects, width_stages

Make = Callable[..., ValidatedRun]


def test_a_table_reads_back_as_it_was_written(make_run: Make) -> None:
    runs = (make_run("one", 0.12345, fabric="", training='bf16, "full", none'), make_run("two", -0.5))
    assert read_validated(format_validated_table(runs)) == runs


def test_a_table_of_other_columns_is_not_read(make_run: Make) -> None:
    with pytest.raises(ValueError, match="other columns"):
        read_validated("row_id,source\na,b\n")


@pytest.mark.parametrize(
    ("shares", "retries", "binding"),
    [
        ({"compute": 0.9, "exposed_communication": 0.08}, 0, "kernels"),
        ({"compute": 0.8, "exposed_communication": 0.2}, 0, "the network"),
        ({"compute": 0.8, "exposed_communication": 0.12, "offload_stall": 0.06}, 0, "offloading"),
        ({"compute": 0.5, "host_bound": 0.5}, 0, "the host"),
        ({"compute": 0.5, "host_bound": 0.5}, 0.25, "the allocator"),
    ],
)
def test_what_binds_a_step(shares: dict[str, Any], retries: float, binding: str) -> None:
    assert binding_of(shares, retries) == binding


def test_weighted_quantiles_of_equal_weights_are_the_usual_ones() -> None:
    """Of 1 to 5, each a fifth: the middles of the weights are at 0.1, 0.3 ... 0.9."""
    values, weights = np.arange(1.0, 6.0), np.full(5, 0.2)
    assert quantiles(values, weights, (0.1, 0.5, 0.9, 0.2)) == pytest.approx([1.0, 3.0, 5.0, 1.5])


def test_runs_of_the_same_chip_and_binding_are_the_closest(make_run: Make) -> None:
    near, far = make_run("near", 0.0), make_run("far", 0.0, gpu="v100-sxm3-32gb")
    assert similar_runs(FEATURES, [near, far]) == ((near,), 0)
    assert similar_runs(replace(FEATURES, gpu="b200"), [near, far]) == ((near, far), 1)


def test_no_run_of_another_strategy_is_like_a_job(make_run: Make) -> None:
    """Its framework has runs, its strategy has none: nothing is said to be like it."""
    found, cell = similar_runs(replace(FEATURES, strategy="HSDP"), [make_run("one", 0.0)])
    assert found == ()
    assert cell >= FIRST_DISSIMILAR_CELL


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


def test_few_blind_sources_do_not_judge_alone(make_run: Make) -> None:
    """The estimates are by all sources until three are blind."""
    names = ["a", "b", "c", "studied"]
    for count, why in ((2, "4 runs of 4 sources, each"), (3, "3 runs of 3 sources, predicted")):
        runs = [replace(make_run(name, 0.1), role=BLIND if name in names[:count] else "report")
                for name in names]  # fmt: skip
        assert why in width_stages(FEATURES, runs, estimates({"any run": 0.05}))[0].why


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
