"""Orders and steps against torch 2.13's own schedules, action by action and message by message."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.plan.pipeline.runtimes import orders_of, steps_of
from tests.plan.pipeline.torch_schedules import CLASSES, Log, torch_log, torch_schedule
from zsim.errors import InputError
from zsim.plan.actions import Action, MessageCall, MessageWait, Overlap, Step
from zsim.plan.pipeline.orders import ranks_of_stages

SINGLE = ("gpipe", "1f1b")
V_SHAPED = ("zbv-zero-bubble", "dualpipe-v")
COUNTS = {
    name: [
        (name, ranks, virtual, micro_batches)
        for ranks in (2, 3, 4)
        for virtual in ((1,) if name in SINGLE else (2,) if name in V_SHAPED else (1, 2, 4))
        for micro_batches in (1, 3, 4, 6, 8, 9)
    ]
    for name in CLASSES
}


def torch_takes(name: str, ranks: int, virtual: int, micro_batches: int) -> bool:
    try:
        torch_schedule(name, ranks, virtual, micro_batches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", CLASSES)
def test_counts_are_refused_where_torch_refuses_them(name: str) -> None:
    """And the nearest count that the message names is one that torch takes."""
    for counts in COUNTS[name]:
        if torch_takes(*counts):
            steps_of("torch", *counts)
            continue
        with pytest.raises(InputError, match=r"training\.gradient_accumulation_steps: found") as caught:
            steps_of("torch", *counts)
        assert torch_takes(*counts[:3], int(str(caught.value).split()[-1]))


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in SINGLE])
def test_the_order_is_torch_s_pipeline_order(name: str) -> None:
    for counts in filter(lambda counts: torch_takes(*counts), COUNTS[name]):
        schedule = torch_schedule(*counts)
        expected = [
            [str(action) for action in schedule.pipeline_order[rank] if action is not None]
            for rank in range(counts[1])
        ]
        assert [[str(item) for item in order] for order in orders_of("torch", *counts)] == expected, counts
        assert dict(enumerate(ranks_of_stages(*counts[:3]))) == schedule.stage_index_to_group_rank


def told(steps: list[Step]) -> Log:
    """The steps as torch's run writes them: a computation waits for its receive, sends that no wait names are
    waited last, the newest first."""
    log: Log = []
    waiting: dict[Action, None] = {}
    for step in steps:
        assert not isinstance(step, Overlap)
        if isinstance(step, Action):
            received = step._replace(kind="RECV_F" if step.kind == "F" else "RECV_B")
            if step.kind in ("F", "B", "I") and received in waiting:
                log.append(f"wait {received}")
                del waiting[received]
            log.append(str(step))
        elif isinstance(step, MessageWait):
            log += [f"wait {message}" for message in step.messages]
            waiting = {message: None for message in waiting if message not in step.messages}
        else:
            log += called(step)
            if step.waits == "use":
                waiting.update((message, None) for message in step.messages)
    return log + [f"wait {message}" for message in reversed(waiting)]


def called(call: MessageCall) -> Log:
    names = [str(message) for message in call.messages]
    waited = call.waits == "stream"
    if call.is_batched:
        text = " ".join(names)
        return [f"batch {text}"] + [f"wait {text}"] * waited
    kinds = ["isend" if message.kind.startswith("SEND") else "irecv" for message in call.messages]
    posted = [f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)]
    return posted + [f"wait {name}" for name in names] * waited


def settled(log: Log) -> Log:
    """The log with stages that are freed together in order: torch frees them in that of a set."""
    runs = [list(run) for _, run in groupby(log, key=lambda text: text.endswith("RESHARD"))]
    return [text for run in runs for text in (sorted(run) if run[0].endswith("RESHARD") else run)]


@pytest.mark.parametrize("name", CLASSES)
def test_the_steps_are_what_torch_does(name: str) -> None:
    """Torch's `_step_microbatches` on every rank: computations, what FSDP is told, messages, batches and
    waits, in order. Without FSDP nothing but its own actions is gone."""
    for counts in filter(lambda counts: torch_takes(*counts), COUNTS[name]):
        programs = steps_of("torch", *counts, is_fsdp=True)
        for rank, steps in enumerate(programs):
            assert settled(told(steps)) == settled(torch_log(*counts, rank)), (counts, rank)
        told_fsdp = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        assert steps_of("torch", *counts) == [
            [step for step in steps if not isinstance(step, Action) or step.kind not in told_fsdp]
            for steps in programs
        ]
