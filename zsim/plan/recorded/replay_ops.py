"""The program of one replayed rank: its ops with their seconds, and what its host did between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zsim.trace.trace import SpanInfo


class HostWait(NamedTuple):
    """The host works for `seconds`, then is blocked: until op number `op` is over, and `own_seconds` more.

    `op` is None where no op is known that it waited for; `info` says what the wait counts as. See
    zsim.plan.recorded.host, [Note: a call that blocks].
    """

    seconds: float
    op: int | None
    own_seconds: float = 0.0
    info: SpanInfo | None = None


@dataclass(slots=True)
class ReplayOp:
    """One op: its work, what it waits for (numbers of earlier ops), and seconds as recorded.

    `recorded` is when it began and ended; `seconds` a kernel's length, or a collective's transfer;
    `host_seconds` what the host did before it issued the op, after what it waited for (`host_waits`);
    `in_allocator` when it was in torch's allocator then, which had run short: from so long after the issue
    of the op before (the step's beginning) to so long before this one's. `lag_seconds` what nothing explains.
    `is_issue_known`: whether its time of issue was recorded.
    `meeting` is (group, number) of a collective, the same on every rank that takes part.
    """

    info: SpanInfo
    stream: str
    seconds: float
    recorded: tuple[float, float]
    host_seconds: float = 0.0
    host_waits: tuple[HostWait, ...] = ()
    in_allocator: tuple[tuple[float, float], ...] = ()
    after: tuple[int, ...] = ()
    lag_seconds: float = 0.0
    meeting: tuple[str, int] | None = None
    is_on_host: bool = False
    is_issue_known: bool = True


@dataclass(slots=True)
class ReplayPlan:
    """What one rank does. `begin` is when its step begins, `host_begin` and `stream_begins` when its host and
    streams are free for it, in seconds after the first rank's beginning; `tail_seconds` what the host does
    after the last op, after `tail_waits`. `unexplained_seconds` is the sum of long lags."""

    rank: int
    ops: list[ReplayOp]
    begin: float
    host_begin: float
    stream_begins: dict[str, float]
    tail_seconds: float = 0.0
    tail_waits: tuple[HostWait, ...] = ()
    recorded_seconds: float = 0.0
    unexplained_seconds: float = field(default=0.0)


def as_recorded(plan: ReplayPlan) -> ReplayPlan:
    """The plan with every collective as long as it was on this rank, with what it waited there for others:
    where nothing else changes they come when they came."""
    ops = [
        op if op.meeting is None else replace(op, seconds=op.recorded[1] - op.recorded[0], meeting=None)
        for op in plan.ops
    ]
    return replace(plan, ops=ops)
