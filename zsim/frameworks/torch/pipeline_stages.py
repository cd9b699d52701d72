"""Steps of torch's pipelines with several stages per rank: its lowering passes over an order of computations.

Source: `_PipelineScheduleRuntime` of torch 2.13 `torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zsim.errors import InputError
from zsim.plan.actions import Action, Kind, MessageCall, Order, Overlap, Step, actions_of

MAX_ACTIVE_STAGES = 3  # `max_active_stages` of `_add_unshard_reshard`, which no caller sets
_BACKWARDS: tuple[Kind, ...] = ("B", "I")
_FSDP: tuple[Kind, ...] = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def lower_orders(orders: Sequence[Order], rank_of: Sequence[int], micro_batches: int) -> list[Order]:
    """The orders with parameters gathered and freed, gradients reduced, and messages. `rank_of` has the
    pipeline rank of every stage. Torch lowers so whether its stages are FSDP's or not.

    Raises InputError if a computation never gets its input.
    """
    prepared = [_add_reductions(_add_unshards(order), micro_batches) for order in orders]
    return _add_messages(prepared, rank_of)


def steps_of_orders(orders: Iterable[Order], *, is_fsdp: bool) -> list[list[Step]]:
    """Programs of lowered orders: every message goes alone, a computation waits for what it received, sends
    are waited at the step's end. Without FSDP its three actions do nothing and are left out."""
    return [
        [_step(action) for action in _actions(order) if is_fsdp or action.kind not in _FSDP]
        for order in orders
    ]


def _step(action: Action) -> Step:
    if action.kind.startswith(("SEND", "RECV")):
        return MessageCall((action,), is_batched=False, waits="use")
    return action


def _actions(order: Iterable[Action | Overlap]) -> Iterator[Action]:
    for item in order:
        yield from actions_of(item)


def _add_unshards(order: Order) -> Order:
    """Before each item, stages that are not next any more are freed, and then the next stages that are not
    gathered are gathered. The next stages are the first MAX_ACTIVE_STAGES from the item on, with an overlap's
    second stage even beyond (`_add_unshard_reshard`). Stages are freed in the order in which they were
    gathered. torch's order is that of a set.
    """
    active: dict[int, None] = {}
    lowered_order: Order = []
    for item, next_stages in zip(order, _next_stages(order), strict=True):
        for stage in [stage for stage in active if stage not in next_stages]:
            del active[stage]
            lowered_order.append(Action("RESHARD", stage))
        for stage in [stage for stage in next_stages if stage not in active]:
            active[stage] = None
            lowered_order.append(Action("UNSHARD", stage))
        lowered_order.append(item)
    return [*lowered_order, *(Action("RESHARD", stage) for stage in active)]


def _next_stages(order: Order) -> list[list[int]]:
    """The stages that come next from every item on, computed from the last item to the first."""
    firsts: dict[int, int] = {}  # the item at which each stage comes next, in the order of coming
    next_stages = []
    for position in reversed(range(len(order))):
        item_stages = dict.fromkeys((part.stage for part in actions_of(order[position])), position)
        firsts = item_stages | {stage: first for stage, first in firsts.items() if stage not in item_stages}
        last = list(firsts.values())[:MAX_ACTIVE_STAGES][-1]
        next_stages.append([stage for stage, first in firsts.items() if first <= last])
    return next_stages[::-1]


def _add_reductions(order: Order, micro_batches: int) -> Order:
    """After a stage's last backward its gradients are reduced (`_add_reduce_grad`)."""
    backwards_per_stage: Counter[int] = Counter()
    lowered_order: Order = []
    for item in order:
        lowered_order.append(item)
        for part in actions_of(item):
            if part.kind in ("B", "W"):
                backwards_per_stage[part.stage] += 1
                if backwards_per_stage[part.stage] == micro_batches:
                    lowered_order.append(Action("REDUCE_GRAD", part.stage))
    return lowered_order


def _add_messages(orders: Sequence[Order], rank_of: Sequence[int]) -> list[Order]:
    """`_add_send_recv`: the ranks take turns, and each places its next item if that has its input. After a
    computation comes the send of its result, and the receive goes to the end of what the neighbour has placed
    by then, so that the messages of a pair have one order on both sides.
    """
    lowered_orders: list[Order] = [[] for _ in orders]
    available: list[set[Action]] = [set() for _ in orders]
    remaining_items = [iter(order) for order in orders]
    heads: list[Action | Overlap | None] = [next(remaining, None) for remaining in remaining_items]
    while any(head is not None for head in heads):
        is_stuck = True
        for rank, head in enumerate(heads):
            if head is None or not all(
                _is_ready(part, available[rank], rank_of) for part in actions_of(head)
            ):
                continue
            is_stuck = False
            lowered_orders[rank].append(head)
            for part in actions_of(head):
                available[rank].add(part)
                for action, action_rank in _messages(part, rank_of):
                    lowered_orders[action_rank].append(action)
                    available[action_rank].add(action)
            heads[rank] = next(remaining_items[rank], None)
        if is_stuck:
            waiting = ", ".join(
                f"{head} on rank {rank}" for rank, head in enumerate(heads) if head is not None
            )
            raise InputError(
                "parallelism.schedule_csv: the schedule cannot run to its end; these wait for inputs that "
                f"come after them: {waiting}"
            )
    return lowered_orders


def _is_ready(action: Action, available: set[Action], rank_of: Sequence[int]) -> bool:
    """Whether the rank has received the action's input, or has computed it itself."""
    _, stage, number = action
    if action.kind == "F" and stage > 0:
        return bool(available & {Action("RECV_F", stage, number), Action("F", stage - 1, number)})
    if action.kind in _BACKWARDS and stage < len(rank_of) - 1:
        local_results = {Action(kind, stage + 1, number) for kind in _BACKWARDS}
        return bool(available & {Action("RECV_B", stage, number), *local_results})
    return True


def _messages(action: Action, rank_of: Sequence[int]) -> list[tuple[Action, int]]:
    """The send of an action's result and its receive, each with its rank. A stage of the same rank
    gets none.
    """
    _, stage, number = action
    if action.kind not in ("F", *_BACKWARDS):
        return []
    is_forward = action.kind == "F"
    peer = stage + 1 if is_forward else stage - 1
    if not 0 <= peer < len(rank_of) or rank_of[peer] == rank_of[stage]:
        return []
    send = Action("SEND_F" if is_forward else "SEND_B", stage, number)
    receive = Action("RECV_F" if is_forward else "RECV_B", peer, number)
    return [(send, rank_of[stage]), (receive, rank_of[peer])]
