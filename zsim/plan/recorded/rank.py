"""One recorded rank: its program, whose payloads are `RecordedWork`, and the start of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.plan.ops import Op, Program
from zsim.plan.passes.repeated_step import repeat_program
from zsim.plan.recorded_work import RecordedWork


@dataclass(frozen=True)
class RecordedRank:
    """A recorded rank. All times are in seconds after the first rank's start."""

    rank: int
    program: Program
    begin: float
    """The start of its step."""
    host_begin: float
    """The time at which its host is free for the step."""
    stream_begins: Mapping[str, float]
    """The time at which each stream is free for the step."""
    recorded_seconds: float = 0.0
    host_ahead: float = 0.0
    """Seconds that its host had worked on the step before `host_begin`, which no op shows."""
    unexplained_seconds: float = 0.0
    """The sum of the lags above `MAX_LAG_SECONDS`."""

    @property
    def payloads(self) -> list[RecordedWork]:
        """The recorded work of every op."""
        return [payload_of(op) for op in self.program.ops]

    def map_payloads(self, transform: Callable[[RecordedWork], RecordedWork]) -> RecordedRank:
        """A copy of the rank with `transform` applied to the work of every op."""
        ops = tuple(op._replace(work=transform(payload_of(op))) for op in self.program.ops)
        return replace(self, program=replace(self.program, ops=ops))


def repeat_rank(rank: RecordedRank) -> RecordedRank:
    """The rank with a program of two steps. Before the second, its host works for as long as it had worked on
    the recorded step when that began."""
    first = len(rank.program.ops)
    program = repeat_program(rank.program)
    op = program.ops[first]
    work = payload_of(op)
    first_of_second_step = op._replace(work=replace(work, host_seconds=work.host_seconds + rank.host_ahead))
    return replace(
        rank,
        program=replace(program, ops=(*program.ops[:first], first_of_second_step, *program.ops[first + 1 :])),
    )


def payload_of(op: Op) -> RecordedWork:
    assert isinstance(op.work, RecordedWork)
    return op.work


def fix_collective_seconds(rank: RecordedRank) -> RecordedRank:
    """The rank with every collective taking its recorded time, waits for other ranks included. If nothing
    else changes, all ops run when they were recorded.
    """
    return rank.map_payloads(
        lambda work: (
            replace(work, seconds=work.bounds[1] - work.bounds[0], meets=False) if work.meets else work
        )
    )
