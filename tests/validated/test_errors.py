"""Which runs are like a job, and weighted quantiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.validated.conftest import FEATURES
from zsim.validated.runs import FIRST_DISSIMILAR_CELL, ValidatedRun, quantiles, similar_runs

Make = Callable[..., ValidatedRun]


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
