"""A job's programs as segments: the units of work when ranks are run through them without a clock.

A run without jitter gives the seconds of each segment once it can start. The programs give the waits.

Factors of jitter on kernels depend on the seed and on nothing else that is simulated. A factor is lognormal
with mean 1. For an op of several launches it has the spread of their sum: with c the op's concentration
(`zsim.engine.priced_program`) and s a launch's sigma, log(1 + c (exp(s^2) - 1)) is the variance of its
logarithm (L. Fenton, 1960: a sum of lognormals is nearly lognormal, with the sum's mean and variance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats
from zsim.engine.executor import Executor
from zsim.engine.prepare import PreparedJob, Seconds
from zsim.engine.priced_program import PricedProgram
from zsim.fabric.messages import Pairs
from zsim.plan.ops import Collective
from zsim.specs.experiment.jitter import JitterConfig


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
    predecessors: list[int]
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


def read_segments(prepared: PreparedJob, base: Executor, sigma: float) -> list[JitterSegment]:
    """The segments of all programs, program by program, each after the segments of its program that it waits
    for."""
    return _Reader(prepared, base, sigma).segments


def typical_sigma(segments: Sequence[JitterSegment], program: int) -> float:
    """The root mean square of a program's kernel segments' `sigma`, weighted by their seconds."""
    kernels = [segment for segment in segments if segment.is_kernels and segment.program == program]
    weights = np.array([float(segment.seconds.mean()) for segment in kernels])
    squares = np.array([segment.sigma**2 for segment in kernels])
    return float(np.sqrt((weights * squares).sum() / weights.sum())) if weights.sum() > 0 else 0.0


class _Reader:
    def __init__(self, prepared: PreparedJob, base: Executor, sigma: float) -> None:
        self.prepared, self.base, self.sigma = prepared, base, sigma
        self.segments: list[JitterSegment] = []
        numbers = list(enumerate(prepared.programs))
        program_of = prepared.program_of
        self.ranks = [
            [
                rank
                for rank, rank_program in zip(base.ranks, program_of, strict=True)
                if rank_program == number
            ]
            for number, _ in numbers
        ]
        self.calls: list[dict[int, int]] = [{} for _ in numbers]  # by call number: the op
        for number, program in numbers:
            self.calls[number] = {call: op for op, call in enumerate(program.call_numbers) if call >= 0}
        self.sides = {  # by program, pair, whether sent, and number: the op
            (number, side.work.group, side.is_sent, side.number): op
            for number, program in numbers
            for op, sides in program.sides.items()
            for side in sides
        }
        self.segment_of_op: list[list[int]] = []
        for number, program in numbers:
            self._read(number, program)
        for number, program in numbers:
            self._add_partners(number, program)

    def _read(self, number: int, program: PricedProgram) -> None:
        """Read the segments of one program."""
        predecessors = _predecessors(program.successors)
        waited = {op for waits in program.host_waits for op in waits}
        segments, first, ranks = self.segments, len(self.segments), self.ranks[number]
        segment_of_op: list[int] = []
        host = -1  # the segment after which the host is free
        for op, waits in enumerate(program.host_waits):
            if waits:
                host_predecessors = {segment_of_op[predecessor] for predecessor in waits} | (
                    {host} if host >= 0 else set()
                )
                host = self._event(number, sorted(host_predecessors))
            needs = sorted(
                {segment_of_op[predecessor] for predecessor in predecessors[op]}
                | ({host} if host >= 0 else set())
            )
            work = program.program.ops[op].work
            if work is None:
                segment_of_op.append(needs[0] if len(needs) == 1 else self._event(number, needs))
            elif program.kernel_seconds[op] is not None:
                previous = predecessors[op][0] if len(predecessors[op]) == 1 else -1
                joins = previous >= 0 and previous not in waited and len(program.successors[previous]) == 1
                joins = (
                    joins
                    and segments[segment_of_op[previous]].is_kernels
                    and segments[segment_of_op[previous]].ops[-1] == previous
                )
                if joins and set(needs) <= {
                    segment_of_op[previous],
                    *segments[segment_of_op[previous]].predecessors,
                }:
                    segments[segment_of_op[previous]].ops.append(op)
                    segment_of_op.append(segment_of_op[previous])
                else:
                    segments.append(JitterSegment(number, [op], needs, np.zeros(0), is_kernels=True))
                    segment_of_op.append(len(segments) - 1)
            else:
                group = work.group if isinstance(work, Collective) else None
                begins = self._begin_times(number, op, program)
                seconds = np.array([rank.ended[op] for rank in ranks]) - begins
                segments.append(JitterSegment(number, [op], needs, seconds, group=group))
                segment_of_op.append(len(segments) - 1)
        self.segment_of_op.append(segment_of_op)
        for segment in segments[first:]:
            if segment.is_kernels:
                self._add_times(segment, program)

    def _event(self, program: int, needs: list[int]) -> int:
        self.segments.append(JitterSegment(program, [], needs, np.zeros(len(self.ranks[program]))))
        return len(self.segments) - 1

    def _add_times(self, segment: JitterSegment, program: PricedProgram) -> None:
        ranks = self.ranks[segment.program]
        seconds = np.array([[rank.ended[op] - rank.start[op] for op in segment.ops] for rank in ranks])
        segment.seconds = seconds.sum(axis=1)
        squares = np.array([program.concentration[op] for op in segment.ops]) * seconds[0] ** 2
        total = float(segment.seconds[0])
        concentration = float(squares.sum()) / total**2 if total > 0 else 0.0
        segment.sigma = float(sigma_of_sum(self.sigma, np.array([concentration]))[0])

    def _begin_times(self, number: int, op: int, program: PricedProgram) -> list[float]:
        """Per rank, the time at which an op could start in the run: a collective when the last member of its
        communicator started, messages when the other sides did.
        """
        work = program.program.ops[op].work
        if not isinstance(work, Collective):
            rank_of_number = {rank.number: rank for rank in self.base.ranks}
            return [
                max([rank.start[op], *(rank_of_number[peer].start[n] for peer, n in rank.peers.get(op, ()))])
                for rank in self.ranks[number]
            ]
        call, latest = program.call_numbers[op], dict[int, float]()
        for ranks, calls in zip(self.ranks, self.calls, strict=True):
            if call in calls:
                for rank in ranks:
                    communicator = rank.communicators[work.group]
                    latest[communicator] = max(latest.get(communicator, 0.0), rank.start[calls[call]])
        return [latest[rank.communicators[work.group]] for rank in self.ranks[number]]

    def _add_partners(self, number: int, program: PricedProgram) -> None:
        """Add the partners of a program's segments."""
        plan = self.prepared.plan
        if len(plan.programs) > 1:
            for call, op in self.calls[number].items():
                work = program.program.ops[op].work
                assert isinstance(work, Collective)
                for partner_program in self._partner_programs(work.group, number):
                    self._add_partner(number, op, partner_program, self.calls[partner_program][call])
        for op, sides in program.sides.items():
            for side in sides:
                pair = side.work.group
                partner_program = self._peer_program(pair, number, is_sender=side.is_sent)
                peer_op = self.sides[partner_program, pair, not side.is_sent, side.number]
                self._add_partner(number, op, partner_program, peer_op, pair, side.is_sent)

    def _add_partner(
        self,
        number: int,
        op: int,
        partner_program: int,
        partner_op: int,
        pair: str = "",
        is_sent: bool = False,
    ) -> None:
        segment, partner = self.segment_of_op[number][op], self.segment_of_op[partner_program][partner_op]
        self.segments[segment].partners.append(Partner(partner, pair, is_sent))
        self.segments[partner].partner_of.append(segment)

    def _partner_programs(self, group: str, number: int) -> list[int]:
        """The other programs whose ranks share a communicator of `group` with ranks of this program."""
        plan = self.prepared.plan
        programs = plan.program_of[plan.groups[group].members]
        shared_programs = programs[(programs == number).any(axis=1)]
        return [program for program in np.unique(shared_programs).tolist() if program != number]

    def _peer_program(self, pair: str, number: int, *, is_sender: bool) -> int:
        pairs = self.prepared.fabric.groups[pair]
        assert isinstance(pairs, Pairs)
        programs = self.prepared.plan.program_of[pairs.members]
        rank_column, peer_column = (0, 1) if is_sender else (1, 0)
        peer_programs = np.unique(programs[programs[:, rank_column] == number, peer_column])
        assert len(peer_programs) == 1, (
            f"'{pair}': ranks of program {number} have peers in programs {peer_programs.tolist()}"
        )
        return int(peer_programs[0])


