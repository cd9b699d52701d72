"""Orders that part a backward in I, the gradient of its input, and W, those of its weights, to fill bubbles
with W: interleaved zero bubble, ZBV, DualPipeV. Every function returns one order per pipeline rank.

Source: `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, `ScheduleDualPipeV` of torch 2.13
`torch/distributed/pipelining/schedules.py`. The papers are arXiv 2401.10241 (ZB1P, and ZB-V in section 6).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from zsim.plan.actions import Action, Kind, Order, Overlap
from zsim.plan.pipeline.orders import chunk_group_size, interleaved_lists, num_interleaved_warmup
from zsim.plan.pipeline.placement import stage_of


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
