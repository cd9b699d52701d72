"""Steps of torch's pipelines with one stage per rank. `torch_stages.py` has those with several.

Source: torch 2.13 `torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

from zsim.plan.actions import Action, Kind, MessageCall, MessageWait, Step

_KINDS: tuple[Kind, Kind] = ("F", "B")


def gpipe_steps(ranks: int, micro_batches: int, *, is_fsdp: bool) -> list[list[Step]]:
    """`ScheduleGPipe._step_microbatches`: every message has its own call, a receive is waited for before its
    computation, sends of a phase at the phase's end.
    """
    programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for kind in _KINDS:
            sends: list[Action] = []
            for number in range(micro_batches):
                _post(steps, _receive(kind, rank, ranks, number), "stream")
                steps.append(Action(kind, rank, number))
                new_sends = _send(kind, rank, ranks, number)
                _post(steps, new_sends, "use")
                sends += new_sends
            if sends:
                steps.append(MessageWait(tuple(sends)))
        programs.append(_reduce_last(steps, rank, is_fsdp=is_fsdp))
    return programs


def one_forward_one_backward_steps(ranks: int, micro_batches: int, *, is_fsdp: bool) -> list[list[Step]]:
    """`Schedule1F1B._step_microbatches`: between the first and the last backward that follow a forward, a
    send goes in one batch with the receive from the same neighbour. Before and after, each message has its
    own call, and a send is waited for after the next computation.
    """
    return [
        _reduce_last(_one_forward_one_backward(ranks, rank, micro_batches), rank, is_fsdp=is_fsdp)
        for rank in range(ranks)
    ]


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    steps: list[Step] = []
    num_warmup = min(micro_batches, ranks - rank)
    waiting: list[Action] = []
    for number in range(num_warmup):
        _post(steps, _receive("F", rank, ranks, number), "stream")
        steps.append(Action("F", rank, number))
        waiting = _wait(steps, waiting)
        if number < num_warmup - 1:
            waiting = _send("F", rank, ranks, number)
            _post(steps, waiting, "use")
    for number in range(micro_batches):
        forward = number + num_warmup - 1  # whose output is still unsent
        is_steady = forward < micro_batches
        new_sends = _send("F", rank, ranks, forward) if is_steady else []
        _post(steps, new_sends + _receive("B", rank, ranks, number), "stream")
        steps.append(Action("B", rank, number))
        new_sends = _send("B", rank, ranks, number)
        if forward + 1 < micro_batches:
            _post(steps, new_sends + _receive("F", rank, ranks, forward + 1), "stream")
            steps.append(Action("F", rank, forward + 1))
        else:
            _wait(steps, waiting)
            _post(steps, new_sends, "use")
            waiting = new_sends
    _wait(steps, waiting)
    return steps


def _wait(steps: list[Step], messages: list[Action]) -> list[Action]:
    if messages:
        steps.append(MessageWait(tuple(messages)))
    return []


def _post(steps: list[Step], messages: list[Action], waits: str) -> None:
    """`_batch_p2p`: sends and receives are one batch if there are both. Otherwise they are lone messages."""
    if messages:
        is_batched = len({message.kind.startswith("SEND") for message in messages}) == 2
        steps.append(MessageCall(tuple(messages), is_batched, "stream" if waits == "stream" else "use"))


def _receive(kind: str, rank: int, ranks: int, number: int) -> list[Action]:
    if kind == "F":
        return [Action("RECV_F", rank, number)] if rank > 0 else []
    return [Action("RECV_B", rank, number)] if rank < ranks - 1 else []


def _send(kind: str, rank: int, ranks: int, number: int) -> list[Action]:
    if kind == "F":
        return [Action("SEND_F", rank, number)] if rank < ranks - 1 else []
    return [Action("SEND_B", rank, number)] if rank > 0 else []


def _reduce_last(steps: list[Step], stage: int, *, is_fsdp: bool) -> list[Step]:
    """The steps, with FSDP's gradients reduced last (`perform_reduce_grad`, which does nothing without)."""
    return [*steps, Action("REDUCE_GRAD", stage)] if is_fsdp else steps
