"""The order in which pipeline ranks compute, and which of them holds which stages.

Every schedule returns one list of actions per pipeline rank, without messages. There are `ranks` pipeline
ranks with `virtual` stages each, and `micro_batches` per pipeline. Functions assume the counts that their
framework demands (`PipelineRuntime.check`).

GPipe, 1F1B, interleaved 1F1B and looped breadth-first run a backward whole. Interleaved zero bubble, ZBV and
DualPipeV part it in I, the gradient of its input, and W, those of its weights, to fill bubbles with W. Source
of the latter: `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, `ScheduleDualPipeV` of torch 2.13
`torch/distributed/pipelining/schedules.py`. The papers are arXiv 2401.10241 (ZB1P, and ZB-V in section 6).

Ranks hold the stages of the model in loops or in the shape of a V. Source: `generate_stage_to_rank_mapping`
of torch 2.13 `torch/distributed/pipelining/_utils.py`. Megatron-Core 0.16.1 places chunk j of rank r as a
loop does (`core/pipeline_parallel/schedules.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from zsim.plan.actions import Action, Kind, Order, Overlap
from zsim.specs.strategy.parallelism import V_SHAPED

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


def interleaved_zero_bubble(ranks: int, virtual: int, micro_batches: int) -> list[Order]:
    """Interleaved 1F1B with one forward ahead per hop instead of two. Rank r runs the W of a micro-batch r
    backwards after its I, and the last ones at the end.
    """
    size = chunk_group_size(ranks, micro_batches)
    orders: list[Order] = []
    for rank in range(ranks):
        forwards, backwards = interleaved_lists(ranks, rank, virtual, micro_batches, size)
        num_warmup = num_interleaved_warmup(ranks, rank, virtual, micro_batches, size, per_hop=1)
        order: Order = list(forwards[:num_warmup])
        for number, backward in enumerate(backwards):
            order += forwards[num_warmup + number : num_warmup + number + 1]
            order.append(backward._replace(kind="I"))
            if number >= rank:
                order.append(backwards[number - rank]._replace(kind="W"))
        orders.append(
            [
                *order,
                *(
                    backward_action._replace(kind="W")
                    for backward_action in backwards[max(0, len(backwards) - rank) :]
                ),
            ]
        )
    return orders


class _OrderWriter:
    """An order being written. Micro-batches are numbered by kind and stage as they come."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.order: Order = []
        self.pending_weights: deque[Action] = deque()  # W of the I's so far, oldest first
        self._count: Counter[tuple[Kind, int]] = Counter()

    def count(self, kind: Kind, chunk: int) -> int:
        """Actions of `kind` on `chunk` so far."""
        return self._count[kind, chunk]

    def next_action(self, kind: Kind, chunk: int) -> Action:
        """The next micro-batch's action of `kind`. B counts as an I."""
        counted: Kind = "I" if kind == "B" else kind
        number = self._count[counted, chunk]
        self._count[counted, chunk] += 1
        return Action(kind, self.stages[chunk], number)

    def add(self, *actions: tuple[Kind, int], times: int = 1) -> None:
        """Writes the next action of each (kind, chunk), and all of them `times` over."""
        for kind, chunk in actions * times:
            action = self.next_action(kind, chunk)
            self.order.append(action)
            if kind == "I":
                self.pending_weights.append(action._replace(kind="W"))

    def overlap(self, forward: int, backward: int) -> None:
        """Write a forward of one chunk paired with a full backward of the other."""
        self.order.append(Overlap(self.next_action("F", forward), self.next_action("B", backward)))

    def add_pending_weight(self) -> None:
        """Write the oldest pending W, if any."""
        if self.pending_weights:
            self.order.append(self.pending_weights.popleft())


