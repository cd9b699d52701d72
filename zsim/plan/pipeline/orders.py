"""The order in which pipeline ranks compute: GPipe, 1F1B, interleaved 1F1B and looped breadth-first.

Every function returns one list of actions per pipeline rank, without messages. There are `ranks` pipeline
ranks with `virtual` stages each, and `micro_batches` per pipeline. Functions assume the counts that their
framework demands (`PipelineRuntime.check`).
"""

from __future__ import annotations

from zsim.plan.actions import Action, Kind, Order
from zsim.plan.pipeline.placement import stage_of

_LOOP = "1f1b"


def gpipe(ranks: int, micro_batches: int) -> list[Order]:
    """All forwards, then all backwards in the same order (`ScheduleGPipe` of torch 2.13
    `torch/distributed/pipelining/schedules.py`). Figure 2c of arXiv 1811.06965 has the backwards reversed.
    """
    kinds: tuple[Kind, Kind] = ("F", "B")
    return [
        [Action(kind, rank, number) for kind in kinds for number in range(micro_batches)]
        for rank in range(ranks)
    ]


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[Order]:
    """min(micro_batches, ranks - 1 - rank) forwards ahead, then a forward and a backward in turns, then the
    backwards that remain (Megatron-Core 0.16.1 `forward_backward_pipelining_without_interleaving`). torch's
    `Schedule1F1B` counts one forward more ahead and starts the turns with a backward, which is the same
    order.
    """
    orders: list[Order] = []
    for rank in range(ranks):
        forwards = [Action("F", rank, number) for number in range(micro_batches)]
        backwards = [Action("B", rank, number) for number in range(micro_batches)]
        orders.append(_turns(forwards, backwards, min(micro_batches, ranks - 1 - rank)))
    return orders


def _turns(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Order:
    """`num_warmup` forwards, then forward and backward in turns, then backwards."""
    order: Order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return [*order, *backwards[len(forwards) - num_warmup :]]


def interleaved_table(micro_batches: int, virtual: int, group_size: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every virtual micro-batch: `group_size` micro-batches of chunk 0, the same of
    chunk 1, and so on, then the next group. The last group may be shorter. Backwards go through the same
    table with chunk virtual - 1 - chunk.

    Source: `get_schedule_table` of Megatron-Core 0.16.1 `core/pipeline_parallel/schedules.py`.
    """
    starts = range(0, micro_batches, group_size)
    return [
        (number, chunk)
        for start in starts
        for chunk in range(virtual)
        for number in range(start, min(start + group_size, micro_batches))
    ]


def chunk_group_size(ranks: int, micro_batches: int) -> int:
    """Micro-batches that an interleaved schedule runs through one chunk at a time: micro-batches over rounds,
    max(1, micro_batches // ranks) of them (`ScheduleInterleaved1F1B` of torch 2.13)."""
    return micro_batches // max(1, micro_batches // ranks)


def interleaved_lists(
    ranks: int, rank: int, virtual: int, micro_batches: int, group_size: int
) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards of `rank`, each in its own order."""
    table = interleaved_table(micro_batches, virtual, group_size)
    forwards = [Action("F", stage_of(_LOOP, ranks, rank, chunk), number) for number, chunk in table]
    backwards = [
        Action("B", stage_of(_LOOP, ranks, rank, virtual - 1 - chunk), number) for number, chunk in table
    ]
    return forwards, backwards


def num_interleaved_warmup(
    ranks: int, rank: int, virtual: int, micro_batches: int, group_size: int, per_hop: int = 2
) -> int:
    """Forwards before the first backward: min(all, per_hop (ranks - 1 - rank) + (virtual - 1) group_size).

    Source: `get_pp_rank_microbatches` of Megatron-Core 0.16.1, `_get_warmup_ops` of torch 2.13.
    """
    return min(micro_batches * virtual, per_hop * (ranks - 1 - rank) + (virtual - 1) * group_size)


def interleaved(ranks: int, virtual: int, micro_batches: int, group_size: int) -> list[Order]:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2), as torch's and Megatron's: they differ in
    `group_size`, Megatron's `microbatch_group_size_per_vp_stage` and torch's `chunk_group_size`."""
    orders: list[Order] = []
    for rank in range(ranks):
        forwards, backwards = interleaved_lists(ranks, rank, virtual, micro_batches, group_size)
        num_warmup = num_interleaved_warmup(ranks, rank, virtual, micro_batches, group_size)
        orders.append(_turns(forwards, backwards, num_warmup))
    return orders


def looped_bfs(ranks: int, virtual: int, micro_batches: int) -> list[Order]:
    """Chunk after chunk, all micro-batches of each. Backwards go from the last chunk and the last micro-batch
    on (`ScheduleLoopedBFS` of torch 2.13; arXiv 2211.05953).
    """
    orders: list[Order] = []
    for rank in range(ranks):
        stages = [stage_of(_LOOP, ranks, rank, chunk) for chunk in range(virtual)]
        forwards = [Action("F", stage, number) for stage in stages for number in range(micro_batches)]
        orders.append(
            [*forwards, *(Action("B", action.stage, action.micro_batch) for action in reversed(forwards))]
        )
    return orders
