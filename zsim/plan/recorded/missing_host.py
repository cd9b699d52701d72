"""The host of a recording that shows the GPU alone: no op's launch and no call that blocked.

# [Note: a recording without a host]
When the host issued an op is not known then, only that it had done so when the op started. Where the GPU went
on without a pause the host was ahead: such an op is issued in time. After a pause the host was what the GPU
had waited for. If the op before had waited for it too, the host had nothing ahead and goes on at its own
pace, from one start to the next, however fast kernels are. Else it is taken to have waited for the op that
ended last (it read a number, or drained the queue) and then to have worked for as long as the pause. A host
that was slow once behind a full queue looks the same, and a faster GPU would wait longer for it: so the
replay is the lower end of what the step takes, and its upper end each op issued when it started.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.plan.recorded.host import HostPart
from zsim.plan.recorded.work import HostCall

MAX_QUEUED_GAP_SECONDS = 10e-6
"""Seconds between two kernels of which the second was queued when the first ended. On one H100 they are 1 to
2 us apart, up to 6 us behind a memset or a small copy (traces/h100-80gb-hbm3/llama_llama-3-8b@8_*: three
steps without a longer pause).
"""


def host_parts(
    lags: Sequence[float], start: Sequence[float], end: Sequence[float], begin: float, step_end: float
) -> list[HostPart]:
    """The host's part before each op in the order of their starts, and one after the last op until
    `step_end`. `lags` are the seconds that each op started later than its stream and other ops explain.
    """
    host_parts_per_op: list[HostPart] = []
    last = -1  # of the ops so far, the one that ends last
    was_late = False
    for number, lag in enumerate(lags):
        is_late = lag > MAX_QUEUED_GAP_SECONDS
        if not is_late:
            host_parts_per_op.append(HostPart((), (), 0.0))
        elif was_late or number == 0:
            host_parts_per_op.append(
                HostPart((), (), start[number] - (start[number - 1] if number else begin))
            )
        else:
            host_parts_per_op.append(_waiting_part(last, start[number] - end[last]))
        was_late = is_late
        if last < 0 or end[number] >= end[last]:
            last = number
    return [
        *host_parts_per_op,
        HostPart((), (), 0.0) if last < 0 else _waiting_part(last, max(step_end - end[last], 0.0)),
    ]


def _waiting_part(op: int, seconds: float) -> HostPart:
    """The host's part that waits for `op` and then works for `seconds`."""
    return HostPart((HostCall(0.0, True),), (op,), seconds)
