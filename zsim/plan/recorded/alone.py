"""What a recorded kernel would take alone on the GPU.

The same device model as in a simulation (zsim.devices.gpu), read backwards: while n kernels run at once each
runs at 1/n of its speed, and all of them `slowdown` times slower while a collective is under way. A kernel's
own work is therefore the integral of 1 / (n slowdown) over its recorded time. Run again with the same overlap
it takes what it took; with another overlap, what the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.plan.recorded.rank import RecordedRank
from zsim.plan.recorded.work import Recorded
from zsim.trace.trace import COLLECTIVES

GPU_KERNELS = frozenset({"compute", "optimizer", "copy"})


def runs_on_gpu(work: Recorded) -> bool:
    """Whether an op shares the GPU's multiprocessors."""
    return work.kind in GPU_KERNELS and not work.is_on_host


def with_work_alone(rank: RecordedRank, slowdown: float) -> RecordedRank:
    """The rank with kernels' seconds as they would be alone, to be run where they share the GPU again."""
    marks: list[tuple[float, int, int]] = []  # time, change of running kernels, change of collectives
    for work in rank.works:
        start, end = work.recorded
        if runs_on_gpu(work):
            marks += [(start, 1, 0), (end, -1, 0)]
    for work in rank.works:
        if work.kind in COLLECTIVES:
            marks += [(work.recorded[0], 0, 1), (work.recorded[1], 0, -1)]
    marks.sort(key=lambda mark: mark[0])
    times, done = _work_done(marks, slowdown)
    done_by = dict(zip(times, done, strict=True))

    def alone(work: Recorded) -> Recorded:
        start, end = work.recorded
        return replace(work, seconds=done_by[end] - done_by[start]) if runs_on_gpu(work) else work

    return rank.with_works(alone)


def _work_done(marks: Sequence[tuple[float, int, int]], slowdown: float) -> tuple[list[float], list[float]]:
    """Times at which something changes, and the work that one kernel had done by then."""
    times: list[float] = []
    done: list[float] = []
    running = collectives = 0
    total = 0.0
    for time, kernels, changed in marks:
        if times and time > times[-1]:
            if running:
                total += (time - times[-1]) / (running * (slowdown if collectives else 1.0))
            times.append(time)
            done.append(total)
        elif not times:
            times.append(time)
            done.append(total)
        running += kernels
        collectives += changed
    return times, done
