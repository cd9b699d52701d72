"""Steps of DeepSpeed's `PipelineEngine`.

Source: `TrainSchedule` of DeepSpeed 0.19.8 `deepspeed/runtime/pipe/schedule.py`, `_exec_schedule` of
`deepspeed/runtime/pipe/engine.py`, `send` and `recv` of `deepspeed/runtime/pipe/p2p.py`.
"""

from __future__ import annotations

from zsim.plan.pipeline.schedules import Action, MessageCall, Step


def train_schedule_steps(ranks: int, micro_batches: int) -> list[list[Step]]:
    """The steps of 2 (micro-batches + ranks - 1) slots, per pipeline rank.

    Stage s has forwards in the slots of its own parity, of micro-batch (slot - s) / 2, and backwards in the
    others, of (slot + s + 1) / 2 - ranks. A slot begins with the messages to and from one neighbour, each by
    itself and waited for by the compute stream. With the previous stage the gradient of the slot before goes
    out, then the input comes in. With the next stage the gradient comes in, then the output of the slot
    before goes out. Gradients are reduced after the last slot.
    """
    return [[*_slots(ranks, rank, micro_batches), Action("REDUCE_GRAD", rank)] for rank in range(ranks)]


def _slots(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    steps: list[Step] = []
    previous: Action | None = None
    for slot in range(2 * (micro_batches + ranks - 1)):
        current = _computation(ranks, rank, micro_batches, slot)
        sends = [previous] if previous is not None else []
        is_forward = slot % 2 == rank % 2
        if is_forward and rank > 0:
            steps += [_lone_message(action._replace(kind="SEND_B")) for action in sends]
            steps += [_lone_message(current._replace(kind="RECV_F"))] if current else []
        elif not is_forward and rank < ranks - 1:
            steps += [_lone_message(current._replace(kind="RECV_B"))] if current else []
            steps += [_lone_message(action._replace(kind="SEND_F")) for action in sends]
        steps += [current] if current else []
        previous = current
    return steps


def _computation(ranks: int, rank: int, micro_batches: int, slot: int) -> Action | None:
    """The forward or backward of a slot, None where the micro-batch lies outside the batch."""
    is_forward = slot % 2 == rank % 2
    number = (slot - rank) // 2 if is_forward else (slot + rank + 1) // 2 - ranks
    return Action("F" if is_forward else "B", rank, number) if 0 <= number < micro_batches else None


def _lone_message(message: Action) -> MessageCall:
    return MessageCall((message,), is_batched=False, waits="stream")
