"""The time that a recorded kernel would take if it ran by itself on the GPU.

The inverse of the device model of a simulation (zsim.devices.gpu): while n kernels run at once each runs at
1/n of its speed, and all of them `slowdown` times slower while a collective runs. A kernel's time alone is
therefore the integral of 1 / (n slowdown) over its recorded time. Run again with the same overlap it takes
its recorded time, and with another overlap the time that the model gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.plan.recorded.rank import RecordedRank
from zsim.plan.recorded_work import RecordedWork
from zsim.trace.trace import COLLECTIVES

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
