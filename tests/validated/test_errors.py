from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import about
from zsim.validated.errors import (
    FIRST_DISSIMILAR_CELL,
    REPEAT_ERROR,
    estimate_errors,
    estimate_interval,
    quantiles,
)
from zsim.validated.runs import ValidatedRun


def test_every_source_weighs_the_same_however_many_rows_it_has(make_run: Callable[..., ValidatedRun]) -> None:
    """90 rows of one source at +2 % and one of another at +10 %: half of the weight is the other's, so the
    upper end is its error, which is 1 % of the rows."""
    runs = [*(make_run("many", 0.02) for _ in range(90)), make_run("one", 0.10)]
    assert estimate_errors(runs[0].features, runs).interval()[1] == pytest.approx(0.10)


def test_the_source_that_is_missing_errs_the_other_way_round(make_run: Callable[..., ValidatedRun]) -> None:
    """One source at +20 %: half of the weight is its mirror image, so the interval holds both signs."""
    runs = [make_run("one", 0.2) for _ in range(3)]
    low, high = estimate_errors(runs[0].features, runs).interval()
    assert (low, high) == (about(-0.2), about(0.2))


def test_many_sources_that_err_one_way_make_an_interval_on_that_side(
    make_run: Callable[..., ValidatedRun],
) -> None:
    """20 sources at +10 %: their mirror image has 1/21 of the weight, less than the tenth left out below."""
    runs = [make_run(f"source {number}", 0.1) for number in range(20)]
    low, high = estimate_errors(runs[0].features, runs).interval()
    assert high == pytest.approx(0.1)
    assert low == -REPEAT_ERROR


def test_runs_of_the_same_chip_and_binding_count_most(make_run: Callable[..., ValidatedRun]) -> None:
    """Six sources on the job's chip at +-1 %, six on another at +-30 %: the closest cell has 6 / (6 + 1) of
    the weight, and half of the rest is the job's chip's again. Half of the other's fourteenth lies beyond
    each end, within the tenth that is left out; between two runs the quantile is in proportion."""
    near = [make_run(f"near {n}", 0.01 * (-1) ** n) for n in range(6)]
    far = [make_run(f"far {n}", 0.3 * (-1) ** n, gpu="v100-sxm3-32gb") for n in range(6)]
    low, high = estimate_errors(near[0].features, [*near, *far]).interval()
    assert -0.15 < low <= -0.01
    assert 0.01 <= high < 0.15
    errors = estimate_errors(near[0].features, [*near, *far])
    assert {run.source for run in errors.similar_runs} == {run.source for run in near}
    weights = errors.weights[:12] + errors.weights[12:]
    assert weights[:6].sum() == pytest.approx(6 / 7 + 1 / 14)


def test_without_a_run_of_its_like_a_job_is_judged_by_all(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("one", 0.1), make_run("two", -0.1)]
    errors = estimate_errors(make_run("x", 0.0, framework="DDP").features, runs)
    assert errors.similar_runs == ()
    assert errors.cell >= FIRST_DISSIMILAR_CELL
    assert errors.interval()[0] < 0 < errors.interval()[1]


def test_weighted_quantiles_of_equal_weights_are_the_usual_ones() -> None:
    """Of 1 to 5, each a fifth: the middles of the weights are at 0.1, 0.3 ... 0.9."""
    values, weights = np.arange(1.0, 6.0), np.full(5, 0.2)
    assert quantiles(values, weights, (0.1, 0.5, 0.9, 0.2)) == pytest.approx([1.0, 3.0, 5.0, 1.5])


def test_few_sources_are_trusted_no_better_than_the_broader_cell_and_what_kernels_bind(
    make_run: Callable[..., ValidatedRun],
) -> None:
    """One source that the network binds is right to 1 %; of four that kernels bind two are 30 % slow."""
    runs = [make_run("net", 0.01, binding="the network")]
    runs += [make_run(f"s{n}", 0.3 * (n % 2)) for n in range(4)]
    low, high = estimate_interval(runs[0].features, runs)[1]
    kernels = estimate_interval(runs[1].features, runs)[1]
    assert low <= kernels[0]
    assert high >= kernels[1] >= 0.3


def test_enough_sources_are_trusted_by_themselves(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run(f"net {n}", 0.01 * (-1) ** n, binding="the network") for n in range(20)]
    runs += [make_run(f"s{n}", 0.3 * (n % 2)) for n in range(4)]
    assert estimate_interval(runs[0].features, runs)[1][1] < 0.05


def test_a_framework_without_a_run_is_trusted_no_better_than_any_other_as_large(
    make_run: Callable[..., ValidatedRun],
) -> None:
    """DeepSpeed's three sources on several nodes are 50 % slow, on one node right."""
    runs = [make_run(f"f{n}", 0.01 * (-1) ** n) for n in range(20)]
    runs += [make_run(f"d{n}", 0.5, framework="DeepSpeed") for n in range(3)]
    runs += [make_run(f"d{n}", 0.01, framework="DeepSpeed", nodes=1) for n in range(3)]
    job = make_run("x", 0.0, framework="Megatron").features
    deepspeed = estimate_interval(runs[20].features, runs)[1]
    low, high = estimate_interval(job, runs)[1]
    assert low <= deepspeed[0]
    assert high >= deepspeed[1] == pytest.approx(0.5)
    assert estimate_interval(replace(job, nodes=1), runs)[1][1] < 0.1


def test_a_binding_that_only_other_frameworks_have_is_trusted_no_better_than_theirs(
    make_run: Callable[..., ValidatedRun],
) -> None:
    runs = [make_run(f"f{n}", 0.01 * (-1) ** n) for n in range(20)]
    runs += [make_run(f"d{n}", 0.5, framework="DeepSpeed", binding="offloading") for n in range(3)]
    assert estimate_interval(replace(runs[0].features, binding="offloading"), runs)[1][1] >= 0.5
    assert estimate_interval(replace(runs[0].features, binding="the host"), runs)[1][1] < 0.1
