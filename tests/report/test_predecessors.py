"""What an op waits for, on programs of a few ops."""

from __future__ import annotations

import numpy as np

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.ops import Kernels, Op, Program
from zsim.report.critical.path import Predecessors

KERNEL = Kernels((Kernel("copy", 0.0, 1e9),))


def op(stream: str, *after: int, work: Kernels | None = KERNEL) -> Op:
    return Op("", stream, work, after)


# Op 2 is a hook without work after ops 0 and 1; op 3, the third with work, comes after the hook.
PROGRAM = Program("", (op("a"), op("b"), op("a", 1, 0, work=None), op("a", 2), op("b", 0)))


def test_an_op_waits_for_its_stream_and_for_what_stands_behind_ops_without_work() -> None:
    before = Predecessors(PROGRAM)
    assert before.numbers == before.numbers_of.tolist() == [0, 1, 3, 4]
    assert [set(before.predecessors_of(place)) for place in range(4)] == [set(), set(), {0, 1}, {0, 1}]


def test_of_what_ended_at_once_the_later_op_is_the_last() -> None:
    before = Predecessors(PROGRAM)
    assert before.last_ended(np.array([2.0, 1.0, 3.0, 3.0])).tolist() == [-1, -1, 0, 0]
    assert before.last_ended(np.array([1.0, 1.0, 3.0, 3.0])).tolist() == [-1, -1, 1, 1]
    assert Predecessors(Program("", ())).last_ended(np.zeros(0)).tolist() == []


def test_a_launch_is_held_up_by_those_that_leave_its_queue_with_it() -> None:
    """Three streams in one queue: the first launch waits for an event until 4 s, and the others leave with
    it, so that both were held up by the first; a launch that was not ready before 4 s was held up by none,
    nor was one whose predecessor in the queue had left before."""
    program = Program("", (op("a"), op("b"), op("c")))
    before = Predecessors(program, connections=1)
    start = np.array([4.0, 4.0, 4.0])
    assert before.blocking_launches(start, np.array([4.0, 0.0, 0.0]), 1e-9).tolist() == [0, 0, 0]
    assert before.blocking_launches(start, np.array([4.0, 4.0, 0.0]), 1e-9).tolist() == [0, 1, 1]
    assert before.blocking_launches(start, np.array([4.0, 0.0, 4.0]), 1e-9).tolist() == [0, 0, 2]
    assert before.blocking_launches(np.array([1.0, 4.0, 4.0]), np.zeros(3), 1e-9).tolist() == [0, 1, 1]
    assert Predecessors(program).blocking_launches(start, np.zeros(3), 1e-9).tolist() == [0, 1, 2]
