from __future__ import annotations

from collections.abc import Callable

import pytest

from validation.published import ratio_errors
from validation.published.ratio_errors import estimate_ratio_errors
from zsim.validated import ratios
from zsim.validated.features import ALLOCATOR
from zsim.validated.ratios import (
    ALLOCATOR_SHORT,
    KINDS,
    SEVERAL_SETTINGS,
    bound_of,
    is_ratio_significant,
    kind_of,
    ratio_range,
)
from zsim.validated.runs import ValidatedRun, shipped_estimates


def test_errors_that_two_runs_share_do_not_count(make_run: Callable[..., ValidatedRun]) -> None:
    """Both are 30 % off: their ratio is right."""
    runs = [make_run("one", 0.3), make_run("one", 0.3, gpus=32)]
    assert estimate_ratio_errors(runs)["GPUs"] == 0.0


def test_pairs_are_of_one_source_model_and_gpu(make_run: Callable[..., ValidatedRun]) -> None:
    """Only the two runs of "one" on H100 are a pair; they are off by 4 %."""
    runs = [make_run("one", 0.0), make_run("one", 0.04, gpus=32), make_run("two", 0.9, gpus=32)]
    runs += [make_run("one", 0.5, gpus=32, gpu="a100"), make_run("one", 0.7, gpus=32, model="other")]
    assert estimate_ratio_errors(runs)["GPUs"] == pytest.approx(0.04)


def test_pairs_that_run_short_of_memory_are_their_own_kind(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [
        make_run("one", 0.0),
        make_run("one", 0.04, gpus=32),
        make_run("one", 0.5, gpus=64, binding=ALLOCATOR),
    ]
    found = estimate_ratio_errors(runs)
    assert found["GPUs"] == pytest.approx(0.04)
    assert found[ALLOCATOR_SHORT] > 0.1


def test_a_setting_that_few_vary_leans_on_all(make_run: Callable[..., ValidatedRun]) -> None:
    """One source varies the strategy, and is right; five vary the batch and are 20 % off: half of the
    weight is the strategy's own."""
    runs = [make_run("s", 0.0), make_run("s", 0.0, strategy="HSDP")]
    for number in range(5):
        runs += [make_run(f"b{number}", 0.0), make_run(f"b{number}", 0.2, micro_batch_size=2)]
    assert estimate_ratio_errors(runs)["strategy"] > 0.1


def test_the_batch_follows_from_the_length_and_the_number_of_gpus() -> None:
    assert kind_of(["batch", "GPUs"]) == "GPUs"
    assert kind_of(["batch"]) == "batch"
    assert kind_of(["strategy", "network"]) == SEVERAL_SETTINGS


def test_a_difference_within_the_interval_cannot_be_told() -> None:
    bound = shipped_estimates()["ratios"]["GPUs"]
    assert not is_ratio_significant(1.0, 1.0 + bound / 2, ["GPUs"], is_shared=False)
    assert is_ratio_significant(1.0, 1.0 + 2 * bound, ["GPUs"], is_shared=False)
    assert is_ratio_significant(1.0 + 2 * bound, 1.0, ["GPUs"], is_shared=False)


def test_the_interval_of_a_ratio_is_about_the_ratio() -> None:
    for kind in KINDS:
        low, high = ratio_range(0.5, [kind], is_shared=False)
        assert 0 < low < 0.5 < high < 1
        assert low * high == pytest.approx(0.25)


def test_what_is_shipped_knows_every_kind() -> None:
    for name in ("ratios", "shared_ratios"):
        assert set(shipped_estimates()[name]) == set(ratios.KINDS)


def test_pairs_that_share_a_replica_are_estimated_apart(make_run: Callable[..., ValidatedRun]) -> None:
    """Two runs of one rank to a replica are 1 % off, two of eight ranks 20 %, and so are one of each."""
    runs = [make_run("one", 0.0), make_run("one", 0.01, gpus=32)]
    runs += [make_run("two", 0.0, model_ranks=8), make_run("two", 0.2, gpus=32, model_ranks=8)]
    runs += [make_run("three", 0.0), make_run("three", 0.2, gpus=32, model_ranks=8)]
    assert estimate_ratio_errors(runs, is_shared=False)["GPUs"] == pytest.approx(0.01)
    assert estimate_ratio_errors(runs, is_shared=True)["GPUs"] == pytest.approx(0.2)


def test_degrees_are_a_setting_which_the_batch_follows(make_run: Callable[..., ValidatedRun]) -> None:
    runs = [make_run("one", 0.0, degrees="TP 2"), make_run("one", 0.1, degrees="TP 4", micro_batch_size=2)]
    (found,) = ratio_errors.ratio_coverage(
        [*runs, make_run("two", 0.0), make_run("two", 0.1, degrees="TP 4")]
    )
    assert (found.kind, found.pairs) == ("parallelism", 2)
    assert kind_of(["batch", "parallelism"]) == "parallelism"


def test_pairs_of_a_source_are_judged_by_those_of_others(make_run: Callable[..., ValidatedRun]) -> None:
    """Eight sources vary the batch and are off by 1 %, one by 50 %: none of its pairs is within, all others'
    are."""
    runs = []
    for number in range(9):
        error = 0.5 if number == 8 else 0.01
        runs += [make_run(f"s{number}", 0.0), make_run(f"s{number}", error, micro_batch_size=2)]
    (found,) = ratio_errors.ratio_coverage(runs)
    assert (found.kind, found.pairs, found.sources) == ("batch", 9, 9)
    assert found.covered == found.covered_by_source == pytest.approx(8 / 9)


def test_what_differs_in_several_settings_is_no_better_known_than_in_one_of_them() -> None:
    bounds = {"batch": 0.1, "strategy": 0.3, "network": 0.4, ALLOCATOR_SHORT: 0.9, SEVERAL_SETTINGS: 0.2}
    assert bound_of(["batch", "strategy"], bounds) == 0.3
    assert bound_of(["batch", "training"], bounds | {"training": 0.1}) == 0.2
    assert bound_of(["batch"], bounds) == 0.1
    assert bound_of(["batch", ALLOCATOR_SHORT], bounds) == 0.9


def test_another_gpu_is_no_better_known_than_any_setting() -> None:
    shipped = shipped_estimates()["ratios"]
    settings = {kind: bound for kind, bound in shipped.items() if kind != ALLOCATOR_SHORT}
    for kinds in (["another model or GPU"], ["network", "GPU"]):
        assert bound_of(kinds, shipped) == max(settings.values())
