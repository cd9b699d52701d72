"""The period of a run whose micro-batches repeat, so that further ones need not be run.

# [Note: micro-batches that repeat]
A run is determined by when its ops are issued, and by what each waits for. Where three micro-batches in a row
issue the same ops, all of which start and end a fixed time after those of the micro-batch before, a further
micro-batch may be put between the second and the third: every op of it has the same ops around it, at the
same distances, so it starts and ends that fixed time later, and so does everything after it. Rates that
activities share depend on what runs at an instant alone, and that is the same too.

The host alone may differ. It waits for room in the launch queue at every eighth of it
(`zsim.engine.priced_program`), which is at other ops in each micro-batch. So its times are bounded from both
sides: without these waits, and with one at every launch. An op whose bounds are the same is issued at that
time. Any other op must be issued, by its upper bound, before it starts: then its start does not depend on the
host. The bounds hold for micro-batches to come too, where they do not move towards the GPU's times from one
micro-batch to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.engine.prepare import PreparedJob
from zsim.engine.priced_program import PricedProgram
from zsim.engine.record import begin_seconds
from zsim.engine.simulated_rank import SimulatedRank
from zsim.plan.columns import are_compute, memory_columns, op_columns
from zsim.plan.node_types import host_of
from zsim.plan.ops import Program

_SAME = 1e-9  # of a period: times closer than this are the same


class Period(NamedTuple):
    """The part of a step's trace that each further micro-batch repeats."""

    begins: Mapping[int, float]
    """By simulated rank, when it begins on the compute stream, on the clock of the trace."""
    seconds: float
    """How long it lasts, on all ranks."""


class MicroBatchLoop(NamedTuple):
    """The three micro-batches of a step that repeat: the first op of each, and the first op after them."""

    first: int
    second: int
    third: int
    end: int

    @property
    def length(self) -> int:
        """The ops of a micro-batch."""
        return self.second - self.first


def find_period(prepared: PreparedJob, ranks: Sequence[SimulatedRank]) -> Period | None:
    """The part of the step of `ranks` that a further micro-batch repeats. None where there may be none. See
    [Note: micro-batches that repeat].
    """
    plan, periods, begins = prepared.plan, [], {}
    origin = begin_seconds(ranks[0], len(plan.program_on(ranks[0].number).ops))
    loops = [program.memoize(_find_loop) for program in plan.programs]
    for rank in ranks:
        number = int(plan.program_of[rank.number])
        loop, num_ops = loops[number], len(plan.programs[number].ops)
        if loop is None:
            return None
        times = _Times(rank, num_ops)
        run_periods = [_period_of_run(times, loop, first) for first in range(0, times.num_ops, num_ops)]
        seconds = [period for period in run_periods if period is not None]
        launch_queue = host_of(prepared.job, plan, number).launch_queue
        if len(seconds) < len(run_periods) or not _is_independent_of_queue(
            times, loop, launch_queue, seconds
        ):
            return None
        periods.append(seconds)
        last_run = times.num_ops - num_ops
        launch = last_run + loop.second + int(np.argmax(times.is_launch[last_run + loop.second :]))
        begins[rank.number] = float(times.start[launch]) - origin
    shortest, longest = np.min(periods, axis=0), np.max(periods, axis=0)
    return Period(begins, float(longest[-1])) if (longest - shortest <= _SAME * longest).all() else None


def _find_loop(program: Program) -> MicroBatchLoop | None:
    """The three micro-batches before the last, if they issue the same ops and change memory alike, for
    `Program.memoize`. Only backwards of the very last reduce gradients that the others accumulate.
    """
    firsts = [op for op, action in program.actions if action.kind == "F"]
    if len(firsts) < 5 or not {action.kind for _, action in program.actions} <= {"F", "B"}:
        return None
    loop, columns = MicroBatchLoop(*firsts[-4:]), program.memoize(op_columns)
    bounds = list(pairwise(loop))
    if len({end - first for first, end in bounds}) > 1:
        return None
    issued = [
        list(
            zip(
                columns.stream[first:end],
                columns.work[first:end],
                columns.launches[first:end],
                columns.overhead[first:end],
                columns.events[first:end],
                [tuple([op - first for op in ops]) for ops in columns.after[first:end]],
                [tuple([op - first for op in ops]) for ops in columns.host_waits[first:end]],
                strict=True,
            )
        )
        for first, end in bounds
    ]
    changes = program.memoize(memory_columns)
    edges = np.searchsorted(np.fromiter(changes.op, np.int64, len(changes.op)), loop).tolist()
    changed = [
        list(zip(changes.category[a:b], changes.bytes[a:b], changes.device[a:b], strict=True))
        for a, b in pairwise(edges)
    ]
    is_same = all(
        rows == columns_of_ops[0] for columns_of_ops in (issued, changed) for rows in columns_of_ops
    )
    return loop if is_same and sum(size for _, size, _ in changed[0]) == 0 else None


