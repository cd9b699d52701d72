"""Pipeline schedules against their closed forms, and their programs played to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest

from tests.plan.pipeline.runtimes import RUNTIMES, megatron_settings, orders_of, parallelism_of, steps_of
from tests.plan.pipeline.streams import Playing
from zsim.errors import InputError
from zsim.plan.actions import (
    Action,
    Kind,
    MessageCall,
    MessageWait,
    Order,
    Step,
    actions_of,
    no_pipeline,
)
from zsim.plan.pipeline.lowering import ranks_of
from zsim.plan.pipeline.orders import rank_of_stage, ranks_of_stages, stage_of

SINGLE, V_SHAPED = ("gpipe", "1f1b"), ("zbv-zero-bubble", "dualpipe-v")
STYLED = [(style, schedule) for style in RUNTIMES for schedule in RUNTIMES[style][0].schedules]
SETTINGS = (
    megatron_settings(),
    megatron_settings(waits_sends=False, overlap_grad_reduce=True, overlap_param_gather=True),
    megatron_settings(overlap_p2p_warmup_flush=True),
    megatron_settings(overlap_p2p=False, overlap_grad_reduce=True),
)


def actions(order: Order) -> list[Action]:
    return [part for item in order for part in actions_of(item)]


def virtuals(schedule: str) -> tuple[int, ...]:
    return (1,) if schedule in SINGLE else (2,) if schedule in V_SHAPED else (1, 2, 3)


# ---- closed forms ------------------------------------------------------------


def peak(order: Order) -> int:
    """Most stage-forwards of a rank whose weights' backward is still to come."""
    level = most = 0
    for action in actions(order):
        level += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, level)
    return most


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "micro_batches", "peaks"),
    [
        ("gpipe", 4, 1, 8, [8, 8, 8, 8]),
        ("looped-bfs", 4, 2, 8, [16, 16, 16, 16]),
        ("1f1b", 4, 1, 8, [4, 3, 2, 1]),
        ("1f1b", 4, 1, 16, [4, 3, 2, 1]),
        ("interleaved-1f1b", 4, 2, 8, [11, 9, 7, 5]),
        ("interleaved-1f1b", 8, 4, 16, [39, 37, 35, 33, 31, 29, 27, 25]),
        ("interleaved-zero-bubble", 4, 2, 8, [8, 8, 8, 8]),
        ("zbv-zero-bubble", 4, 2, 8, [8, 8, 8, 8]),
        ("dualpipe-v", 4, 2, 8, [9, 9, 9, 9]),
    ],
)
def test_stage_forwards_in_flight(
    schedule: str, ranks: int, virtual: int, micro_batches: int, peaks: list[int]
) -> None:
    """1F1B holds min(m, p - r); interleaved 2 (p - 1 - r) + (v - 1) g + 1, here with g = p; zero bubble p v
    on every rank; DualPipeV 2 p + 1."""
    assert [peak(order) for order in orders_of("torch", schedule, ranks, virtual, micro_batches)] == peaks


DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}


def bubble(orders: Sequence[Order]) -> float:
    """Idle over busy time of a rank, the same on all: F, I and W take 1 each, B takes 2, messages no time. An
    overlap runs its forward, then its backward, and what both computed leaves behind them, as in torch."""
    stages = 1 + max(action.stage for order in orders for action in actions(order))
    ends: dict[Action, int] = {}
    left = [list(order) for order in orders]
    clocks = [0 for _ in orders]
    while any(left):
        for rank, queue in enumerate(left):
            while queue and (end := ended(actions_of(queue[0]), clocks[rank], stages, ends)) is not None:
                ends.update((part, end) for part in actions_of(queue.pop(0)))
                clocks[rank] = end
    busy = sum(DURATIONS[action.kind] for action in actions(orders[0]))
    return max(clocks) / busy - 1


