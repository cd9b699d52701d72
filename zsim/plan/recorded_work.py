"""The work of a recorded rank's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zsim.trace.trace import SpanInfo


class HostCall(NamedTuple):
    """A blocking call of a recorded host. See zsim.plan.recorded.infer, [Note: a call that blocks]."""

    seconds: float
    """Seconds of the host's work before the call."""
    waits: bool
    """Whether the call lasts until the next of the op's `host_waits` has ended."""
    overhead_seconds: float = 0.0
    """Seconds that the call lasts after that."""
    info: SpanInfo | None = None
    """The awaited op, for the report."""


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """The work of a recorded op, the only kind of work with seconds.

    The host first makes `calls`, then works for `host_seconds`, and issues the op.
    """

    info: SpanInfo | None
    """The recorded span. None is the end of the host's step, which no trace shows."""
    seconds: float
    """Seconds of a kernel, or of a collective's transfer."""
    bounds: tuple[float, float] = (0.0, 0.0)
    """Start and end of the recorded span."""
    meets: bool = False
    """Whether it is a collective that starts when all members of its group have arrived."""
    lag_seconds: float = 0.0
    """Delay of the start that its waits do not explain."""
    host_seconds: float = 0.0
    calls: tuple[HostCall, ...] = ()
    allocator_spans: tuple[tuple[float, float], ...] = ()
    """The host's spans in torch's allocator, which had run short. Each is the seconds from the issue of the
    previous op, or from the step's start, to the span's start, and the seconds from the span's end to the
    issue of this op.
    """
    is_on_host: bool = False
    """Whether the host itself runs the op."""
    is_issue_known: bool = True

    @property
    def kind(self) -> str:
        return "" if self.info is None else self.info.kind
