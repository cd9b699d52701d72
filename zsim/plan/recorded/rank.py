"""One recorded rank: its program, whose works are `Recorded`, and when its step began."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.plan.ops import Op, Program
from zsim.plan.recorded.work import Recorded


@dataclass(frozen=True)
class RecordedRank:
    """`begin` is when the rank's step begins, `host_begin` and `stream_begins` when its host and streams are
    free for it, in seconds after the first rank's beginning. `unexplained_seconds`: the sum of long lags."""

    rank: int
    program: Program
    begin: float
    host_begin: float
    stream_begins: Mapping[str, float]
    recorded_seconds: float = 0.0
    unexplained_seconds: float = 0.0

    @property
    def works(self) -> list[Recorded]:
        """Of every op."""
        return [recorded(op) for op in self.program.ops]

    def with_works(self, change: Callable[[Recorded], Recorded]) -> RecordedRank:
        """The rank with the work of every op changed."""
        ops = tuple(op._replace(work=change(recorded(op))) for op in self.program.ops)
        return replace(self, program=replace(self.program, ops=ops))


def recorded(op: Op) -> Recorded:
    assert isinstance(op.work, Recorded)
    return op.work


def as_recorded(rank: RecordedRank) -> RecordedRank:
    """The rank with every collective as long as it was there, with what it waited for others: where nothing
    else changes they come when they came."""
    return rank.with_works(
        lambda work: (
            replace(work, seconds=work.recorded[1] - work.recorded[0], meets=False) if work.meets else work
        )
    )
