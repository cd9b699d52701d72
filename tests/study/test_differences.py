from __future__ import annotations

import json
from typing import Any

import pytest

from zsim.study.differences import differing_settings, format_step_range, is_distinguishable, range_of_row
from zsim.validated.ratios import ALLOCATOR_SHORT

ROW = {
    "model": "llama-3-8b", "gpu": "h100-sxm-80gb", "cluster": "dgx-h100", "nodes": 1, "gpus": 8,
    "strategy": "FSDP2", "training.micro_batch_size": 1, "step_tokens": 8192, "step_seconds": 1.0,
    "step_seconds_low": 0.95, "step_seconds_high": 1.1, "allocator_retries": 0, "parallelism.tensor": 1,
    "parallelism.data": 8,
}  # fmt: skip


def test_a_row_without_an_interval_has_no_words() -> None:
    """As of an older zsim, whose results are kept."""
    old = {key: value for key, value in ROW.items() if not key.startswith("step_seconds_")}
    assert range_of_row(old) is None
    assert format_step_range(old) == ""


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, []),
        ({"gpus": 16, "nodes": 2}, ["GPUs"]),
        ({"training.micro_batch_size": 2, "strategy": "HSDP"}, ["batch", "strategy"]),
        ({"cluster": "roce-h100"}, ["network"]),
        ({"gpu": "b200-sxm-180gb"}, ["another model or GPU"]),
        ({"strategy": "HSDP", "allocator_retries": 2}, ["strategy", ALLOCATOR_SHORT]),
        ({"parallelism.tensor": 2, "parallelism.data": 4}, ["parallelism"]),
        ({"parallelism.data": 16, "gpus": 16, "nodes": 2}, ["GPUs"]),
    ],
)
def test_what_differs_is_found_in_the_rows(changes: dict[str, Any], settings: list[str]) -> None:
    assert differing_settings(ROW, {**ROW, **changes}) == settings


def test_a_row_of_an_older_zsim_has_no_degrees_to_differ_in() -> None:
    old = {key: value for key, value in ROW.items() if not key.startswith("parallelism.")}
    assert differing_settings(old, {**ROW, "parallelism.tensor": 2}) == []
    assert differing_settings({**ROW, "parallelism.tensor": 2}, old) == []


def test_ratios_of_steps_whose_ranks_share_a_replica_are_known_less_well() -> None:
    """Another micro-batch: 10 % is a difference with one rank to a replica, and none with two."""
    slow = {**ROW, "training.micro_batch_size": 2, "step_tokens": 16384, "step_seconds": 2.2}
    assert is_distinguishable(ROW, slow)
    shared = {"parallelism.tensor": 2, "parallelism.data": 4}
    assert not is_distinguishable({**ROW, **shared}, {**slow, **shared})


def test_steps_are_compared_for_the_same_tokens() -> None:
    """Twice the tokens in twice the time is no difference; in the same time it is."""
    slow = {**ROW, "training.micro_batch_size": 2, "step_tokens": 16384, "step_seconds": 2.02}
    assert not is_distinguishable(ROW, slow)
    assert is_distinguishable(ROW, {**slow, "step_seconds": 1.0})


def test_words_say_what_cannot_be_told_from_the_best() -> None:
    near = {**ROW, "gpus": 16, "nodes": 2, "step_seconds": 1.01, "step_seconds_low": 0.96}
    far = {**near, "step_seconds": 1.5}
    assert format_step_range(near, ROW) == "0.96 to 1.10 s (80 %); no difference that zsim can tell from 1"
    assert format_step_range(far, ROW) == "0.96 to 1.10 s (80 %)"
    assert format_step_range(ROW, ROW) == "0.95 to 1.10 s (80 %)"


def test_a_batch_in_deepspeeds_file_is_not_another_strategy() -> None:
    """`train_batch_size` follows from the number of GPUs; a bucket is the strategy's."""
    settings = {"train_batch_size": "8", "precision": "bf16", "zero_optimization.reduce_bucket_size": "5"}
    row = {**ROW, "strategy.settings": json.dumps(settings)}
    larger = {**row, "gpus": 16, "strategy.settings": json.dumps({**settings, "train_batch_size": "16"})}
    assert differing_settings(row, larger) == ["GPUs"]
    bucket = {
        **row,
        "strategy.settings": json.dumps({**settings, "zero_optimization.reduce_bucket_size": "6"}),
    }
    assert differing_settings(row, bucket) == ["strategy"]


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"style": "megatron", "context_method": "p2p", "async_tensor": True}, []),
        ({"context_method": "p2p"}, []),
        ({"context_inner": 2, "context_masks": True, "tensor_grain": 128}, []),
        ({"style": "megatron", "tensor": 2}, ["parallelism"]),
        ({"virtual_stages": 2}, ["parallelism"]),
        ({"expert": 8}, ["parallelism"]),
        ({"sequence_parallel": True}, ["parallelism"]),
        ({"context": 2, "context_method": "p2p"}, ["parallelism"]),
    ],
)
def test_how_a_framework_runs_what_is_not_asked_for_is_no_setting(
    changes: dict[str, Any], settings: list[str]
) -> None:
    """FSDP2 and Megatron, both with data parallelism alone, differ in the strategy."""
    how = {
        "style": "torch", "context": 1, "context_method": "all-gather", "context_inner": 1, "expert": 1,
        "context_masks": False, "tensor_grain": 1, "async_tensor": False, "virtual_stages": 1,
        "sequence_parallel": False,
    }  # fmt: skip
    one, other = (
        {**ROW, **{f"parallelism.{key}": value for key, value in own.items()}} for own in (how, how | changes)
    )
    assert differing_settings(one, other) == settings