def zbv(ranks: int, micro_batches: int) -> list[Order]:
    """ZB-V: two stages per rank, of which rank r has the first and the last but r. It is planned for at least
    2 x ranks - 1 micro-batches, of which those beyond `micro_batches` are left out.
    """
    planned = max(2 * ranks - 1, micro_batches)
    return [
        [action for action in _zbv(ranks, rank, planned) if (action.micro_batch or 0) < micro_batches]
        for rank in range(ranks)
    ]


def _zbv(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    writer = _OrderWriter([stage_of("zbv-zero-bubble", ranks, rank, chunk) for chunk in (0, 1)])
    writer.add(("F", 0), times=2 * (ranks - rank) - 1)
    writer.add(("F", 1), ("F", 0), times=rank)
    writer.add(("F", 1), ("I", 1), ("W", 1), times=ranks - rank)
    while writer.count("F", 1) < writer.count("F", 0) or writer.count("F", 0) < micro_batches:
        if writer.count("F", 0) < micro_batches:
            writer.add(("F", 0))
        writer.add(("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    writer.add(("I", 0), ("I", 1), times=rank)
    writer.add(("I", 0), ("W", 0), times=ranks - rank)
    for chunk in (1, 0):
        writer.add(("W", chunk), times=writer.count("I", chunk) - writer.count("W", chunk))
    return [action for action in writer.order if isinstance(action, Action)]


def dualpipe_v(ranks: int, micro_batches: int) -> list[Order]:
    """DualPipeV (arXiv 2412.19437; DeepSeek's DualPipe repository): two stages per rank in a V, with forwards
    of one paired with backwards of the other. The steps are those of torch's class, which names them 1 to 8.
    """
    return [_dualpipe_v(ranks, rank, micro_batches) for rank in range(ranks)]


def _dualpipe_v(ranks: int, rank: int, micro_batches: int) -> Order:
    writer = _OrderWriter([stage_of("dualpipe-v", ranks, rank, chunk) for chunk in (0, 1)])
    later_ranks = ranks - rank - 1
    writer.add(("F", 0), times=2 * later_ranks)
    writer.add(("F", 0), ("F", 1), times=rank + 1)
    for _ in range(later_ranks):
        writer.add(("I", 1))
        writer.add_pending_weight()
        writer.add(("F", 1))
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and later_ranks == 0:
            writer.add(("F", 0), ("B", 1))
        else:
            writer.overlap(0, 1)
        writer.overlap(1, 0)
    for _ in range(later_ranks):
        writer.add(("B", 1))
        writer.overlap(1, 0)
    _drain(writer, rank, later_ranks)
    return writer.order


def _drain(writer: _OrderWriter, rank: int, later_ranks: int) -> None:
    """The last backwards. From the middle of rank + 1 pairs on they come without their weights, which fill
    the gaps: on odd ranks from the pair's first, on even ranks from its second.
    """
    half = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    for number in range(2 * (rank + 1)):
        writer.add(("I" if number >= half else "B", 1 - number % 2))
    for _ in range(later_ranks):
        writer.add_pending_weight()
        writer.add(("I", 0))
    for _ in range(rank + 1):
        writer.add_pending_weight()


def stage_of(schedule: str, ranks: int, rank: int, chunk: int) -> int:
    """The stage that is `rank`'s `chunk`-th, both from 0. It is chunk x ranks + rank in a loop. In a V the
    odd chunks run back, from the last rank to the first.
    """
    is_back = schedule in V_SHAPED and chunk % 2 == 1
    return chunk * ranks + (ranks - 1 - rank if is_back else rank)


def rank_of_stage(schedule: str, ranks: int, stage: int) -> int:
    """The pipeline rank that holds `stage`."""
    chunk, rank = divmod(stage, ranks)
    is_back = schedule in V_SHAPED and chunk % 2 == 1
    return ranks - 1 - rank if is_back else rank


def ranks_of_stages(schedule: str, ranks: int, virtual: int) -> list[int]:
    """The pipeline rank of every stage, in model order."""
    return [rank_of_stage(schedule, ranks, stage) for stage in range(ranks * virtual)]
