"""What each respect of a job adds to its spread, and how the parts are fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, hypot

import numpy as np
import pytest

from tests.validated.conftest import FEATURES, estimates
from validation.published.open_settings import ACROSS_NODES, OpenStep, open_spreads, read_steps
from validation.published.spread_fit import estimate_spread, fit_parts, mean_errors, score_quantile
from zsim.specs.cluster.files import load_gpu
from zsim.specs.presets import gpu_preset_names
from zsim.validated.features import KERNELS, NETWORK
from zsim.validated.runs import BLIND, ValidatedRun, validated_runs
from zsim.validated.spread import OPEN_SENTENCES, spread_estimates, spread_of, spread_parts

Make = Callable[..., ValidatedRun]


def test_respects_add_up_and_open_settings_in_squares(make_run: Make) -> None:
    """0.05 of any run and 0.04 of several nodes; a GPU without a run 0.1; the loss left open 0.06."""
    numbers = estimates(
        {"any run": 0.05, "several nodes": 0.04}, {"gpu": 0.1}, {"loss": 0.06, "network": 0.5}
    )
    job = replace(FEATURES, gpu="mi300x-192gb", open_settings=("loss",))
    parts = spread_parts(job, [make_run("one", 0.0)], numbers)
    assert [part.name for part in parts] == ["any run", "several nodes", "gpu", "loss"]
    assert parts[2].sentence == "GPU mi300x-192gb without a validated run"
    assert parts[3].sentence == OPEN_SENTENCES["loss"]
    assert spread_of(parts) == pytest.approx(hypot(0.05 + 0.04 + 0.1, 0.06))


def test_a_network_that_something_else_hides_is_less_open(make_run: Make) -> None:
    """The same setting left open is 0.2 where the network bounds the step, and 0.03 where kernels do."""
    numbers = estimates({}, {}, {"network": 0.2, "hidden network": 0.03})
    job = replace(FEATURES, open_settings=("network",))
    for binding, expected in ((NETWORK, 0.2), (KERNELS, 0.03)):
        parts = spread_parts(replace(job, binding=binding), [make_run("one", 0.0)], numbers)
        assert spread_of(parts) == pytest.approx(expected)
    steps = [OpenStep(name, "s", "network", "0.45", 1.0) for name in "ab"]
    steps += [OpenStep("a", "s", "network", "0.9", exp(-0.4)), OpenStep("b", "s", "network", "0.9", 1.0)]
    found = open_spreads(steps, {"a": NETWORK, "b": KERNELS})
    assert found["network"] == pytest.approx(0.2)
    assert found["hidden network"] == 0.0


def test_dispatchers_differ_most_where_the_network_bounds_the_step() -> None:
    """Rows of several nodes are among those that say so: half of ln 2.5 on 64 ranks of 16 nodes."""
    steps = [step for step in read_steps() if step.setting == "dispatcher"]
    assert set(ACROSS_NODES) <= {step.row_id for step in steps}
    spreads = open_spreads(steps)
    assert spreads["dispatcher"] > 0.1 > spreads["hidden dispatcher"] > 0


def test_counted_respects_add_per_doubling(make_run: Make) -> None:
    """128 GPUs where a run had 16: three doublings."""
    numbers = estimates({}, {"gpus": 0.02})
    parts = spread_parts(replace(FEATURES, gpus=128), [make_run("one", 0.0)], numbers)
    assert spread_of(parts) == pytest.approx(0.06)


def test_parts_are_fitted_and_never_below_zero() -> None:
    """Errors of 0.1, and 0.3 in a second respect; a third respect has smaller ones, and adds nothing."""
    rows = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]] * 200)
    found = fit_parts(rows, np.array([0.1, 0.3, 0.05] * 200), np.ones(600))
    assert found[2] == 0.0
    assert found[0] == pytest.approx(0.075, abs=0.002)
    assert found[1] == pytest.approx(0.225, abs=0.002)


def test_every_source_weighs_the_same_however_many_rows_it_has(make_run: Make) -> None:
    """90 rows of a source at 1 %, one each of nine at 10 % to either side: any run costs 0.091, not 0.018."""
    runs = [make_run("many", 0.01) for _ in range(90)]
    runs += [make_run(f"one {n}", 0.10 * (-1) ** n, nodes=1, gpus=8) for n in range(9)]
    alike = [replace(run, features=FEATURES) for run in runs]
    assert estimate_spread(alike).shares["any run"] == pytest.approx(0.091, abs=0.002)


def test_what_a_respect_without_a_run_costs_is_what_it_cost_sources_left_out(make_run: Make) -> None:
    """Six chips with two sources each, right to 1 %; eight with one source each, off by 20 % to either
    side: each of these is judged without a run on its chip."""
    runs = [make_run(f"{chip}{n}", 0.01, gpu=chip) for chip in "abcdef" for n in range(2)]
    runs += [make_run(f"alone {n}", 0.2 * (-1) ** n, gpu=f"x{n}") for n in range(8)]
    found = estimate_spread(runs)
    assert found.extrapolation["gpu"] == pytest.approx(0.187, abs=0.01)
    assert found.shares["any run"] == pytest.approx(0.01, abs=0.01)


def test_what_all_sources_of_a_regime_err_to_one_side_moves_the_interval(make_run: Make) -> None:
    """Six sources 0.1 and 0.2 too fast: mean 0.15, variance 0.003, which is 0.0005 of the mean's own in
    0.0225: 0.978 of it counts. Six to either side, and two of another framework, tell nothing."""
    runs = [make_run(f"slow {n}", 0.1 + 0.1 * (n % 2)) for n in range(6)]
    runs += [make_run(f"both {n}", 0.3 * (-1) ** n, nodes=1, gpus=8) for n in range(6)]
    runs += [make_run(f"few {n}", 0.3, framework="Other") for n in range(2)]
    found = mean_errors(runs)
    regime = FEATURES.regime
    assert found == {regime: pytest.approx(0.15 * 0.97778, abs=1e-5)}
    ends = replace(estimates({"any run": 0.1}), unexplained=found).ends(FEATURES, 0.1)
    assert ends == pytest.approx((-0.006, 0.15 * 0.97778 + 0.1), abs=1e-5)


def test_old_gpus_do_not_move_the_interval_of_new_ones(make_run: Make) -> None:
    """V100's sources, 0.2 too fast, are a regime of their own: H100's of the same framework are right."""
    runs = [make_run(f"old {n}", 0.2, gpu="v100-sxm3-32gb") for n in range(4)]
    runs += [make_run(f"new {n}", 0.01 * (-1) ** n, gpu="h100-sxm-80gb") for n in range(4)]
    old = replace(FEATURES, gpu="v100-sxm3-32gb")
    assert mean_errors(runs) == {old.regime: pytest.approx(0.2)}
    names = [name for name in gpu_preset_names() if replace(FEATURES, gpu=name).lacks_bf16]
    assert names == [name for name in gpu_preset_names() if load_gpu(name).peak.bf16 is None]
    assert not replace(FEATURES, gpu="v100-of-mine").lacks_bf16  # no file of zsim's says so


def test_a_source_moves_the_interval_by_its_median_and_never_by_more_than_the_largest(make_run: Make) -> None:
    """Two sources at 0.2, one with a row in three at 2.0: 0.2 as well. One at 1.0 counts as 0.25: the mean is
    0.2125, the variance 0.000625, which is 0.00015625 of its own in 0.04515625: 0.99654 of it counts."""
    runs = [make_run(f"slow {n}", 0.2) for n in range(2)]
    runs += [make_run("one run slow", error) for error in (0.2, 0.2, 2.0)]
    assert mean_errors(runs) == {FEATURES.regime: pytest.approx(0.2)}
    runs += [make_run("strange", 1.0)]
    assert mean_errors(runs) == {FEATURES.regime: pytest.approx(0.2125 * 0.99654, abs=1e-5)}


def test_runs_of_one_source_tell_less_than_as_many_of_several() -> None:
    """Nine sources at 1 and runs at 2. Of eight sources eight are beyond the 80 %. Of one source they weigh
    8 / (1 + 7 * 0.36) = 2.27 in 11.27: the 80 % of 9.02 lie between the last 1, whose middle is at 8.5, and
    the first -2, at 9.14. Two of one source weigh 1.47 in 10.47, and 8.38 is a 1."""
    nine = [f"s{n}" for n in range(9)]
    assert score_quantile(np.r_[np.ones(9), 2 * np.ones(8)], [*nine, *(f"t{n}" for n in range(8))]) == 2.0
    assert score_quantile(np.r_[np.ones(9), -2 * np.ones(8)], [*nine, *["t"] * 8]) == pytest.approx(
        1.81, abs=0.01
    )
    assert score_quantile(np.r_[np.ones(9), 2 * np.ones(2)], [*nine, *["t"] * 2]) == pytest.approx(1.0)


def test_sources_that_were_predicted_blind_set_the_width(make_run: Make) -> None:
    """Six studied sources at 2 %, four blind ones at 20 % to either side: the interval of a job is as wide as
    the blind ones ask for. Of four studied sources on V100 at 30 %, which counts as 25 %, blind ones explain
    20 %: 4 * 0.05 / (4 + 0.09) is V100's."""
    studied = [make_run(f"s{n}", 0.02 * (-1) ** n) for n in range(6)]
    blind = [replace(make_run(f"b{n}", 0.2 * (-1) ** n), role=BLIND) for n in range(4)]
    found = estimate_spread([*studied, *blind])
    assert found.shares["any run"] == pytest.approx(0.2)
    low, high = found.ends(FEATURES, spread_of(spread_parts(FEATURES, [*studied, *blind], found)))
    assert (low, high) == pytest.approx((-0.2, 0.2), abs=1e-6)
    alone = estimate_spread([*studied, *blind[:2]])  # too few: all sources set it
    assert alone.high * alone.shares["any run"] < 0.2
    old = [make_run(f"old {n}", 0.3 * (-1) ** n, gpu="v100-sxm3-32gb") for n in range(4)]
    shares = estimate_spread([*old, *blind]).shares
    assert (shares["any run"], shares["no bf16"]) == pytest.approx((0.2, 0.0489), abs=1e-4)


