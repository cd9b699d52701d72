"""A job's programs as segments: the units of work when ranks are run through them without a clock.

A run without jitter gives the seconds of each segment once it can start. The programs give the waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.engine.executor import Executor
from zsim.engine.jitter.draw import spread
from zsim.engine.prepare import Prepared
from zsim.engine.priced_program import PricedProgram
from zsim.fabric.messages import Pairs
from zsim.plan.ops import Collective


class Partner(NamedTuple):
    """A segment of another program, or of other ranks of the same program, with which a segment starts: the
    same collective, or the other side of a message of `pair`. `is_sent`: this side is the sender."""

    segment: int
    pair: str = ""
    is_sent: bool = False


@dataclass(slots=True)
class JitterSegment:
    """Ops of a program that run as one segment: consecutive kernels, a collective, a call with messages, or
    other work of fixed length.
    """

    program: int
    ops: list[int]
    before: list[int]
    """The segments that it waits for."""
    seconds: Floats
    """Per class of the program's ranks."""
    sigma: float = 0.0
    """Of the sum of the kernels."""
    group: str | None = None
    """The group of a collective."""
    is_kernels: bool = False
    partners: list[Partner] = field(default_factory=list)
    partner_of: list[int] = field(default_factory=list)
    """The segments that have this one as a partner."""


def segments_of(prepared: Prepared, base: Executor, sigma: float) -> list[JitterSegment]:
    """The segments of all programs, program by program, each after the segments of its program that it waits
    for."""
    return _Reader(prepared, base, sigma).found


def typical_sigma(segments: Sequence[JitterSegment], program: int) -> float:
    """The root mean square of a program's kernel segments' `sigma`, weighted by their seconds."""
    kernels = [one for one in segments if one.is_kernels and one.program == program]
    weights = np.array([float(one.seconds.mean()) for one in kernels])
    squares = np.array([one.sigma**2 for one in kernels])
    return float(np.sqrt((weights * squares).sum() / weights.sum())) if weights.sum() > 0 else 0.0


