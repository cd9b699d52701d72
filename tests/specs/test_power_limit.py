"""The same chip at another power limit: the law, its pairs and residuals, and what it changes."""

from __future__ import annotations

import math

import pytest

import zsim
from zsim.errors import InputError
from zsim.report.report import Report
from zsim.specs.cluster.files import PowerPair, load_cluster, load_gpu, load_power_law
from zsim.specs.experiment.load import build_experiment

LAW = load_power_law()


def test_the_exponent_is_the_slope_of_the_pairs() -> None:
    """Least squares through the origin: sum of x y over sum of x x, of x = log of power, y = log of rate."""
    points = [
        (math.log(pair.watts[1] / pair.watts[0]), math.log(pair.rates[1] / pair.rates[0]))
        for pair in LAW.pairs
    ]
    slope = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    assert slope == pytest.approx(LAW.exponent, abs=0.005)


@pytest.mark.parametrize("pair", LAW.pairs, ids=lambda pair: pair.chip)
def test_a_pairs_residual_is_as_the_file_says(pair: PowerPair) -> None:
    predicted = (pair.watts[1] / pair.watts[0]) ** LAW.exponent
    assert predicted / (pair.rates[1] / pair.rates[0]) - 1 == pytest.approx(pair.residual, abs=0.002)


def test_an_h100_at_500_watts_is_the_one_that_was_fitted() -> None:
    """0.69 x (500 / 700) ^ 0.806 = 0.526, 0.4 % from the 0.528 fitted to steps on 500 W parts."""
    limited = load_gpu({"extends": "h100-sxm-80gb", "power_limit": "500 W"})
    assert limited.gemm.max_fraction == pytest.approx(
        load_gpu("h100-sxm-96gb-500w").gemm.max_fraction, rel=0.01
    )
    assert limited.name == "h100-sxm-80gb at 500 W"
    assert limited.memory_bound == load_gpu("h100-sxm-80gb").memory_bound  # they draw 440 W
    assert limited.power is not None
    assert (limited.power.maximum, limited.power.memory_bound) == (500, 440)


def test_a_b200_at_750_watts_has_the_exponent_of_training() -> None:
    """0.75 ^ 0.806 = 0.793 of products and attention; kernels bound by memory draw 630 W."""
    whole, limited = (
        load_gpu("b200-sxm-180gb"),
        load_gpu({"extends": "b200-sxm-180gb", "power_limit": "750 W"}),
    )
    factor = 0.75**0.806
    assert limited.gemm.max_fraction == pytest.approx(whole.gemm.max_fraction * factor)
    assert limited.gemm.by_dtype["fp8"] == pytest.approx(whole.gemm.by_dtype["fp8"] * factor)
    for name, curve in limited.attention.variants.items():
        assert curve.forward_fraction == pytest.approx(
            whole.attention.variants[name].forward_fraction * factor
        )
    assert limited.gemm.evidence == "assumed"
    assert "at 750 of 1000 W" in limited.gemm.source


def test_a_limit_below_what_memory_draws_slows_it_too() -> None:
    """At 350 W of an H100, kernels that draw 440 W have (350 / 440) ^ 0.806 = 0.832 of their rate."""
    whole, limited = load_gpu("h100-sxm-80gb"), load_gpu({"extends": "h100-sxm-80gb", "power_limit": "350 W"})
    ratio = limited.memory_bound.elementwise_fraction / whole.memory_bound.elementwise_fraction
    assert ratio == pytest.approx((350 / 440) ** 0.806)
    assert limited.power is not None
    assert limited.power.memory_bound == 350


def test_a_limited_step_is_longer_and_takes_less_energy() -> None:
    def report(**overrides: str) -> Report:
        given = {
            "model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1,
            "training": {"sequence_length": 4096}, "strategy": {"kind": "fsdp2"},
        }  # fmt: skip
        return zsim.simulate(build_experiment(given, overrides, origin="test")).report

    whole, limited = report(), report(**{"gpu.power_limit": "500 W"})
    assert 1.05 < limited.step_seconds / whole.step_seconds < (700 / 500) ** 0.806
    assert whole.energy is not None
    assert limited.energy is not None
    assert limited.energy.joules < whole.energy.joules
    assert limited.energy.watts < 500


@pytest.mark.parametrize(
    ("gpu", "limit", "words"),
    [
        ("h100-sxm-80gb", "900 W", r"found 900 W, expected 280 to 700 W \(40% to 100% of the 700 W"),
        ("h100-sxm-80gb", "100 W", r"found 100 W, expected 280 to 700 W"),
        ("v100-sxm2-16gb", "200 W", r"its file does not say what it draws; expected a \[power\] table"),
        ("h100-sxm-80gb", "500", r"'500' has no unit"),
    ],
)
def test_a_limit_that_cannot_be_is_told(gpu: str, limit: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_gpu({"extends": gpu, "power_limit": limit})


def test_a_cluster_of_several_types_is_told_where_its_limits_are() -> None:
    given = {"model": "gpt2", "cluster": "dgx-h100", "strategy": {"kind": "fsdp2"}}
    changes = {"cluster.nodes": "1 dgx-h100, 1 dgx-a100-80gb", "gpu.power_limit": "500 W"}
    with pytest.raises(InputError, match="lists nodes of several types, each with its own GPU"):
        build_experiment(given, changes, origin="test")
    one = {"extends": "h100-sxm-80gb", "power_limit": "500 W"}
    cluster = load_cluster({"extends": "dgx-h100", "nodes": [{"gpu": one}, {"gpu": "h100-sxm-80gb"}]})
    assert [node.name for node in cluster.nodes] == ["h100-sxm-80gb at 500 W", "h100-sxm-80gb"]


def test_a_limit_without_a_unit_is_said_of_the_gpu_not_of_its_file() -> None:
    with pytest.raises(InputError, match=r"^gpu: power_limit: '500' has no unit; expected one of W, kW, MW"):
        load_gpu({"extends": "h100-sxm-80gb", "power_limit": 500})
