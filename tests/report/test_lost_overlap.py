"""What a report says of overlap that is lost, on hand-made steps."""

from __future__ import annotations

import numpy as np
import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.ops import Collective, Group, Kernels, Op, Plan, Program
from zsim.report.critical.path import critical_path
from zsim.report.limiting_sentence import queue_wait_seconds, shared_queues_note
from zsim.trace.trace import SpanInfo, SpanInfos, Trace

KERNEL = Kernels((Kernel("copy", 0.0, 1e9),))
GATHER = Collective("all_gather", 1000, "bf16", "world")


def held_up() -> tuple[Plan, Trace]:
    """Two gathers of 4 and 3 s on one stream, a kernel of 1 s behind them, another of 2 s; all issued at 0.

    In one queue the second gather leaves at 4 s, when the first has ended, and the first kernel with it: held
    up for 4 s. The second kernel starts at 5 s, when the first has ended, and was held up by nothing."""
    ops = (
        Op("first", "gather", GATHER), Op("second", "gather", GATHER), Op("short", "compute", KERNEL),
        Op("long", "compute", KERNEL),
    )  # fmt: skip
    times = [(0.0, 0.0, 4.0), (0.0, 4.0, 7.0), (0.0, 4.0, 5.0), (0.0, 5.0, 7.5)]
    plan = Plan.uniform("by hand", 1, Program("", ops), {"world": Group.regular("world", 1)})
    issued, started, ended = (np.array([moment[i] for moment in times]) for i in range(3))
    trace = Trace(
        "simulated",
        SpanInfos(SpanInfo(op.name, "compute", op.stream) for op in ops),
        np.zeros(4, dtype=np.int64),
        np.arange(4),
        issued,
        started,
        ended,
        world_size=1,
        step_seconds=7.5,
    )
    return plan, trace


def test_what_is_held_up_is_what_waits_for_nothing_of_its_own() -> None:
    assert queue_wait_seconds(*held_up(), connections=1) == pytest.approx(4.0)
    assert queue_wait_seconds(*held_up(), connections=8) == 0.0


def test_the_critical_path_goes_on_with_what_the_launch_ahead_waited_for() -> None:
    """From the long kernel to the short one, and from that, with the launch that held it up, to the first
    gather."""
    plan, trace = held_up()
    chain = [(plan.ops[link.op].name, link.seconds) for link in critical_path(plan, trace, connections=1)]
    assert chain == [("first", 4.0), ("short", 1.0), ("long", 2.5)]


def test_the_note_names_the_setting_and_both_steps() -> None:
    assert shared_queues_note(1, 4.0, 7.5, 6.0) == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams' launches pass through one hardware queue, and one that "
        "waits holds up those behind it, the compute stream's for 4.000 s of the step; with 8, the default, "
        "the step takes 6.000 s"
    )
    assert shared_queues_note(2, 0.0, 6.0, 6.0) == (
        "CUDA_DEVICE_MAX_CONNECTIONS=2: all streams' launches pass through 2 hardware queues, and one that "
        "waits holds up those behind it; with 8, the default, the step takes as long"
    )
    assert shared_queues_note(1, 0.0, 6.0, None).endswith("holds up those behind it")
