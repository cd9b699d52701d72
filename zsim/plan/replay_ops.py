"""The program of one replayed rank: its ops with their seconds, and what its host did between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.trace.spans import SpanInfo


class HostWait(NamedTuple):
    """The host works for `seconds`, and then waits for op number `op`."""

    seconds: float
    op: int


@dataclass(slots=True)
class ReplayOp:
    """One op: its work, what it waits for (numbers of earlier ops), and seconds as recorded.

    `recorded` is when it began and ended; `seconds` a kernel's length, or a collective's transfer;
    `host_seconds` what the host did before it issued the op, after what it waited for (`host_waits`);
    `lag_seconds` what nothing explains.
    `meeting` is (group, number) of a collective, the same on every rank that takes part.
    """

    info: SpanInfo
    stream: str
    seconds: float
    recorded: tuple[float, float]
    host_seconds: float = 0.0
    host_waits: tuple[HostWait, ...] = ()
    after: tuple[int, ...] = ()
    lag_seconds: float = 0.0
    meeting: tuple[str, int] | None = None
    is_on_host: bool = False


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