def test_runs_that_no_stranger_predicted_tell_nothing(make_run: Make) -> None:
    runs = [make_run(f"s{n}", 0.1) for n in range(5)]
    unknown = [replace(make_run(f"u{n}", 3.0), stranger_error=None) for n in range(5)]
    assert estimate_spread([*runs, *unknown]).shares == estimate_spread(runs).shares


def test_runs_to_which_numbers_were_fitted_do_not_count_and_vouch_all_the_same(make_run: Make) -> None:
    """Twenty fitted sources at 0 and five others at 10 % are as wide as the five alone. On a chip of a fitted
    source the others extrapolate no more."""
    fitted = [replace(make_run(f"f{n}", 0.0, gpu="seen"), role="calibrate") for n in range(20)]
    others = [make_run(f"o{n}", 0.1, gpu="seen") for n in range(5)]
    assert estimate_spread([*fitted, *others]) == estimate_spread(others)
    alone = [make_run("one", 0.1, gpu="seen"), *(make_run(f"x{n}", 0.1) for n in range(4))]
    assert estimate_spread([*fitted, *alone]).extrapolation["gpu"] == 0.0
    assert estimate_spread(fitted).shares["any run"] == pytest.approx(0.0)


def test_the_shipped_numbers_are_about_every_respect() -> None:
    shipped = spread_estimates()
    assert shipped.low < -1 < 1 < shipped.high
    assert set(shipped.open) == set(OPEN_SENTENCES)
    assert shipped.shares["any run"] > 0
    assert {run.stranger_error is None for run in validated_runs()} == {True, False}
