"""`max_split_size_mb` and `roundup_power2_divisions` in a job."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.specs.experiment.resolve import resolve


def experiment_of(**training: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        gpus=2,
        training={"sequence_length": 1024, "micro_batch_size": 4, **training},
        strategy={"kind": "fsdp2"},
    )


def reserved(**training: Any) -> int:
    row = zsim.simulate(experiment_of(**training)).report.allocator
    assert row is not None
    return row.reserved_bytes


def test_rounding_up_to_powers_of_two_reserves_more() -> None:
    """With eight parts a size grows by less than an eighth."""
    plain, eight = reserved(), reserved(roundup_power2_divisions=8)
    assert plain < eight < 1.15 * plain


def test_blocks_that_may_not_be_split_need_segments_of_their_own() -> None:
    assert reserved(max_split_size_mb=21) != reserved()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"roundup_power2_divisions": 6}, "found 6, expected a power of two"),
        ({"max_split_size_mb": 20}, "max_split_size_mb"),
        ({"garbage_collection_threshold": 1.0}, "garbage_collection_threshold"),
        ({"max_split_size_mb": 64, "expandable_segments": True}, "not simulated; expected one of them"),
    ],
)
def test_refusals_name_the_way_out(training: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        experiment_of(**training)


def test_a_threshold_without_a_limit_is_noted() -> None:
    notes = resolve(experiment_of(garbage_collection_threshold=0.8)).notes
    assert any("garbage_collection_threshold: no effect" in note for note in notes)
