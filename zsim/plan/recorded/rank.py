"""One recorded rank: its program, whose works are `Recorded`, and the start of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from zsim.dataclass import dataclass
from zsim.plan.ops import Op, Program
from zsim.plan.recorded.work import Recorded


@dataclass(frozen=True)
class RecordedRank:
    """A recorded rank. `begin`: start of its step; `host_begin` and `stream_begins`: times at which its host
    and streams are free for the step; all in seconds after the first rank's start. `unexplained_seconds`: the
    sum of the lags above `LONGEST_LAG`."""

    rank: int
    program: Program
    begin: float
    host_begin: float
    stream_begins: Mapping[str, float]
    recorded_seconds: float = 0.0
    unexplained_seconds: float = 0.0

    @property
    def works(self) -> list[Recorded]:
        """The recorded work of every op."""
        return [recorded(op) for op in self.program.ops]

    def with_works(self, change: Callable[[Recorded], Recorded]) -> RecordedRank:
        """A copy of the rank with `change` applied to the work of every op."""
        ops = tuple(op._replace(work=change(recorded(op))) for op in self.program.ops)
        return replace(self, program=replace(self.program, ops=ops))


def recorded(op: Op) -> Recorded:
    assert isinstance(op.work, Recorded)
    return op.work


def as_recorded(rank: RecordedRank) -> RecordedRank:
    """The rank with every collective taking its recorded time, waits for other ranks included: if nothing
    else changes, all ops run when they were recorded."""
    return rank.with_works(
        lambda work: (
            replace(work, seconds=work.recorded[1] - work.recorded[0], meets=False) if work.meets else work
        )
    )
