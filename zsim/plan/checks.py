"""Checks that the programs of a plan are consistent with each other.

Every communicator's n-th call is the same on all members. Every send matches a receive. No ops wait for each
other in a circle. A step frees all memory that it allocates. Ranks of one program do the same, so programs
are checked and not ranks: if a rank of one program waits for a rank of another, all ranks of it do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints, unique
from zsim.errors import StuckError
from zsim.plan.columns import UnrolledChanges, memory_columns, op_columns, original_ops, unroll
from zsim.plan.ops import Category, Collective, Device, Op, Plan, PointToPoint, Program

_CALLS = (Collective, PointToPoint)


class PlanError(AssertionError):
    """Raised for a plan whose programs are inconsistent: a bug in the code that made the plan."""


def check_plan(plan: Plan) -> None:
    """Raise PlanError for inconsistent calls, messages or memory, StuckError for a circle of waits."""
    for program in plan.programs:
        _check_order(program)
        _check_split_sizes(program, plan)
        _check_memory(program)
    if len(plan.programs) == 1 and not plan.has_messages:
        return  # all members make the same calls in the same order
    calls = [_calls_by_group(program, plan) for program in plan.programs]
    _check_calls(plan, calls)
    _check_messages(plan, calls)
    if not _UntimedRun(plan, calls, keeps_all=False).has_ended():
        run = _UntimedRun(plan, calls, keeps_all=True)
        assert not run.has_ended()
        raise StuckError(run.wait_cycle())


def _check_order(program: Program) -> None:
    columns, numbers = program.memoize(op_columns), program.memoize(original_ops)
    for number in numbers:
        after = columns.after[number]
        if after and (latest := max(after)) >= number:
            name = columns.name[number]
            raise PlanError(
                f"{_program_prefix(program)}op {number} '{name}' comes after op {latest}, issued later"
            )
    for number in numbers:
        waits = columns.host_waits[number]
        if waits and (latest := max(waits)) >= number:
            raise PlanError(
                f"{_program_prefix(program)}the host waits for op {latest} before it issues op {number}"
            )


def _check_split_sizes(program: Program, plan: Plan) -> None:
    """An all-to-all of unequal parts has one for each pair of members, and the bytes of its largest input."""
    uneven = {
        number
        for number, work in program.unique_work.items()
        if type(work) is Collective and work.split_sizes is not None
    }
    for op in program.ops if uneven else ():
        work = op.work
        if id(work) not in uneven:
            continue
        assert isinstance(work, Collective)
        assert work.split_sizes is not None
        size, location = (
            plan.groups[work.group].size,
            f"{_program_prefix(program)}'{op.name}' on '{work.group}'",
        )
        if work.kind != "all_to_all":
            raise PlanError(f"{location}: {work.kind} has unequal parts; only all_to_all may have them")
        if {len(work.split_sizes), *map(len, work.split_sizes)} != {size}:
            rows = (
                f"{len(work.split_sizes)} rows of "
                f"{' or '.join(str(n) for n in sorted(set(map(len, work.split_sizes))))}"
            )
            raise PlanError(f"{location}: its parts are {rows}; expected {size} rows of {size}")
        if min(map(min, work.split_sizes)) < 0:
            raise PlanError(f"{location}: a part has {min(map(min, work.split_sizes)):,} bytes")
        largest = max(map(sum, work.split_sizes))
        if work.bytes != largest:
            raise PlanError(f"{location} is of {work.bytes:,} bytes, and its largest input has {largest:,}")


def _check_memory(program: Program) -> None:
    """Raise PlanError unless a step frees the bytes it allocates, per device, category and owner."""
    held_bytes: defaultdict[tuple[Device, Category, str], int] = defaultdict(int)
    columns = program.memoize(memory_columns)
    changes = zip(columns.device, columns.category, columns.owner, columns.bytes, strict=True)
    if isinstance(program.memory, UnrolledChanges):
        counts = program.memory.counts()
        is_original = counts > 0
        for (device, category, owner, size), count in zip(
            compress(changes, is_original.tolist()), counts[is_original].tolist(), strict=True
        ):
            held_bytes[device, category, owner] += size * count
    else:
        for device, category, owner, size in changes:
            held_bytes[device, category, owner] += size
    for (device, category, owner), leaked_bytes in held_bytes.items():
        if leaked_bytes:
            raise PlanError(
                f"{_program_prefix(program)}a step leaves {leaked_bytes:+,} bytes of {category} of "
                f"'{owner}' on the {device}"
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
    calls = _Calls()
    payloads = program.memoize(op_columns).work
    for number in _calling_ops(program):
        work = payloads[number]
        if isinstance(work, Collective):
            calls.collectives.setdefault(work.group, []).append(number)
        elif isinstance(work, PointToPoint):
            size = plan.groups[work.group].size
            messages = calls.messages.setdefault(work.group, _Messages({}, {}))
            for message in work.messages:
                shifts = messages.sent if message.direction == "send" else messages.received
                row = number, message.bytes, work.dtype
                shifts.setdefault(message.shift % size, []).append(row)
    return calls


def _calling_ops(program: Program) -> list[int]:
    """The ops that communicate."""
    payloads, unique = program.memoize(op_columns).work, program.unique_work
    calls = {number for number, work in unique.items() if isinstance(work, _CALLS)}
    are_calls = unroll(program, [id(payloads[number]) in calls for number in program.memoize(original_ops)])
    numbers: list[int] = np.flatnonzero(are_calls).tolist()
    return numbers


def _check_calls(plan: Plan, calls: Sequence[_Calls]) -> None:
    for name in plan.groups:
        for programs in plan.memoize(_programs_per_communicator, name):
            first, *other_programs = programs
            for second in other_programs:
                _check_pair(plan, name, first, second, calls)


def _check_pair(plan: Plan, name: str, first: int, second: int, calls: Sequence[_Calls]) -> None:
    """Raise PlanError unless two programs whose ranks share a communicator make the same collective calls."""
    first_calls, second_calls = (calls[program].collectives.get(name, []) for program in (first, second))
    first_program, second_program = plan.programs[first], plan.programs[second]
    for index, (first_op, second_op) in enumerate(zip(first_calls, second_calls, strict=False)):
        first_work, second_work = first_program.ops[first_op].work, second_program.ops[second_op].work
        if first_work != second_work:
            assert isinstance(first_work, Collective)
            assert isinstance(second_work, Collective)
            raise PlanError(
                f"call {index + 1} on '{name}': "
                f"{_program_prefix(first_program)}'{first_program.ops[first_op].name}' is "
                f"{_describe_call(first_work, second_work)}, and "
                f"{_program_prefix(second_program)}'{second_program.ops[second_op].name}' is "
                f"{_describe_call(second_work, first_work)}"
            )
    if len(first_calls) != len(second_calls):
        raise PlanError(
            f"'{name}': {_program_prefix(first_program)}{len(first_calls)} calls, and "
            f"{_program_prefix(second_program)}{len(second_calls)}"
        )


def _programs_per_communicator(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """The distinct sets of programs whose ranks share a communicator of group `name`."""
    rows = np.sort(plan.program_of[plan.groups[name].members], axis=1)
    unique_rows = {row.tobytes(): row for row in rows}
    return sorted({tuple(dict.fromkeys(row.tolist())) for row in unique_rows.values()})


def _peers(plan: Plan, name: str, shift: int) -> list[tuple[int, int]]:
    """The distinct pairs (program of a rank, program of the rank `shift` places further)."""
    programs = plan.program_of[plan.groups[name].members]
    pairs = unique(programs * len(plan.programs) + np.roll(programs, -shift, axis=1))
    return [divmod(pair, len(plan.programs)) for pair in pairs]


def _shifts(plan: Plan, calls: Sequence[_Calls], name: str) -> list[int]:
    """How many places further in a group messages go, each once."""
    size, messages_per_program = (
        plan.groups[name].size,
        [program_calls.messages[name] for program_calls in calls if name in program_calls.messages],
    )
    received = {
        -shift % size for receiving_messages in messages_per_program for shift in receiving_messages.received
    }
    return sorted(
        {shift for sending_messages in messages_per_program for shift in sending_messages.sent} | received
    )


def _check_messages(plan: Plan, calls: Sequence[_Calls]) -> None:
    for name in plan.groups:
        for shift in _shifts(plan, calls, name):
            _check_shift(plan, calls, name, shift)


def _check_shift(plan: Plan, calls: Sequence[_Calls], name: str, shift: int) -> None:
    reverse_shift, none = -shift % plan.groups[name].size, _Messages({}, {})
    if not shift:
        raise PlanError(f"'{name}': a rank sends to itself")
    for sender, receiver in plan.memoize(_peers, name, shift):
        sent = calls[sender].messages.get(name, none).sent.get(shift, [])
        received = calls[receiver].messages.get(name, none).received.get(reverse_shift, [])
        sending_program, receiving_program = plan.programs[sender], plan.programs[receiver]
        for index, (sent_message, received_message) in enumerate(zip(sent, received, strict=False)):
            if sent_message[1:] != received_message[1:]:
                raise PlanError(
                    f"message {index + 1} on '{name}': "
                    f"{_program_prefix(sending_program)}'{sending_program.ops[sent_message[0]].name}' "
                    f"sends {sent_message[1]:,} bytes of {sent_message[2]}, and "
                    f"{_program_prefix(receiving_program)}"
                    f"'{receiving_program.ops[received_message[0]].name}' takes {received_message[1]:,} of "
                    f"{received_message[2]}"
                )
        if len(sent) != len(received):
            raise PlanError(
                f"'{name}': {_program_prefix(sending_program)}{len(sent)} messages to the rank {shift} "
                f"places on, and {_program_prefix(receiving_program)}{len(received)} receives"
            )


class _UntimedRun:
    """Untimed run of the programs: every op that can end does, until none can.

    Unless it `keeps_all`, an op that waits for nothing but the op before it on its stream is left out. Ops
    that wait for it wait for that op instead. It ends when that op ends, because all ops before one that is
    issued are issued too.
    """

    def __init__(self, plan: Plan, calls: Sequence[_Calls], *, keeps_all: bool) -> None:
        self.plan, self.keeps_all = plan, keeps_all
        self.first_op_per_program = list(
            accumulate((len(program.ops) for program in plan.programs), initial=0)
        )
        self.count = self.first_op_per_program.pop()
        self.needs: list[Sequence[int]] = [()] * self.count  # ops that must end before it starts
        self.issued_after: list[Sequence[int]] = [()] * self.count  # must end before it is issued
        self.partners: defaultdict[int, list[int]] = defaultdict(list)  # ops that must start before it ends
        self.kept: list[int] = []
        self.started, self.ended, self.issued = ([False] * self.count for _ in range(3))
        self.blocked_host: dict[int, int] = {}
        for first, program in zip(self.first_op_per_program, plan.programs, strict=True):
            self._add_waits(first, program)
        self._add_collectives(calls)
        self._add_messages(calls)

    def _add_waits(self, first: int, program: Program) -> None:
        columns, count = program.memoize(op_columns), len(program.ops)
        if self.keeps_all:
            are_kept = np.ones(count, dtype=np.bool_)
        else:
            are_kept = np.fromiter(map(bool, columns.after), np.bool_, count)
            are_kept |= np.fromiter(map(bool, columns.host_waits), np.bool_, count)
            are_kept[_calling_ops(program)] = True
        streams, stream_of = _streams_with_work(program)
        numbers, ends = np.arange(count), np.where(are_kept, np.arange(count), -1)
        # by op, the op that ends with it: itself, or an earlier one on its stream; -1: at once
        previous_ends = np.full(count, -1)
        for stream in range(streams):
            ops = numbers[stream_of == stream]
            last_ends = np.maximum.accumulate(np.where(are_kept[ops], ops, -1))
            ends[ops] = last_ends
            previous_ends[ops[1:]] = last_ends[:-1]
        ends_with, previous, kept = ends.tolist(), previous_ends.tolist(), np.flatnonzero(are_kept).tolist()
        after, host_waits = columns.after, columns.host_waits
        for op in kept:
            if host_waits[op]:
                waits = {ends_with[predecessor] for predecessor in host_waits[op]}
                self.issued_after[first + op] = [first + end for end in waits if end >= 0]
            needs = [ends_with[predecessor] for predecessor in after[op]] if after[op] else []
            needs.append(previous[op])
            self.needs[first + op] = [first + need for need in needs if need >= 0]
        self.kept += [first + op for op in kept]

    def _add_collectives(self, calls: Sequence[_Calls]) -> None:
        for name in self.plan.groups:
            for programs in self.plan.memoize(_programs_per_communicator, name):
                op_numbers = [calls[program].collectives.get(name, []) for program in programs]
                for members in zip(*op_numbers, strict=True):
                    ops = [self.first_op_per_program[p] + op for p, op in zip(programs, members, strict=True)]
                    for op in ops if len(ops) > 1 else ():
                        self.partners[op] += [partner for partner in ops if partner != op]

    def _add_messages(self, calls: Sequence[_Calls]) -> None:
        for name, group in self.plan.groups.items():
            for shift in _shifts(self.plan, calls, name):
                for sender, receiver in self.plan.memoize(_peers, name, shift):
                    none = _Messages({}, {})
                    sent = calls[sender].messages.get(name, none).sent.get(shift, [])
                    received = calls[receiver].messages.get(name, none).received.get(-shift % group.size, [])
                    for (sent_op, *_), (received_op, *_) in zip(sent, received, strict=True):
                        sending_op, receiving_op = (
                            self.first_op_per_program[sender] + sent_op,
                            self.first_op_per_program[receiver] + received_op,
                        )
                        self.partners[sending_op].append(receiving_op)
                        self.partners[receiving_op].append(sending_op)

    def has_ended(self) -> bool:
        """Whether every op ends."""
        started, ended, issued = self.started, self.ended, self.issued
        needs, issued_after, partners = self.needs, self.issued_after, self.partners
        cuts = [bisect_left(self.kept, first) for first in self.first_op_per_program]
        hosts, ends = list(cuts), [*cuts[1:], len(self.kept)]
        wakes: dict[int, list[int]] = {}  # by op: what to retry once it started or ended
        todo = deque(range(len(hosts)))
        look: deque[int] = deque()
        while todo or look:
            if todo:
                program = todo.popleft()
                for number in range(hosts[program], ends[program]):
                    op = self.kept[number]
                    if issued_after[op]:
                        pending_op = next(
                            (dependency for dependency in issued_after[op] if not ended[dependency]), -1
                        )
                        if pending_op >= 0:
                            self.blocked_host[program] = pending_op
                            wakes.setdefault(pending_op, []).append(-1 - program)
                            break
                        self.blocked_host.pop(program, None)
                    issued[op] = True
                    hosts[program] = number + 1
                    look.append(op)
                continue
            op = look.popleft()
            if op < 0:
                todo.append(-1 - op)
                continue
            if ended[op]:
                continue
            pending_op = -1  # the op whose end or start keeps this one from ending
            for need in needs[op]:
                if not ended[need]:
                    pending_op = need
                    break
            else:
                if not started[op]:
                    started[op] = True
                    look.extend(wakes.pop(op, ()))
                for partner in partners.get(op, ()):
                    if not started[partner]:
                        pending_op = partner
                        break
            if pending_op >= 0:
                wakes.setdefault(pending_op, []).append(op)
            else:
                ended[op] = True
                look.extend(wakes.pop(op, ()))
        return all(ended[op] for op in self.kept)

    def wait_cycle(self) -> str:
        """The circle of waits as text, from an op that never ends back to itself."""
        started, ended, issued = self.started, self.ended, self.issued
        chain: list[int] = []
        current_op = next(op for op in range(self.count) if not ended[op])
        while current_op not in chain:
            chain.append(current_op)
            if not issued[current_op]:
                program = bisect_right(self.first_op_per_program, current_op) - 1
                current_op = self.blocked_host[program]
            elif not started[current_op]:
                current_op = next(need for need in self.needs[current_op] if not ended[need])
            else:
                current_op = next(partner for partner in self.partners[current_op] if not started[partner])
        circle = chain[chain.index(current_op) :]
        return "; ".join(
            self._describe_wait(waiting, awaited)
            for waiting, awaited in zip(circle, [*circle[1:], circle[0]], strict=True)
        )

    def _op(self, number: int) -> tuple[Program, Op]:
        index = bisect_right(self.first_op_per_program, number) - 1
        program = self.plan.programs[index]
        return program, program.ops[number - self.first_op_per_program[index]]

    def _describe_wait(self, waiting: int, awaited_number: int) -> str:
        (program, op), (peer, awaited) = self._op(waiting), self._op(awaited_number)
        peer_prefix = "" if program is peer else f"{_program_prefix(peer)}"
        return (
            f"{_program_prefix(program)}'{op.name}' on stream {op.stream} waits for "
            f"{peer_prefix}'{awaited.name}'"
        )


def _streams_with_work(program: Program) -> tuple[int, Ints]:
    """The number of streams, and by op the number of its stream. -1: it has no work."""
    columns, indices = program.memoize(op_columns), dict[str, int]()
    stream_indices = [
        -1 if columns.work[number] is None else indices.setdefault(columns.stream[number], len(indices))
        for number in program.memoize(original_ops)
    ]
    return len(indices), unroll(program, stream_indices)


def _program_prefix(program: Program) -> str:
    return f"{program.name}: " if program.name else ""


def _describe_call(work: Collective, compared: Collective) -> str:
    """Describe a call by what it may have in common with another. Of two tables of split sizes it is the
    first size that differs.
    """
    description = f"{work.kind} of {work.bytes:,} bytes of {work.dtype}"
    if work.split_sizes == compared.split_sizes:
        return description
    if work.split_sizes is None:
        return f"{description} in equal parts"
    if compared.split_sizes is None:
        return f"{description} in unequal parts"
    size = len(work.split_sizes)
    for i, j in ((i, j) for i in range(size) for j in range(size)):
        if work.split_sizes[i][j] != compared.split_sizes[i][j]:
            return f"{description} with {work.split_sizes[i][j]:,} from member {i} to member {j}"
    return description
