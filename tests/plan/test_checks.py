"""What `check_plan` finds in plans whose programs do not fit each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.pipelines import ON, gpipe, one_f_one_b, one_f_one_b_alone, pipeline_plan
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.errors import StuckError
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.checks import PlanError, check_plan
from zsim.plan.ops import (
    Collective,
    CollectiveKind,
    Group,
    MemoryChange,
    Message,
    Op,
    Plan,
    Program,
    SplitSizes,
)
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

COPY = Kernel("copy", 0.0, 3e9)
PAIR = Group("pair", np.array([[0, 1]]))


def plan_of(*programs: Program) -> Plan:
    return Plan("test", programs, np.arange(len(programs)), {"pair": PAIR})


def calling(name: str, *calls: tuple[CollectiveKind, int, str]) -> Program:
    builder = PlanBuilder([PAIR])
    for kind, size, dtype in calls:
        builder.collective(kind, size, dtype, "pair", stream=COMPUTE)
    return builder.program((), name)


def messaging(name: str, *messages: Message) -> Program:
    builder = PlanBuilder([PAIR])
    for message in messages:
        builder.point_to_point([message], "bf16", "pair", stream="pair")
    return builder.program((), name)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_pipelines_are_in_order(schedule: object) -> None:
    check_plan(pipeline_plan(schedule, 4, 6, (COPY, COPY), replicas=2, gradient_bytes=10**6))  # type: ignore[arg-type]


GATHER: tuple[CollectiveKind, int, str] = ("all_gather", 1024, "bf16")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("all_reduce", 1024, "bf16"), "call 2 on 'pair': one: 'all_gather' is all_gather of 1,024 bytes of "
         "bf16, and two: 'all_reduce' is all_reduce"),
        (("all_gather", 1000, "bf16"), "two: 'all_gather' is all_gather of 1,000 bytes"),
        (("all_gather", 1024, "fp32"), "two: 'all_gather' is all_gather of 1,024 bytes of fp32"),
    ],
)  # fmt: skip
def test_the_n_th_call_is_the_same_on_all_members(
    other: tuple[CollectiveKind, int, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan_of(calling("one", GATHER, GATHER), calling("two", GATHER, other)))


def exchanging(name: str, *works: Collective) -> Program:
    builder = PlanBuilder([PAIR])
    for work in works:
        builder.add("exchange", COMPUTE, work)
    return builder.program((), name)


PARTS: SplitSizes = ((1, 2), (3, 4))


def test_what_a_member_sends_is_what_the_other_takes() -> None:
    same = Collective.all_to_all(PARTS, "bf16", "pair")
    check_plan(plan_of(exchanging("one", same), exchanging("two", same)))
    other = Collective.all_to_all(((1, 2), (5, 2)), "bf16", "pair")
    message = (
        "call 2 on 'pair': one: 'exchange' is all_to_all of 7 bytes of bf16 with 3 from member 1 to member 0"
        ", and two: 'exchange' is all_to_all of 7 bytes of bf16 with 5 from member 1 to member 0"
    )
    with pytest.raises(PlanError, match=message):
        check_plan(plan_of(exchanging("one", same, same), exchanging("two", same, other)))
    equal = Collective("all_to_all", 7, "bf16", "pair")
    with pytest.raises(PlanError, match=r"of bf16 in unequal parts, and two: .* of bf16 in equal parts"):
        check_plan(plan_of(exchanging("one", same), exchanging("two", equal)))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Collective.all_to_all(((1, 2, 3),) * 3, "bf16", "pair"), "'exchange' on 'pair': its parts are 3 "
         "rows of 3; expected 2 rows of 2"),
        (Collective.all_to_all(((1, 2), (3,)), "bf16", "pair"), "2 rows of 1 or 2; expected 2"),
        (Collective.all_to_all(((1, 2), (-3, 9)), "bf16", "pair"), "a part has -3 bytes"),
        (Collective("all_to_all", 8, "bf16", "pair", PARTS), "is of 8 bytes, and its largest input has 7"),
        (Collective("all_reduce", 7, "bf16", "pair", PARTS), "all_reduce has unequal parts; only all_to_all"),
    ],
)  # fmt: skip
def test_a_table_has_a_part_for_each_pair_of_members(work: Collective, message: str) -> None:
    """Of plans with one program too."""
    with pytest.raises(PlanError, match=message):
        check_plan(Plan.uniform("test", 2, exchanging("", work), {"pair": PAIR}))


def test_equal_parts_need_no_table() -> None:
    equal = Collective.all_to_all(((5, 5), (5, 5)), "bf16", "pair")
    assert equal == Collective("all_to_all", 10, "bf16", "pair")


def test_members_make_as_many_calls() -> None:
    with pytest.raises(PlanError, match="'pair': one: 2 calls, and two: 1"):
        check_plan(plan_of(calling("one", GATHER, GATHER), calling("two", GATHER)))


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ((), "'pair': one: 1 messages to the rank 1 places on, and two: 0 receives"),
        ((Message("recv", 9, ON),), "message 1 on 'pair': one: 'send' sends 8 bytes of bf16, and two: 'recv' "
         "takes 9"),
        ((Message("recv", 8, ON),) * 2, "1 messages to the rank 1 places on, and two: 2 receives"),
        ((Message("send", 8, ON),), "and two: 0 receives"),
    ],
)  # fmt: skip
def test_sends_meet_receives(taken: tuple[Message, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan_of(messaging("one", Message("send", 8, ON)), messaging("two", *taken)))


def test_a_message_to_oneself_is_refused() -> None:
    with pytest.raises(PlanError, match="'pair': a rank sends to itself"):
        check_plan(plan_of(messaging("one", Message("send", 8, 2)), messaging("two", Message("recv", 8, 2))))


def test_a_circle_of_waits_is_named() -> None:
    """Both send before they receive, on one stream."""
    send, take = Message("send", 8, ON), Message("recv", 8, ON)
    circle = (
        "one: 'send' on stream pair waits for two: 'recv'; two: 'recv' on stream pair waits for 'send'; "
        "two: 'send' on stream pair waits for one: 'recv'; one: 'recv' on stream pair waits for 'send'"
    )
    with pytest.raises(StuckError, match=f"^{circle}$"):
        check_plan(plan_of(messaging("one", send, take), messaging("two", send, take)))


def test_lone_messages_of_1f1b_lock_each_other_as_the_clock_says_too() -> None:
    """Why torch fuses a forward's send with a backward's receive: both sides send first."""
    plan = pipeline_plan(one_f_one_b_alone, 2, 4, (COPY, COPY), is_checked=False)
    with pytest.raises(StuckError, match=r"pipeline rank 0: 'send' .* waits for pipeline rank 1: 'recv'"):
        check_plan(plan)
    job = resolve(Experiment(model="llama-2-7b", cluster="dgx-h100", gpus=2))
    with pytest.raises(StuckError, match="rank 0: "):
        simulate_job(job, plan=plan)


def test_a_circle_through_a_host_is_found() -> None:
    """Each host waits for its own receive before it issues the send that the other waits for."""
    programs = []
    for name in ("one", "two"):
        builder = PlanBuilder([PAIR])
        taken = builder.point_to_point([Message("recv", 8, ON)], "bf16", "pair", stream="in")
        builder.host_wait(taken)
        builder._last_op_of_group.clear()
        builder.point_to_point([Message("send", 8, ON)], "bf16", "pair", stream="out")
        programs.append(builder.program((), name))
    with pytest.raises(StuckError, match="one: 'recv' on stream in waits for two: 'send'"):
        check_plan(plan_of(*programs))


def test_an_op_waits_for_earlier_ones_only() -> None:
    ops = (Op("first", "a", after=(1,)), Op("second", "a"))
    with pytest.raises(PlanError, match="op 0 'first' comes after op 1, issued later"):
        check_plan(Plan.uniform("test", 1, Program("", ops), {}))
    waiting = (Op("first", "a", host_waits=(0,)),)
    with pytest.raises(PlanError, match="the host waits for op 0 before it issues op 0"):
        check_plan(Plan.uniform("test", 1, Program("", waiting), {}))


def test_a_step_frees_what_it_allocates() -> None:
    plan = pipeline_plan(one_f_one_b, 2, 2, (COPY, COPY), micro_bytes=100)
    last = replace(plan.programs[1], memory=plan.programs[1].memory[:-1])
    with pytest.raises(
        PlanError, match=r"pipeline rank 1: a step leaves \+100 bytes of activations of 'micro-batch 1'"
    ):
        check_plan(replace(plan, programs=(plan.programs[0], last)))
    more = (*plan.programs[1].memory, MemoryChange(0, "buffers", -5, "host"))
    with pytest.raises(PlanError, match="a step leaves -5 bytes of buffers of '' on the host"):
        check_plan(replace(plan, programs=(plan.programs[0], replace(plan.programs[1], memory=more))))
