from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.validated.conftest import FEATURES, estimates
from zsim.validated.runs import REPEAT_ERROR, ValidatedRun, validated_runs
from zsim.validated.validation import format_range, format_validation, validation_of

NONE = estimates({"any run": 0.05})


def test_the_interval_is_of_the_measured_step_over_the_predicted_one(
    make_run: Callable[..., ValidatedRun],
) -> None:
    """A spread of 0.05, and errors from -1 to +2 of it: exp(-0.05) and exp(0.1)."""
    found = validation_of(FEATURES, [make_run("one", 0.1)], replace(NONE, high=2.0))
    low, high = found.range_of(10.0)
    assert low == pytest.approx(9.51, abs=0.01)
    assert high == pytest.approx(11.05, abs=0.01)
    assert (found.runs, found.sources) == (1, 1)


def test_no_interval_is_narrower_than_repeated_runs_differ(make_run: Callable[..., ValidatedRun]) -> None:
    found = validation_of(FEATURES, [make_run("one", 0.1)], estimates({"any run": 1e-6}))
    assert [found.low, found.high] == pytest.approx([exp(-REPEAT_ERROR), exp(REPEAT_ERROR)])


def test_errors_are_those_of_the_runs_like_it(make_run: Callable[..., ValidatedRun]) -> None:
    """Predicted over measured, less one: exp(-0.1) - 1 is -9.5 %, exp(0.2) - 1 is 22.1 %."""
    runs = [make_run("one", 0.1), make_run("two", -0.2), make_run("three", 3.0, gpu="v100")]
    found = validation_of(FEATURES, runs, NONE)
    assert found.regime == "FSDP, several nodes, FSDP2, H100, bound by kernels"
    assert found.runs == 2
    assert found.worst_absolute_error == pytest.approx(0.2214, abs=1e-4)
    assert found.mean_absolute_error == pytest.approx((0.0952 + 0.2214) / 2, abs=1e-4)


def test_a_binding_that_no_run_has_is_judged_by_all_of_the_strategy(
    make_run: Callable[..., ValidatedRun],
) -> None:
    runs = [make_run("one", 0.1), make_run("two", -0.2, binding="the network")]
    found = validation_of(replace(FEATURES, binding="the host"), runs, NONE)
    assert (found.regime, found.runs) == ("FSDP, several nodes, FSDP2", 2)
    assert found.extrapolates == ("no validated run of FSDP on several nodes waits as much for the host",)


def test_without_runs_of_its_like_there_are_no_errors_but_an_interval(
    make_run: Callable[..., ValidatedRun],
) -> None:
    runs = [make_run("one", 0.1), make_run("two", -0.2)]
    found = validation_of(replace(FEATURES, framework="DDP", strategy="DDP"), runs, NONE)
    assert found.runs == 0
    assert found.mean_absolute_error is None
    assert found.to_dict()["worst_absolute_error"] is None
    assert found.low < 1 < found.high
    assert format_validation(found, 10.0).endswith("(80 %), from dissimilar runs")


def test_a_strategy_without_a_run_has_none_like_it(make_run: Callable[..., ValidatedRun]) -> None:
    """However many runs its framework has."""
    runs = [make_run(f"s{n}", 0.1) for n in range(40)]
    found = validation_of(replace(FEATURES, strategy="HSDP"), runs, NONE)
    assert (found.runs, found.regime) == (0, "no similar validated run")
    assert format_validation(found, 1.0).endswith("from dissimilar runs")


def test_errors_shown_are_a_strangers(make_run: Callable[..., ValidatedRun]) -> None:
    """A run that its founders predict to 1 %, and that a stranger would be 0.3 off."""
    run = replace(make_run("one", 0.01), stranger_error=0.3)
    assert validation_of(FEATURES, [run], NONE).worst_absolute_error == pytest.approx(0.2592, abs=1e-4)


def test_a_source_does_not_vouch_for_itself(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [*(make_run(f"s{n}", 0.01) for n in range(8)), *(make_run("own", 0.5, gpu="x") for _ in range(9))]
    numbers = estimates({"any run": 0.05}, {"gpu": 0.2})
    job = replace(FEATURES, gpu="x")
    with_it, without = (
        validation_of(job, runs, numbers),
        validation_of(job, runs, numbers, excluded_source="own"),
    )
    assert (with_it.runs, without.runs) == (9, 8)
    assert with_it.extrapolates == ()
    assert [with_it.high, without.high] == pytest.approx([exp(0.05), exp(0.25)])


@given(
    st.sampled_from(sorted({run.features.gpu for run in validated_runs()} | {"x-1"})),
    st.sampled_from(["FSDP", "DeepSpeed", "DDP", "unknown"]),
    st.sampled_from(["kernels", "the network", "the allocator", "offloading", "the host"]),
    st.integers(0, 12),
)
def test_every_job_has_an_interval_about_its_prediction(
    gpu: str, framework: str, binding: str, doublings: int
) -> None:
    gpus = 2**doublings
    job = replace(FEATURES, gpu=gpu, framework=framework, binding=binding, gpus=gpus, nodes=-(-gpus // 8))
    low, high = validation_of(job).range_of(1.0)
    assert 0 < low < 1 < high < 20


@pytest.mark.parametrize("framework", ["FSDP", "DeepSpeed"])
def test_more_gpus_than_any_run_never_narrow_the_shipped_interval(framework: str) -> None:
    """No run of either framework has more than 2,048 GPUs."""
    jobs = [
        replace(FEATURES, framework=framework, strategy="FSDP1", gpus=2**power, nodes=2**power // 8)
        for power in range(9, 15)
    ]
    shipped = [found.high - found.low for found in map(validation_of, jobs)]
    assert shipped == sorted(shipped)


def test_a_gpu_without_a_run_is_trusted_no_more_than_any_with_one() -> None:
    job = replace(FEATURES, strategy="FSDP1")
    known = [validation_of(replace(job, gpu=gpu)) for gpu in ("a100-sxm-80gb", "h100-sxm-80gb")]
    unknown = validation_of(replace(job, gpu="gaudi3-128gb"))
    assert unknown.extrapolates == ("GPU gaudi3-128gb without a validated run",)
    assert unknown.high - unknown.low >= max(one.high - one.low for one in known)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((9.141, 10.93), "9.14 to 10.9 s"),
        ((0.98, 1.09), "0.98 to 1.09 s"),
        ((0.0012345, 0.0014), "1.23 to 1.40 ms"),
        ((98.76, 123.4), "98.8 to 123 s"),
    ],
)
def test_ranges_have_three_digits_and_one_unit(seconds: tuple[float, float], text: str) -> None:
    assert format_range(seconds) == text


def test_what_it_leans_on_is_said(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("net", 0.01, binding="the network"), *(make_run(f"s{n}", 0.1) for n in range(4))]
    found = validation_of(runs[0].features, runs, NONE)
    assert (found.runs, found.runs_less_alike, found.to_dict()["runs_less_alike"]) == (1, 4, 4)
    assert format_validation(found, 1.0).endswith("(80 %), from 1 similar run and 4 less similar")
    assert format_validation(validation_of(FEATURES, runs, NONE), 1.0).endswith("from 4 similar runs")
