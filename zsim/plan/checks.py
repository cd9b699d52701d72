"""Checks that the programs of a plan are consistent with each other.

Every communicator's n-th call is the same on all members. Every send matches a receive. No ops wait for each
other in a circle. A step frees all memory that it allocates. Ranks of one program do the same, so programs
are checked and not ranks: if a rank of one program waits for a rank of another, all ranks of it do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from zsim.arrays import distinct
from zsim.dataclass import dataclass
from zsim.errors import StuckError
from zsim.plan.columns import memory_columns, op_columns, owned_changes
from zsim.plan.ops import Category, Collective, Device, Op, Plan, PointToPoint, Program

_CALLS = (Collective, PointToPoint)


class PlanError(AssertionError):
    """Raised for a plan whose programs are inconsistent: a bug in the code that made the plan."""


def check_plan(plan: Plan) -> None:
    """Raise PlanError for inconsistent calls, messages or memory, StuckError for a circle of waits."""
    for program in plan.programs:
        _check_order(program)
        _check_parts(program, plan)
        _check_memory(program)
    if len(plan.programs) == 1 and not plan.has_messages:
        return  # all members make the same calls in the same order
    calls = [_calls_by_group(program, plan) for program in plan.programs]
    _check_calls(plan, calls)
    _check_messages(plan, calls)
    if not _Run(plan, calls, keeps_all=False).has_ended():
        run = _Run(plan, calls, keeps_all=True)
        assert not run.has_ended()
        raise StuckError(run.circle())


def _check_order(program: Program) -> None:
    columns = program.once(op_columns)
    for number, after in enumerate(columns.after):
        if after and (other := max(after)) >= number:
            name = columns.name[number]
            raise PlanError(f"{_of(program)}op {number} '{name}' comes after op {other}, issued later")
    for number, waits in enumerate(columns.host_waits):
        if waits and (other := max(waits)) >= number:
            raise PlanError(f"{_of(program)}the host waits for op {other} before it issues op {number}")


def _check_parts(program: Program, plan: Plan) -> None:
    """An all-to-all of unequal parts has one for each pair of members, and the bytes of its largest input."""
    uneven = {
        number
        for number, work in program.distinct_works.items()
        if type(work) is Collective and work.parts is not None
    }
    for op in program.ops if uneven else ():
        work = op.work
        if id(work) not in uneven:
            continue
        assert isinstance(work, Collective)
        assert work.parts is not None
        size, where = plan.groups[work.group].size, f"{_of(program)}'{op.name}' on '{work.group}'"
        if work.kind != "all_to_all":
            raise PlanError(f"{where}: {work.kind} has unequal parts; only all_to_all may have them")
        if {len(work.parts), *map(len, work.parts)} != {size}:
            rows = (
                f"{len(work.parts)} rows of {' or '.join(str(n) for n in sorted(set(map(len, work.parts))))}"
            )
            raise PlanError(f"{where}: its parts are {rows}; expected {size} rows of {size}")
        if min(map(min, work.parts)) < 0:
            raise PlanError(f"{where}: a part has {min(map(min, work.parts)):,} bytes")
        largest = max(map(sum, work.parts))
        if work.bytes != largest:
            raise PlanError(f"{where} is of {work.bytes:,} bytes, and its largest input has {largest:,}")


def _check_memory(program: Program) -> None:
    """Raise PlanError unless a step frees the bytes it allocates, per device, category and owner."""
    sizes = program.once(memory_columns).bytes
    held: defaultdict[tuple[Device, Category, str], int] = defaultdict(int)
    for (device, category, owner, *_), places in program.once(owned_changes).items():
        held[device, category, owner] += sum(map(sizes.__getitem__, places))
    for (device, category, owner), left in held.items():
        if left:
            raise PlanError(
                f"{_of(program)}a step leaves {left:+,} bytes of {category} of '{owner}' on the {device}"
            )


class _Messages(NamedTuple):
    """A program's messages over one group: by shift, the (op, bytes, dtype) of each message in order."""

    sent: dict[int, list[tuple[int, int, str]]]
    received: dict[int, list[tuple[int, int, str]]]


@dataclass
class _Calls:
    """A program's communication: by group the op numbers of its collectives, and its messages."""

    collectives: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, _Messages] = field(default_factory=dict)


def _calls_by_group(program: Program, plan: Plan) -> _Calls:
    found = _Calls()
    for number, op in enumerate(program.ops):
        work = op.work
        if isinstance(work, Collective):
            found.collectives.setdefault(work.group, []).append(number)
        elif isinstance(work, PointToPoint):
            size = plan.groups[work.group].size
            own = found.messages.setdefault(work.group, _Messages({}, {}))
            for message in work.messages:
                shifts = own.sent if message.direction == "send" else own.received
                row = number, message.bytes, work.dtype
                shifts.setdefault(message.shift % size, []).append(row)
    return found


def _check_calls(plan: Plan, calls: Sequence[_Calls]) -> None:
    for name in plan.groups:
        for programs in plan.once(_programs_together, name):
            first, *others = programs
            for other in others:
                _check_pair(plan, name, first, other, calls)


