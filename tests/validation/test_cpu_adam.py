"""Published Adam steps on CPUs: time goes with the bytes that an update moves."""

from __future__ import annotations

from statistics import fmean

import pytest

from validation.published.cpu_adam import moved_bytes, predictions


def errors_of(implementation: str, hardware: str) -> list[float]:
    return [
        row.relative_error
        for row in predictions()
        if (row.implementation, row.hardware) == (implementation, hardware) and row.relative_error is not None
    ]


def test_a_fused_update_moves_28_bytes_and_torchs_passes_84() -> None:
    """torch: 18 passes over the states and 3 over the gradient, 4 bytes each."""
    assert moved_bytes("deepspeed", 1000) == 28_000
    assert moved_bytes("torch", 1000) == 84_000


@pytest.mark.parametrize(
    ("implementation", "mean", "worst"), [("deepspeed", 0.02, 0.03), ("grace", 0.04, 0.06)]
)
def test_each_size_follows_from_the_others(implementation: str, mean: float, worst: float) -> None:
    """Four sizes from 1 to 8, each left out in turn."""
    errors = errors_of(implementation, "GH200 Grace CPU")
    assert len(errors) == 4
    assert fmean(map(abs, errors)) < mean
    assert max(map(abs, errors)) < worst


def test_torchs_adam_takes_about_as_much_longer_as_it_moves_more() -> None:
    """Three times the bytes: 2.4 to 2.9 times the time were measured on Grace."""
    errors = errors_of("torch", "GH200 Grace CPU")
    assert 0.0 < fmean(errors) < 0.2


def test_a_machines_only_row_predicts_nothing() -> None:
    alone = [row for row in predictions() if row.hardware == "Xeon 4210R"]
    assert [row.predicted_seconds for row in alone] == [None]
