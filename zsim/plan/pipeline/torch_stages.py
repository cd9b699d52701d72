"""Steps of torch's pipelines with several stages per rank: its lowering passes over an order of computations.

Source: `_PipelineScheduleRuntime` of torch 2.13 `torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zsim.errors import InputError
from zsim.plan.pipeline.schedules import Action, Kind, MessageCall, Order, Overlap, Step, parts_of

MAX_ACTIVE_STAGES = 3  # `max_active_stages` of `_add_unshard_reshard`, which no caller sets
_BACKWARDS: tuple[Kind, ...] = ("B", "I")
_FSDP: tuple[Kind, ...] = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def lowered(orders: Sequence[Order], rank_of: Sequence[int], micro_batches: int) -> list[Order]:
    """The orders with parameters gathered and freed, gradients reduced, and messages. `rank_of` has the
    pipeline rank of every stage. Torch lowers so whether its stages are FSDP's or not.

    Raises InputError if a computation never gets its input.
    """
    prepared = [_with_reductions(_with_gathers(order), micro_batches) for order in orders]
    return _with_messages(prepared, rank_of)


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
        yield from parts_of(item)


def _with_gathers(order: Order) -> Order:
    """Before each item, stages that are not next any more are freed, and then the next stages that are not
    gathered are gathered. The next stages are the first MAX_ACTIVE_STAGES from the item on, with an overlap's
    second stage even beyond (`_add_unshard_reshard`). Stages are freed in the order in which they were
    gathered. torch's order is that of a set.
    """
    active: dict[int, None] = {}
    result: Order = []
    for item, coming in zip(order, _coming(order), strict=True):
        for stage in [stage for stage in active if stage not in coming]:
            del active[stage]
            result.append(Action("RESHARD", stage))
        for stage in [stage for stage in coming if stage not in active]:
            active[stage] = None
            result.append(Action("UNSHARD", stage))
        result.append(item)
    return [*result, *(Action("RESHARD", stage) for stage in active)]


def _coming(order: Order) -> list[list[int]]:
    """The stages that come next from every item on, computed from the last item to the first."""
    firsts: dict[int, int] = {}  # the item at which each stage comes next, in the order of coming
    found = []
    for position in reversed(range(len(order))):
        own = dict.fromkeys((part.stage for part in parts_of(order[position])), position)
        firsts = own | {stage: first for stage, first in firsts.items() if stage not in own}
        last = list(firsts.values())[:MAX_ACTIVE_STAGES][-1]
        found.append([stage for stage, first in firsts.items() if first <= last])
    return found[::-1]


def _with_reductions(order: Order, micro_batches: int) -> Order:
    """After a stage's last backward its gradients are reduced (`_add_reduce_grad`)."""
    done: Counter[int] = Counter()
    result: Order = []
    for item in order:
        result.append(item)
        for part in parts_of(item):
            if part.kind in ("B", "W"):
                done[part.stage] += 1
                if done[part.stage] == micro_batches:
                    result.append(Action("REDUCE_GRAD", part.stage))
    return result


def _with_messages(orders: Sequence[Order], rank_of: Sequence[int]) -> list[Order]:
    """`_add_send_recv`: the ranks take turns, and each places its next item if that has its input. After a
    computation comes the send of its result, and the receive goes to the end of what the neighbour has placed
    by then, so that the messages of a pair have one order on both sides.
    """
    placed: list[Order] = [[] for _ in orders]
    known: list[set[Action]] = [set() for _ in orders]
    left = [iter(order) for order in orders]
    heads: list[Action | Overlap | None] = [next(one, None) for one in left]
    while any(head is not None for head in heads):
        is_stuck = True
        for rank, head in enumerate(heads):
            if head is None or not all(_is_ready(part, known[rank], rank_of) for part in parts_of(head)):
                continue
            is_stuck = False
            placed[rank].append(head)
            for part in parts_of(head):
                known[rank].add(part)
                for action, where in _messages(part, rank_of):
                    placed[where].append(action)
                    known[where].add(action)
            heads[rank] = next(left[rank], None)
        if is_stuck:
            heard = ", ".join(f"{head} on rank {rank}" for rank, head in enumerate(heads) if head is not None)
            raise InputError(
                "parallelism.schedule_csv: the schedule cannot run to its end; these wait for inputs that "
                f"come after them: {heard}"
            )
    return placed


def _is_ready(action: Action, known: set[Action], rank_of: Sequence[int]) -> bool:
    """Whether the rank has received the action's input, or has computed it itself."""
    _, stage, number = action
    if action.kind == "F" and stage > 0:
        return bool(known & {Action("RECV_F", stage, number), Action("F", stage - 1, number)})
    if action.kind in _BACKWARDS and stage < len(rank_of) - 1:
        own = {Action(kind, stage + 1, number) for kind in _BACKWARDS}
        return bool(known & {Action("RECV_B", stage, number), *own})
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
