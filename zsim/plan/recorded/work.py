"""The work of a recorded rank's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zsim.trace.trace import SpanInfo


class HostCall(NamedTuple):
    """What a recorded host did: it worked for `seconds`, then was blocked: where it `waits`, until the next
    of its op's `host_waits` was over, and for `own_seconds` more. `info`: what the wait counts as; see
    zsim.plan.recorded.host, [Note: a call that blocks]."""

    seconds: float
    waits: bool
    own_seconds: float = 0.0
    info: SpanInfo | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an op of a recorded rank was (None: the end of the host's step, which no trace shows), and its
    seconds: the only work with any.

    `seconds`: of a kernel, or of a collective's transfer; `recorded`: when it began and ended; `meets`: it is
    a collective, and begins when all members of its group have come; `lag_seconds`: how much later it starts
    than all that it waits for explains. The host first makes `calls`, then works for `host_seconds`, and
    issues the op; what `is_on_host` the host does itself. `in_allocator`: when the host was in torch's
    allocator, which had run short: from so long after the issue of the op before (the step's beginning) to so
    long before this one's.
    """

    info: SpanInfo | None
    seconds: float
    recorded: tuple[float, float] = (0.0, 0.0)
    meets: bool = False
    lag_seconds: float = 0.0
    host_seconds: float = 0.0
    calls: tuple[HostCall, ...] = ()
    in_allocator: tuple[tuple[float, float], ...] = ()
    is_on_host: bool = False
    is_issue_known: bool = True

    @property
    def kind(self) -> str:
        return "" if self.info is None else self.info.kind