class _Reader:
    def __init__(self, prepared: Prepared, base: Executor, sigma: float) -> None:
        self.prepared, self.base, self.sigma = prepared, base, sigma
        self.found: list[JitterSegment] = []
        numbers = list(enumerate(prepared.programs))
        program_of = prepared.program_of
        self.lanes = [
            [lane for lane, own in zip(base.lanes, program_of, strict=True) if own == number]
            for number, _ in numbers
        ]
        self.calls: list[dict[int, int]] = [{} for _ in numbers]  # by meeting: the op
        for number, program in numbers:
            self.calls[number] = {call: op for op, call in enumerate(program.meetings) if call >= 0}
        self.sides = {  # by program, pair, whether sent, and number: the op
            (number, side.work.group, side.is_sent, side.number): op
            for number, program in numbers
            for op, sides in program.sides.items()
            for side in sides
        }
        self.of_op: list[list[int]] = []
        for number, program in numbers:
            self._read(number, program)
        for number, program in numbers:
            self._join(number, program)

    def _read(self, number: int, program: PricedProgram) -> None:
        """Read the segments of one program."""
        before = _predecessors(program.successors)
        waited = {op for waits in program.host_waits for op in waits}
        nodes, first, lanes = self.found, len(self.found), self.lanes[number]
        of_op: list[int] = []
        host = -1  # the segment after which the host is free
        for op, waits in enumerate(program.host_waits):
            if waits:
                of_host = {of_op[other] for other in waits} | ({host} if host >= 0 else set())
                host = self._event(number, sorted(of_host))
            needs = sorted({of_op[other] for other in before[op]} | ({host} if host >= 0 else set()))
            work = program.program.ops[op].work
            if work is None:
                of_op.append(needs[0] if len(needs) == 1 else self._event(number, needs))
            elif program.kernel_seconds[op] is not None:
                previous = before[op][0] if len(before[op]) == 1 else -1
                joins = previous >= 0 and previous not in waited and len(program.successors[previous]) == 1
                joins = (
                    joins and nodes[of_op[previous]].is_kernels and nodes[of_op[previous]].ops[-1] == previous
                )
                if joins and set(needs) <= {of_op[previous], *nodes[of_op[previous]].before}:
                    nodes[of_op[previous]].ops.append(op)
                    of_op.append(of_op[previous])
                else:
                    nodes.append(JitterSegment(number, [op], needs, np.zeros(0), is_kernels=True))
                    of_op.append(len(nodes) - 1)
            else:
                group = work.group if isinstance(work, Collective) else None
                begins = self._begins(number, op, program)
                seconds = np.array([lane.ended[op] for lane in lanes]) - begins
                nodes.append(JitterSegment(number, [op], needs, seconds, group=group))
                of_op.append(len(nodes) - 1)
        self.of_op.append(of_op)
        for node in nodes[first:]:
            if node.is_kernels:
                self._add_times(node, program)

    def _event(self, program: int, needs: list[int]) -> int:
        self.found.append(JitterSegment(program, [], needs, np.zeros(len(self.lanes[program]))))
        return len(self.found) - 1

    def _add_times(self, node: JitterSegment, program: PricedProgram) -> None:
        lanes = self.lanes[node.program]
        each = np.array([[lane.ended[op] - lane.start[op] for op in node.ops] for lane in lanes])
        node.seconds = each.sum(axis=1)
        parts = np.array([program.concentration[op] for op in node.ops]) * each[0] ** 2
        total = float(node.seconds[0])
        concentration = float(parts.sum()) / total**2 if total > 0 else 0.0
        node.sigma = float(spread(self.sigma, np.array([concentration]))[0])

    def _begins(self, number: int, op: int, program: PricedProgram) -> list[float]:
        """Per rank, the time at which an op could start in the run: a collective when the last member of its
        communicator started, messages when the other sides did.
        """
        work = program.program.ops[op].work
        if not isinstance(work, Collective):
            of_rank = {lane.rank: lane for lane in self.base.lanes}
            return [
                max([lane.start[op], *(of_rank[peer].start[n] for peer, n in lane.peers.get(op, ()))])
                for lane in self.lanes[number]
            ]
        call, latest = program.meetings[op], dict[int, float]()
        for lanes, calls in zip(self.lanes, self.calls, strict=True):
            if call in calls:
                for lane in lanes:
                    communicator = lane.communicators[work.group]
                    latest[communicator] = max(latest.get(communicator, 0.0), lane.start[calls[call]])
        return [latest[lane.communicators[work.group]] for lane in self.lanes[number]]

    def _join(self, number: int, program: PricedProgram) -> None:
        """Add the partners of a program's segments."""
        plan = self.prepared.plan
        if len(plan.programs) > 1:
            for call, op in self.calls[number].items():
                work = program.program.ops[op].work
                assert isinstance(work, Collective)
                for other in self._programs_with(work.group, number):
                    self._add_partner(number, op, other, self.calls[other][call])
        for op, sides in program.sides.items():
            for side in sides:
                pair = side.work.group
                other = self._peer_program(pair, number, is_sender=side.is_sent)
                peer_op = self.sides[other, pair, not side.is_sent, side.number]
                self._add_partner(number, op, other, peer_op, pair, side.is_sent)

    def _add_partner(
        self, number: int, op: int, other: int, other_op: int, pair: str = "", is_sent: bool = False
    ) -> None:
        own, partner = self.of_op[number][op], self.of_op[other][other_op]
        self.found[own].partners.append(Partner(partner, pair, is_sent))
        self.found[partner].partner_of.append(own)

    def _programs_with(self, group: str, number: int) -> list[int]:
        """The other programs whose ranks share a communicator of `group` with ranks of this program."""
        plan = self.prepared.plan
        programs = plan.program_of[plan.groups[group].members]
        together = programs[(programs == number).any(axis=1)]
        return [other for other in np.unique(together).tolist() if other != number]

    def _peer_program(self, pair: str, number: int, *, is_sender: bool) -> int:
        pairs = self.prepared.fabric.groups[pair]
        assert isinstance(pairs, Pairs)
        programs = self.prepared.plan.program_of[pairs.members]
        own, other = (0, 1) if is_sender else (1, 0)
        found = np.unique(programs[programs[:, own] == number, other])
        assert len(found) == 1, f"'{pair}': ranks of program {number} have peers in programs {found.tolist()}"
        return int(found[0])


def _predecessors(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in successors]
    for op, others in enumerate(successors):
        for other in others:
            before[other].append(op)
    return before