def _predecessors(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    predecessors: list[list[int]] = [[] for _ in successors]
    for op, op_successors in enumerate(successors):
        for successor in op_successors:
            predecessors[successor].append(op)
    return predecessors


_RANKS, _OPS, _CROWD = 0, 1, 2  # streams of random numbers that share a seed


def rank_factors(jitter: JitterConfig, world_size: int) -> Floats:
    """Per rank, the factor on its kernels' seconds over the whole run."""
    normal = np.random.default_rng([jitter.seed, _RANKS]).standard_normal(world_size)
    return lognormal(normal, jitter.rank_sigma)


def op_seconds(
    jitter: JitterConfig, step: int, rank: int, seconds: Seconds, concentration: Floats
) -> Seconds:
    """Seconds of one rank's kernels in one drawn step. `seconds` are those without jitter from step
    to step.
    """
    normal = np.random.default_rng([jitter.seed, _OPS, step, rank]).standard_normal(len(seconds))
    factors = lognormal(normal, sigma_of_sum(jitter.kernel_sigma, concentration)).tolist()
    return [
        None if kernel_seconds is None else kernel_seconds * factor
        for kernel_seconds, factor in zip(seconds, factors, strict=True)
    ]


def class_generator(jitter: JitterConfig, step: int) -> np.random.Generator:
    """The random numbers of a step for all ranks of the classes."""
    return np.random.default_rng([jitter.seed, _CROWD, step])


def sigma_of_sum(sigma: float, concentration: Floats) -> Floats:
    """Standard deviation of the logarithm of sums of lognormals that have `sigma` each."""
    sigmas: Floats = np.sqrt(np.log1p(concentration * np.expm1(sigma * sigma)))
    return sigmas


def lognormal(normal: Floats, sigma: Floats | float) -> Floats:
    """Lognormal numbers of mean 1, from standard normal numbers."""
    factors: Floats = np.exp(sigma * normal - np.square(sigma) / 2)
    return factors
