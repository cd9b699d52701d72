"""One recorded rank: its program, whose payloads are `RecordedWork`, and the start of its step.

# [Note: a recorded kernel by itself]
The time that it would take is the inverse of the device model of a simulation (zsim.devices.gpu): while n
kernels run at once each runs at 1/n of its speed, and all of them `slowdown` times slower while a collective
runs. A kernel's time alone is therefore the integral of 1 / (n slowdown) over its recorded time. Run again
with the same overlap it takes its recorded time, and with another overlap the time that the model gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.plan.ops import Op, Program, RecordedWork
from zsim.plan.passes.repeated_step import repeat_program
from zsim.trace.trace import COLLECTIVES


@dataclass(frozen=True)
class RecordedRank:
    """A recorded rank. All times are in seconds after the first rank's start."""

    rank: int
    program: Program
    begin: float
    """The start of its step."""
    host_begin: float
    """The time at which its host is free for the step."""
    stream_begins: Mapping[str, float]
    """The time at which each stream is free for the step."""
    recorded_seconds: float = 0.0
    host_ahead: float = 0.0
    """Seconds that its host had worked on the step before `host_begin`, which no op shows."""
    unexplained_seconds: float = 0.0
    """The sum of the lags above `MAX_LAG_SECONDS`."""

    @property
    def payloads(self) -> list[RecordedWork]:
        """The recorded work of every op."""
        return [payload_of(op) for op in self.program.ops]

    def map_payloads(self, transform: Callable[[RecordedWork], RecordedWork]) -> RecordedRank:
        """A copy of the rank with `transform` applied to the work of every op."""
        ops = tuple(op._replace(work=transform(payload_of(op))) for op in self.program.ops)
        return replace(self, program=replace(self.program, ops=ops))


def repeat_rank(rank: RecordedRank) -> RecordedRank:
    """The rank with a program of two steps. Before the second, its host works for as long as it had worked on
    the recorded step when that began."""
    first = len(rank.program.ops)
    program = repeat_program(rank.program)
    op = program.ops[first]
    work = payload_of(op)
    first_of_second_step = op._replace(work=replace(work, host_seconds=work.host_seconds + rank.host_ahead))
    return replace(
        rank,
        program=replace(program, ops=(*program.ops[:first], first_of_second_step, *program.ops[first + 1 :])),
    )


def payload_of(op: Op) -> RecordedWork:
    assert isinstance(op.work, RecordedWork)
    return op.work


def fix_collective_seconds(rank: RecordedRank) -> RecordedRank:
    """The rank with every collective taking its recorded time, waits for other ranks included. If nothing
    else changes, all ops run when they were recorded.
    """
    return rank.map_payloads(
        lambda work: (
            replace(work, seconds=work.bounds[1] - work.bounds[0], meets=False) if work.meets else work
        )
    )


GPU_KERNELS = frozenset({"compute", "optimizer", "copy"})


def shares_gpu(work: RecordedWork) -> bool:
    """Whether an op shares the GPU's multiprocessors."""
    return work.kind in GPU_KERNELS and not work.is_on_host


def isolate_kernels(rank: RecordedRank, slowdown: float) -> RecordedRank:
    """The rank whose kernels have the seconds that they would take alone, to be run on a GPU that kernels
    share.
    """
    marks: list[tuple[float, int, int]] = []  # time, change of running kernels, change of collectives
    for work in rank.payloads:
        start, end = work.bounds
        if shares_gpu(work):
            marks += [(start, 1, 0), (end, -1, 0)]
    for work in rank.payloads:
        if work.kind in COLLECTIVES:
            marks += [(work.bounds[0], 0, 1), (work.bounds[1], 0, -1)]
    marks.sort(key=lambda mark: mark[0])
    times, work_seconds = _accumulate_work(marks, slowdown)
    work_seconds_at = dict(zip(times, work_seconds, strict=True))

    def isolate(work: RecordedWork) -> RecordedWork:
        start, end = work.bounds
        return (
            replace(work, seconds=work_seconds_at[end] - work_seconds_at[start]) if shares_gpu(work) else work
        )

    return rank.map_payloads(isolate)


def _accumulate_work(
    marks: Sequence[tuple[float, int, int]], slowdown: float
) -> tuple[list[float], list[float]]:
    """The times of `marks`, and the seconds of work that a kernel running all along had done by each time."""
    times: list[float] = []
    work_seconds: list[float] = []
    running = collectives = 0
    total = 0.0
    for time, kernel_change, collective_change in marks:
        if times and time > times[-1]:
            if running:
                total += (time - times[-1]) / (running * (slowdown if collectives else 1.0))
            times.append(time)
            work_seconds.append(total)
        elif not times:
            times.append(time)
            work_seconds.append(total)
        running += kernel_change
        collectives += collective_change
    return times, work_seconds