class _Times:
    """The times of a rank's ops, and what they depend on."""

    def __init__(self, rank: SimulatedRank, num_ops: int) -> None:
        self.priced: PricedProgram = rank.program
        self.num_ops = rank.program.num_ops
        self.step_ops = num_ops
        self.began = rank.began
        self.start: Floats = np.asarray(rank.start)
        self.ended: Floats = np.asarray(rank.ended)
        columns = rank.program.program.memoize(op_columns)
        self.is_launch: Bools = rank.program.program.memoize(are_compute)
        self.has_work: Bools = np.array([work is not None for work in columns.work], np.bool_)
        self.host_waits = columns.host_waits
        self.launches: Ints = np.fromiter(columns.launches, np.int64, self.num_ops)


def _period_of_run(times: _Times, loop: MicroBatchLoop, run: int) -> float | None:
    """The seconds by which each of the three micro-batches follows the one before, in the run of the program
    whose first op is `run`. None where an op differs.
    """
    first, second, third, end = (run + op for op in loop)
    has_work = times.has_work[first:second]
    starts, ends = (
        np.stack([column[op : op + loop.length][has_work] for op in (first, second, third)])
        for column in (times.start, times.ended)
    )
    if not starts.size:
        return None
    period = float(starts[2, 0] - starts[1, 0])
    differences = np.diff(np.concatenate([starts, ends], axis=1), axis=0)
    if not (np.abs(differences - period) <= _SAME * period).all():
        return None
    # what runs beside the second micro-batch is of the first or of the third
    stop, later = run + times.step_ops, times.has_work[end : run + times.step_ops]
    is_apart = starts[1].min() >= times.ended[run:first][times.has_work[run:first]].max(initial=0.0)
    is_apart &= ends[1].max() <= times.start[end:stop][later].min(initial=np.inf)
    return period if is_apart else None


def _is_independent_of_queue(
    times: _Times, loop: MicroBatchLoop, launch_queue: int, periods: Sequence[float]
) -> bool:
    """Whether no op from the second micro-batch of the first run on depends on where the host waits for room
    in its launch queue. See [Note: micro-batches that repeat].
    """
    runs = range(0, times.num_ops, times.step_ops)
    queue_waits = _latest_queue_waits(times, launch_queue)
    waits = np.full(times.num_ops, -np.inf)
    for op, waited in enumerate(times.host_waits):
        if waited:
            waits[op] = max(times.ended[wait] for wait in waited)
    latest = _issue_times(times, np.maximum(waits, queue_waits), [])
    earliest = _issue_times(times, waits, [])
    is_steady = True
    for run, period in zip(runs, periods, strict=True):
        before, after = run + loop.second - 1, run + loop.third - 1
        if latest[after] - latest[before] > (1 + _SAME) * period:
            return False
        is_steady &= abs(earliest[after] - earliest[before] - period) <= _SAME * period
    if not is_steady:  # the host may be any time ahead
        earliest = _issue_times(times, waits, [run + loop.second for run in runs])
    tolerance = _SAME * max(periods)
    is_safe = (latest < times.start - tolerance) | (latest - earliest <= tolerance)
    return bool(is_safe[loop.second :][times.has_work[loop.second :]].all())


def _latest_queue_waits(times: _Times, launch_queue: int) -> Floats:
    """By op, when the launch queue has had room for it, if the host waited for the room of each launch."""
    is_launch = times.is_launch
    launched = np.cumsum(times.launches[is_launch])
    last = np.searchsorted(launched, launched - launch_queue, side="right") - 1
    ends = np.append(times.ended[is_launch], -np.inf)  # of none, at place -1
    waits = np.full(times.num_ops, -np.inf)
    waits[is_launch] = ends[last]
    return waits


def _issue_times(times: _Times, waits: Floats, resets: Sequence[int]) -> Floats:
    """When the host has issued each op, if it waits until `waits` before it. At each op of `resets` it may
    have come at any time before.
    """
    issue = np.empty(times.num_ops)
    spent = np.cumsum(times.priced.host_seconds)
    spent_before = np.append(0.0, spent[:-1])
    begins, began = [0, *resets], times.began
    for first, end in pairwise([*begins, times.num_ops]):
        due = np.maximum.accumulate(waits[first:end] - spent_before[first:end])
        issue[first:end] = spent[first:end] + np.maximum(due, began - spent_before[first])
        began = -np.inf
    return issue
