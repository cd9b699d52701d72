"""The work of a recorded rank's ops."""

from __future__ import annotations

from typing import NamedTuple

from zsim.dataclass import dataclass
from zsim.trace.trace import SpanInfo


class HostCall(NamedTuple):
    """A blocking call of a recorded host, after `seconds` of work: it lasts until the next of the op's
    `host_waits` has ended (if it `waits`), and `own_seconds` more. `info`: the awaited op, for the report;
    see zsim.plan.recorded.host, [Note: a call that blocks]."""

    seconds: float
    waits: bool
    own_seconds: float = 0.0
    info: SpanInfo | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The work of a recorded op, the only kind of work with seconds. `info`: the recorded span (None: the end
    of the host's step, which no trace shows).

    `seconds`: of a kernel, or of a collective's transfer; `recorded`: its start and end; `meets`: a
    collective that starts when all members of its group have arrived; `lag_seconds`: delay of the start that
    its waits do not explain. The host first makes `calls`, then works for `host_seconds`, and issues the op;
    an op that `is_on_host` is run by the host itself. `in_allocator`: the host's spans in torch's allocator,
    which had run short: (seconds from the issue of the previous op, or the step's start, to the span's start;
    seconds from the span's end to the issue of this op).
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
