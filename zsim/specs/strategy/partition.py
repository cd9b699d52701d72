"""Layers dealt out to pipeline stages by weight, as DeepSpeed's PipelineModule does.

Source: `partition_balanced` and `partition_uniform` of DeepSpeed 0.19.8 `deepspeed/runtime/utils.py`, and
`_partition_layers` of `deepspeed/runtime/pipe/module.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from zsim.errors import InputError
from zsim.operations.operation import Role
from zsim.specs.model.spec import ModelSpec


def layer_weights(model: ModelSpec) -> tuple[int, ...]:
    """Parameters of the layers that PipelineModule counts: the embedding, every block, the final norm, and
    the head.

    The head counts in full where it is tied, too.
    """
    norm = head = 0
    for module in model.after:
        if module.role is Role.PRODUCT:
            head += max(module.numel, module.op_spec.weight_numel)
        else:
            norm += module.numel
    embedding = sum(module.numel for module in model.before)
    return embedding, *(block.numel for block in model.blocks), norm, head


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """The first layer of each part, and the end: `num_parts` + 1 numbers.

    Parts are runs of layers whose largest and smallest sum of weights differ least. Among equals, each part
    from the last on is as short as possible. If there are no more layers than parts, each layer is a part.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = np.concatenate([[0.0], np.cumsum(weights, dtype=float)])
    largest = np.full((count + 1, num_parts + 1), np.inf)
    smallest = np.full((count + 1, num_parts + 1), np.inf)
    begins = np.zeros((count + 1, num_parts + 1), dtype=np.int64)
    largest[0, 0], part_indices = 0, np.arange(num_parts)
    for end in range(1, count + 1):
        last = (sums[end] - sums[:end])[:, None]  # of the part that ends here, by where it begins
        highest, lowest = np.maximum(largest[:end, :-1], last), np.minimum(smallest[:end, :-1], last)
        begin = end - 1 - np.argmin((highest - lowest)[::-1], axis=0)
        largest[end, 1:], smallest[end, 1:] = highest[begin, part_indices], lowest[begin, part_indices]
        begins[end, 1:] = begin
    bounds = [count]
    for part in range(num_parts, 0, -1):
        bounds.append(int(begins[bounds[-1], part]))
    return bounds[::-1]


def partition_uniform(count: int, num_parts: int) -> list[int]:
    """The first layer of each part, and the end, for equal numbers of layers.

    The first `count % num_parts` parts have one layer more. With fewer layers than parts the last parts are
    empty.
    """
    if count <= num_parts:
        return [min(part, count) for part in range(num_parts + 1)]
    layers_per_part, remainder = divmod(count, num_parts)
    return [part * layers_per_part + min(part, remainder) for part in range(num_parts + 1)]


def split_balanced_layers(
    weights: Sequence[int], num_blocks: int, stages: int, *, by_blocks: bool
) -> tuple[int, ...]:
    """Blocks of every stage where nothing says a split.

    PipelineModule balances the layers of `layer_weights` by their parameters. With `by_blocks` it counts
    blocks, as Megatron-DeepSpeed's models ask it to, which alone have tensor parallelism with a pipeline
    ('type:transformer', `megatron/model/gpt_model.py` of f4157bea).

    Raises InputError for more stages than blocks.
    """
    if stages > num_blocks:
        raise InputError(
            f"parallelism.pipeline: found {stages} stages for {num_blocks} layers; expected at most "
            f"{num_blocks}"
        )
    layer_costs = [0, *[1] * num_blocks, 0, 0] if by_blocks else weights
    begins = partition_balanced(layer_costs, stages)
    block_bounds = [
        min(max(begin, 1), num_blocks + 1) for begin in begins
    ]  # blocks are layers 1 to num_blocks
    return tuple(end - begin for begin, end in pairwise(block_bounds))