def _check_pair(plan: Plan, name: str, first: int, other: int, calls: Sequence[_Calls]) -> None:
    """Raise PlanError unless two programs whose ranks share a communicator make the same collective calls."""
    one, two = (calls[program].collectives.get(name, []) for program in (first, other))
    a, b = plan.programs[first], plan.programs[other]
    for place, (own, theirs) in enumerate(zip(one, two, strict=False)):
        mine, yours = a.ops[own].work, b.ops[theirs].work
        if mine != yours:
            assert isinstance(mine, Collective)
            assert isinstance(yours, Collective)
            raise PlanError(
                f"call {place + 1} on '{name}': {_of(a)}'{a.ops[own].name}' is {_told(mine, yours)}, and "
                f"{_of(b)}'{b.ops[theirs].name}' is {_told(yours, mine)}"
            )
    if len(one) != len(two):
        raise PlanError(f"'{name}': {_of(a)}{len(one)} calls, and {_of(b)}{len(two)}")


def _programs_together(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """The distinct sets of programs whose ranks share a communicator of group `name`."""
    rows = np.sort(plan.program_of[plan.groups[name].members], axis=1)
    distinct = {row.tobytes(): row for row in rows}
    return sorted({tuple(dict.fromkeys(row.tolist())) for row in distinct.values()})


def _peers(plan: Plan, name: str, shift: int) -> list[tuple[int, int]]:
    """The distinct pairs (program of a rank, program of the rank `shift` places further)."""
    programs = plan.program_of[plan.groups[name].members]
    pairs = distinct(programs * len(plan.programs) + np.roll(programs, -shift, axis=1))
    return [divmod(pair, len(plan.programs)) for pair in pairs]


def _shifts(plan: Plan, calls: Sequence[_Calls], name: str) -> list[int]:
    """How many places further in a group messages go, each once."""
    size, used = plan.groups[name].size, [own.messages[name] for own in calls if name in own.messages]
    received = {-shift % size for own in used for shift in own.received}
    return sorted({shift for own in used for shift in own.sent} | received)


def _check_messages(plan: Plan, calls: Sequence[_Calls]) -> None:
    for name in plan.groups:
        for shift in _shifts(plan, calls, name):
            _check_shift(plan, calls, name, shift)


def _check_shift(plan: Plan, calls: Sequence[_Calls], name: str, shift: int) -> None:
    back, none = -shift % plan.groups[name].size, _Messages({}, {})
    if not shift:
        raise PlanError(f"'{name}': a rank sends to itself")
    for sender, receiver in plan.once(_peers, name, shift):
        sent = calls[sender].messages.get(name, none).sent.get(shift, [])
        received = calls[receiver].messages.get(name, none).received.get(back, [])
        a, b = plan.programs[sender], plan.programs[receiver]
        for place, (own, theirs) in enumerate(zip(sent, received, strict=False)):
            if own[1:] != theirs[1:]:
                raise PlanError(
                    f"message {place + 1} on '{name}': {_of(a)}'{a.ops[own[0]].name}' sends {own[1]:,} bytes "
                    f"of {own[2]}, and {_of(b)}'{b.ops[theirs[0]].name}' takes {theirs[1]:,} of {theirs[2]}"
                )
        if len(sent) != len(received):
            raise PlanError(
                f"'{name}': {_of(a)}{len(sent)} messages to the rank {shift} places on, and {_of(b)}"
                f"{len(received)} receives"
            )


class _Run:
    """Untimed run of the programs: every op that can end does, until none can.

    Unless it `keeps_all`, an op that waits for nothing but the op before it on its stream is left out. Ops
    that wait for it wait for that op instead. It ends when that op ends, because all ops before one that is
    issued are issued too.
    """

    def __init__(self, plan: Plan, calls: Sequence[_Calls], *, keeps_all: bool) -> None:
        self.plan, self.keeps_all = plan, keeps_all
        self.first = list(accumulate((len(program.ops) for program in plan.programs), initial=0))
        self.count = self.first.pop()
        self.needs: list[Sequence[int]] = [()] * self.count  # ops that must end before it starts
        self.issued_after: list[Sequence[int]] = [()] * self.count  # must end before it is issued
        self.partners: defaultdict[int, list[int]] = defaultdict(list)  # ops that must start before it ends
        self.kept: list[int] = []
        self.started, self.ended, self.issued = ([False] * self.count for _ in range(3))
        self.blocked_host: dict[int, int] = {}
        for first, program in zip(self.first, plan.programs, strict=True):
            self._add_waits(first, program)
        self._add_collectives(calls)
        self._add_messages(calls)

    def _add_waits(self, first: int, program: Program) -> None:
        last: dict[str, int] = {}  # by stream
        stands_for: list[int] = []  # by op, the op that ends with it: itself, or an earlier one; -1: at once
        for number, op in enumerate(program.ops, first):
            if op.host_waits:
                ends = {stands_for[other] for other in op.host_waits}
                self.issued_after[number] = [other for other in ends if other >= 0]
            needs = [stands_for[other] for other in op.after] if op.after else []
            work = op.work
            before = -1 if work is None else last.get(op.stream, -1)
            is_kept = self.keeps_all or op.after or op.host_waits or isinstance(work, _CALLS)
            stands_for.append(number if is_kept else before)
            if work is not None:
                needs.append(before)
                last[op.stream] = stands_for[-1]
            if is_kept:
                self.needs[number] = [need for need in needs if need >= 0]
                self.kept.append(number)

    def _add_collectives(self, calls: Sequence[_Calls]) -> None:
        for name in self.plan.groups:
            for programs in self.plan.once(_programs_together, name):
                own = [calls[program].collectives.get(name, []) for program in programs]
                for members in zip(*own, strict=True):
                    ops = [self.first[p] + op for p, op in zip(programs, members, strict=True)]
                    for op in ops if len(ops) > 1 else ():
                        self.partners[op] += [other for other in ops if other != op]

    def _add_messages(self, calls: Sequence[_Calls]) -> None:
        for name, group in self.plan.groups.items():
            for shift in _shifts(self.plan, calls, name):
                for sender, receiver in self.plan.once(_peers, name, shift):
                    none = _Messages({}, {})
                    sent = calls[sender].messages.get(name, none).sent.get(shift, [])
                    taken = calls[receiver].messages.get(name, none).received.get(-shift % group.size, [])
                    for (own, *_), (theirs, *_) in zip(sent, taken, strict=True):
                        one, other = self.first[sender] + own, self.first[receiver] + theirs
                        self.partners[one].append(other)
                        self.partners[other].append(one)

    def has_ended(self) -> bool:
        """Whether every op ends."""
        started, ended, issued = self.started, self.ended, self.issued
        needs, issued_after, partners = self.needs, self.issued_after, self.partners
        cuts = [bisect_left(self.kept, first) for first in self.first]
        hosts, ends = list(cuts), [*cuts[1:], len(self.kept)]
        wakes: dict[int, list[int]] = {}  # by op: what to retry once it started or ended
        todo = deque(range(len(hosts)))
        look: deque[int] = deque()
        while todo or look:
            if todo:
                place = todo.popleft()
                for number in range(hosts[place], ends[place]):
                    op = self.kept[number]
                    if issued_after[op]:
                        awaited = next((other for other in issued_after[op] if not ended[other]), -1)
                        if awaited >= 0:
                            self.blocked_host[place] = awaited
                            wakes.setdefault(awaited, []).append(-1 - place)
                            break
                        self.blocked_host.pop(place, None)
                    issued[op] = True
                    hosts[place] = number + 1
                    look.append(op)
                continue
            op = look.popleft()
            if op < 0:
                todo.append(-1 - op)
                continue
            if ended[op]:
                continue
            awaited = -1  # the op whose end or start keeps this one from ending
            for need in needs[op]:
                if not ended[need]:
                    awaited = need
                    break
            else:
                if not started[op]:
                    started[op] = True
                    look.extend(wakes.pop(op, ()))
                for other in partners.get(op, ()):
                    if not started[other]:
                        awaited = other
                        break
            if awaited >= 0:
                wakes.setdefault(awaited, []).append(op)
            else:
                ended[op] = True
                look.extend(wakes.pop(op, ()))
        return all(ended[op] for op in self.kept)

    def circle(self) -> str:
        """The circle of waits as text, from an op that never ends back to itself."""
        started, ended, issued = self.started, self.ended, self.issued
        chain: list[int] = []
        at = next(op for op in range(self.count) if not ended[op])
        while at not in chain:
            chain.append(at)
            if not issued[at]:
                place = bisect_right(self.first, at) - 1
                at = self.blocked_host[place]
            elif not started[at]:
                at = next(need for need in self.needs[at] if not ended[need])
            else:
                at = next(other for other in self.partners[at] if not started[other])
        circle = chain[chain.index(at) :]
        return "; ".join(
            self._waits(one, other) for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
        )

    def _op(self, number: int) -> tuple[Program, Op]:
        place = bisect_right(self.first, number) - 1
        program = self.plan.programs[place]
        return program, program.ops[number - self.first[place]]

    def _waits(self, one: int, other: int) -> str:
        (program, op), (peer, awaited) = self._op(one), self._op(other)
        where = "" if program is peer else f"{_of(peer)}"
        return f"{_of(program)}'{op.name}' on stream {op.stream} waits for {where}'{awaited.name}'"


def _of(program: Program) -> str:
    return f"{program.name}: " if program.name else ""


def _told(work: Collective, other: Collective) -> str:
    """Describe a call by what it may have in common with another. Of two tables of split sizes it is the
    first size that differs.
    """
    told = f"{work.kind} of {work.bytes:,} bytes of {work.dtype}"
    if work.parts == other.parts:
        return told
    if work.parts is None:
        return f"{told} in equal parts"
    if other.parts is None:
        return f"{told} in unequal parts"
    size = len(work.parts)
    for i, j in ((i, j) for i in range(size) for j in range(size)):
        if work.parts[i][j] != other.parts[i][j]:
            return f"{told} with {work.parts[i][j]:,} from member {i} to member {j}"
    return told
