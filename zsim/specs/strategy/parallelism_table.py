"""The `[parallelism]` table, in the shape of its file.

Layers dealt out to pipeline stages by weight, as DeepSpeed's PipelineModule does.

Source: `partition_balanced` and `partition_uniform` of DeepSpeed 0.19.8 `deepspeed/runtime/utils.py`, and
`_partition_layers` of `deepspeed/runtime/pipe/module.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, StrictBool

from zsim.errors import InputError
from zsim.operations.operation import Role
from zsim.specs.lazy_model import StrictTable
from zsim.specs.model.spec import ContextMethod, ModelSpec
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.requirement import left_out, phrase


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


Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[int, Field(ge=0, strict=True)]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble",
    "dualpipe-v",
]  # fmt: skip


class ParallelismTable(StrictTable):
    """`[parallelism]`. Degrees left out are 1, and data parallelism is what remains of the GPUs.

    With `context` a micro-batch belongs to a group of ranks. Sequences that ranks of DeepSpeed's Ulysses load
    one each are separate micro-batches. A pipeline of several `passes` runs gradient_accumulation_steps /
    passes micro-batches in each.
    """

    tensor: Count = Field(default=1, description="tensor-parallel ranks")
    sequence_parallel: StrictBool | None = Field(
        default=None,
        description="norms and residuals divided by sequence; left out: "
        + left_out("parallelism.sequence_parallel"),
    )
    async_tensor: StrictBool = Field(
        default=False, description="overlap tensor-parallel collectives with products, piece by piece"
    )
    overlap_tensor_reduce: StrictBool | None = Field(
        default=None, description="sum inputs' gradients beneath weights' products; left out: by the release"
    )
    gather_per_product: StrictBool = Field(
        default=False,
        description="products of one input reduce its gradient (uncompiled: gather it) separately, as "
        "torch's `ColwiseParallel` does",
    )
    loss_parallel: StrictBool = Field(
        default=True, description="each tensor-parallel rank computes the loss of its part of the vocabulary"
    )
    pipeline: Count = Field(default=1, description="pipeline-parallel ranks")
    schedule: ScheduleName | None = Field(
        default=None, description="pipeline schedule; left out: the framework's"
    )
    schedule_csv: str | None = Field(
        default=None, description="a schedule in torch's CSV format; left out: `schedule`"
    )
    virtual_stages: Count | None = Field(
        default=None,
        description="stages on each pipeline rank; left out: as many as the schedule needs, mostly 1",
    )
    first_stage_less_layers: Number | None = Field(
        default=None,
        description="layers fewer, for the embedding; left out: "
        + left_out("parallelism.first_stage_less_layers"),
    )
    last_stage_less_layers: Number | None = Field(
        default=None,
        description="layers fewer, for head and loss; left out: "
        + left_out("parallelism.last_stage_less_layers"),
    )
    layers_per_stage: tuple[Number, ...] | None = Field(
        default=None,
        description="layers of each virtual stage, in model order; 0: only embedding or head; left "
        "out: equal, but for the two keys above",
    )
    passes: Count = Field(
        default=1, description="pipeline passes per step, which divide its micro-batches evenly"
    )
    context: Count = Field(default=1, description="context-parallel ranks")
    context_method: ContextMethod | None = Field(
        default=None,
        description="how attention sees whole sequences; left out: "
        + left_out("parallelism.context_method")
        + "; windows need all-gather (FlexAttention under torch) or all-to-all",
    )
    expert: Count = Field(default=1, description="expert-parallel ranks")
    expert_tensor: Count | None = Field(
        default=None,
        description="ranks that share an expert's products; left out: "
        + left_out("parallelism.expert_tensor"),
    )
    dispatcher: Dispatcher | None = Field(
        default=None, description="dispatch of tokens to experts; left out: the framework's"
    )
    capacity_factor: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="capacity of an expert over the mean load; left out: no limit"
    )
    expert_imbalance: (
        Annotated[float, Field(ge=1)] | tuple[Annotated[float, Field(ge=0)], ...] | str | None
    ) = Field(
        default=None,
        description="rows of the fullest rank over the mean (1: forced balance), a load per rank (equal "
        "loads are drawn), a published spread by name, 'seed:N', or 'padding:F' for a fraction F of padding "
        "that chooses alike; left out: as measured of routers",
    )
    expert_padding: bool = Field(
        default=False,
        description="experts' rows are padded to the fullest's, as "
        + phrase("parallelism.expert_padding")
        + " want them (without `expert`)",
    )
    order: str | None = Field(
        default=None,
        description='axes of the mesh from the fastest on, as in "tp-cp-dp-pp"; left out: that one',
    )