def ended(parts: Sequence[Action], clock: int, stages: int, ends: dict[Action, int]) -> int | None:
    """When a rank that is free at `clock` has run the parts; None if it lacks an input."""
    for part in parts:
        needed = inputs(part, stages, ends)
        if needed is None:
            return None
        clock = max(clock, needed) + DURATIONS[part.kind]
    return clock


def inputs(action: Action, stages: int, ends: dict[Action, int]) -> int | None:
    """When an action's inputs are there; None if they are still to be computed."""
    if action.kind == "F":
        needed = [[Action("F", action.stage - 1, action.micro_batch)]] if action.stage else []
    elif action.kind == "W":
        needed = [[action._replace(kind="I")]]
    else:
        needed = [[action._replace(kind="F")]]
        if action.stage < stages - 1:
            needed.append([Action(kind, action.stage + 1, action.micro_batch) for kind in ("B", "I")])
    found = [[ends[one] for one in either if one in ends] for either in needed]
    return max((min(one) for one in found), default=0) if all(found) else None


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "micro_batches", "fraction"),
    [
        ("gpipe", 4, 1, 8, 3 / 8),
        ("1f1b", 4, 1, 8, 3 / 8),
        ("1f1b", 8, 1, 32, 7 / 32),
        ("interleaved-1f1b", 4, 2, 8, 3 / 16),
        ("interleaved-1f1b", 4, 3, 16, 3 / 48),
        ("looped-bfs", 4, 2, 8, 3 / 16),
        ("interleaved-zero-bubble", 4, 2, 8, 3 / 48),
        ("interleaved-zero-bubble", 8, 2, 16, 7 / 96),
        ("zbv-zero-bubble", 4, 2, 16, 3 / 96),
        ("zbv-zero-bubble", 8, 2, 32, 7 / 192),
        ("dualpipe-v", 4, 2, 8, 1 / 8),
        ("dualpipe-v", 4, 2, 16, 1 / 16),
        ("dualpipe-v", 8, 2, 16, 7 / 48),
        ("dualpipe-v", 8, 2, 32, 7 / 96),
    ],
)
def test_bubble_over_ideal(
    schedule: str, ranks: int, virtual: int, micro_batches: int, fraction: float
) -> None:
    """(p - 1) / m for GPipe and 1F1B; over v m interleaved and breadth-first (arXiv 2104.04473, 2.2); a third
    of that with zero bubble; two thirds with DualPipeV, where overlaps keep their results back."""
    orders = orders_of("torch", schedule, ranks, virtual, micro_batches)
    assert bubble(orders) == pytest.approx(fraction, rel=1e-12)


