"""Layers dealt out to stages as DeepSpeed's PipelineModule deals them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from zsim.errors import InputError
from zsim.specs.library import Library
from zsim.specs.strategy.parallelism_table import (
    layer_weights,
    partition_balanced,
    partition_uniform,
    split_balanced_layers,
)


@pytest.mark.parametrize(
    ("weights", "parts", "begins"),
    [
        ([50, *[12] * 10, 0, 50], 4, [0, 1, 6, 12, 13]),
        ([5, *[12] * 12, 0, 5], 5, [0, 3, 6, 9, 11, 15]),
        ([0, *[1] * 10, 0, 0], 4, [0, 4, 7, 9, 13]),
        ([0, *[1] * 7, 0, 0], 3, [0, 4, 6, 10]),
        ([1, 2, 3], 4, [0, 1, 2, 3, 3]),
    ],
)
def test_partitions_are_those_of_deepspeed(weights: list[int], parts: int, begins: list[int]) -> None:
    """Returned by `deepspeed.runtime.utils.partition_balanced` of 0.19.8."""
    assert partition_balanced(weights, parts) == begins


def test_no_partition_is_better_balanced() -> None:
    """Against all partitions of seven layers into three runs, by the difference of largest and smallest."""
    for weights in product((0, 3, 5), repeat=5):
        layers = [*weights, 4, 1]

        def spread(begins: list[int], layers: list[int] = layers) -> int:
            sums = [sum(layers[begin:end]) for begin, end in pairwise(begins)]
            return max(sums) - min(sums)

        every = [[0, one, two, 7] for one in range(1, 6) for two in range(one + 1, 7)]
        assert spread(partition_balanced(layers, 3)) <= min(spread(begins) for begins in every)


def test_uniform_gives_the_first_parts_more() -> None:
    assert partition_uniform(11, 4) == [0, 3, 6, 9, 11]
    assert partition_uniform(2, 3) == [0, 1, 2, 2]


def test_blocks_are_dealt_out_by_parameters_or_by_number() -> None:
    """Llama 3.2 1B: 16 blocks of 61 M, embedding and tied head of 263 M each, as much as 4.3 blocks."""
    weights = layer_weights(Library().model("llama-3.2-1b"))
    assert [weights[0] // 10**6, weights[1] // 10**6, weights[-1] // 10**6] == [262, 60, 262]
    assert split_balanced_layers(weights, 16, 4, by_blocks=False) == (2, 6, 6, 2)
    assert split_balanced_layers(weights, 16, 4, by_blocks=True) == (4, 4, 4, 4)
    with pytest.raises(InputError, match="found 17 stages for 16 layers; expected at most 16"):
        split_balanced_layers(weights, 16, 17, by_blocks=True)