def test_megatron_s_interleaved_order_is_torch_s_with_the_same_groups() -> None:
    """n = p where p divides m; the example of the schedule: 4 ranks, 2 stages each, 8 micro-batches."""
    orders = orders_of("megatron", "interleaved-1f1b", 4, 2, 8)
    assert orders == orders_of("torch", "interleaved-1f1b", 4, 2, 8)
    expected = (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 "
        "0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    )
    assert " ".join(str(item) for item in orders[0]) == expected


def test_a_group_s_micro_batches_and_a_shorter_last_group() -> None:
    """Megatron's own example: 2 ranks, groups of 3, 5 micro-batches, 2 chunks."""
    order = orders_of("megatron", "interleaved-1f1b", 2, 2, 5, group_size=3)[0]
    forwards = [action for action in actions(order) if action.kind == "F"]
    assert [action.micro_batch for action in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [action.stage for action in forwards] == [0, 0, 0, 2, 2, 2, 0, 0, 2, 2]


def test_stages_lie_in_loops_and_in_a_v() -> None:
    assert ranks_of_stages("interleaved-1f1b", 3, 2) == [0, 1, 2, 0, 1, 2]
    assert ranks_of_stages("zbv-zero-bubble", 3, 2) == [0, 1, 2, 2, 1, 0]
    assert ranks_of(parallelism_of("dualpipe-v", 3, 2), 6) == [0, 1, 2, 2, 1, 0]
    for schedule, ranks, chunk in product(("1f1b", "dualpipe-v"), (2, 3), (0, 1)):
        for rank in range(ranks):
            assert rank_of_stage(schedule, ranks, stage_of(schedule, ranks, rank, chunk)) == rank


# ---- programs ------------------------------------------------------------


def manners(style: str, ranks: int, virtual: int) -> list[dict[str, Any]]:
    """Options of `steps_of`: Megatron's settings, also with a group above the pipeline ranks."""
    if style != "megatron":
        return [{"is_fsdp": True}] if style == "torch" else [{}]
    groups = (None, ranks + 1) if virtual > 1 else (None,)
    return [{"settings": replace(one, micro_batch_group=group)} for one, group in product(SETTINGS, groups)]


@pytest.mark.parametrize(("style", "schedule"), STYLED)
def test_programs_come_to_their_ends_and_compute_the_order(style: str, schedule: str) -> None:
    """Sends meet receives in order on every communicator, every computation has its input, nobody is stuck;
    each stage runs every micro-batch forward and backward once, in the order of the schedule."""
    played = 0
    for ranks, virtual, micro_batches in product(
        (2, 3, 4, 5, 6), virtuals(schedule), (1, 2, 4, 6, 7, 10, 12)
    ):
        counts: tuple[Any, ...] = (style, schedule, ranks, virtual, micro_batches)
        for options in manners(style, ranks, virtual):
            try:
                programs = steps_of(*counts, **options)
            except InputError:
                continue
            played += 1
            assert Playing(programs, ranks_of_stages(schedule, ranks, virtual)).play() == [], (
                counts,
                options,
            )
            computed = [
                [one for one in steps if isinstance(one, Action) and one.kind in DURATIONS]
                for steps in programs
            ]
            settings = options.get("settings", megatron_settings())
            orders = orders_of(*counts, group_size=settings.micro_batch_group)
            assert computed == [actions(order) for order in orders], (counts, options)
            forwards = {one for order in computed for one in order if one.kind == "F"}
            assert forwards == {
                Action("F", *one) for one in product(range(ranks * virtual), range(micro_batches))
            }
    assert played > 10


def alone(waits: Literal["stream", "use"], kind: Kind, stage: int) -> Callable[[int], MessageCall]:
    """A lone message of a micro-batch."""
    return lambda number: MessageCall((Action(kind, stage, number),), is_batched=False, waits=waits)


def test_a_program_that_would_hang_is_seen_to_hang() -> None:
    """Two ranks that both send first on one pair's stream, each waiting for the other to receive."""
    send, receive = alone("use", "SEND_F", 0), alone("use", "RECV_B", 0)
    both: list[list[Step]] = [
        [Action("F", 0, 0), Action("F", 0, 1), send(0), receive(0), send(1)],
        [
            alone("stream", "RECV_F", 1)(0), Action("F", 1, 0), Action("B", 1, 0),
            alone("use", "RECV_F", 1)(1), alone("use", "SEND_B", 1)(0),
        ],
    ]  # fmt: skip
    assert len(Playing(both, [0, 1]).play()) == 2


@pytest.mark.parametrize("style", list(RUNTIMES))
def test_one_rank_has_no_pipeline(style: str) -> None:
    steps = steps_of(style, "1f1b", 1, 1, 3)
    assert steps == no_pipeline(3)


def test_passes_are_whole_pipelines_with_micro_batches_numbered_on() -> None:
    once = steps_of("torch", "1f1b", 2, 1, 2, is_fsdp=True)
    twice = steps_of("torch", "1f1b", 2, 1, 2, is_fsdp=True, passes=2)
    assert [steps[: len(steps) // 2] for steps in twice] == once
    second = twice[1][len(once[1]) :]
    assert second[0] == MessageCall((Action("RECV_F", 1, 2),), is_batched=False, waits="stream")
    assert second[-2:] == [MessageWait((Action("SEND_B", 1, 3),)), Action("REDUCE_GRAD", 1)]
