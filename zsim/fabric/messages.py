"""Messages between two ranks, as collectives of pairs.

All messages that the ranks of a kind of group send over a given distance in the group form a kind of group
too: its groups are the (sender, receiver) pairs. So a message is the collective "send" of a pair, and pairs
have routes, latency, sharing and folding like any other groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zsim.arrays import Ints
from zsim.plan.ops import Collective, Group, Plan, PointToPoint, Program


class Pairs(Group):
    """Rows are (sender, receiver). A rank sends in at most one row, and receives in at most one."""

    def row_per_rank(self, world_size: int) -> Ints:
        """Row in which each rank sends. It is -1 where the rank sends in none."""
        rows = np.full(world_size, -1, dtype=np.int64)
        rows[self.members[:, 0]] = np.arange(len(self.members))
        return rows

    def receiving_row_of(self, world_size: int) -> Ints:
        """Row in which each rank receives. It is -1 where the rank receives in none."""
        rows = np.full(world_size, -1, dtype=np.int64)
        rows[self.members[:, 1]] = np.arange(len(self.members))
        return rows


class Side(NamedTuple):
    """One side of a message: the `number`-th (from 0) message of its pair, sent by this rank or to it."""

    work: Collective
    is_sent: bool
    number: int


def pairs_of(plan: Plan) -> dict[str, Pairs]:
    """The kinds of pairs between which the plan's programs send, by name."""
    senders: dict[tuple[str, int], list[int]] = {}
    for number, program in enumerate(plan.programs):
        for group, shift in dict.fromkeys(_sends(program, plan.groups)):
            senders.setdefault((group, shift), []).append(number)
    pairs_by_name = {}
    for (name, shift), programs in senders.items():
        members = plan.groups[name].members
        sends = np.isin(plan.program_of[members], programs)
        pairs = np.stack([members, np.roll(members, -shift, axis=1)], axis=2)[sends]
        pairs_by_name[pair_name(name, shift)] = Pairs(pair_name(name, shift), pairs)
    return pairs_by_name


def communicators_of(plan: Plan) -> dict[str, Group]:
    """The plan's groups, and the kinds of pairs between which its programs send, by name."""
    return {**plan.groups, **pairs_of(plan)}


def sides_of(program: Program, groups: Mapping[str, Group]) -> dict[int, tuple[Side, ...]]:
    """The sides of the messages of every op that has messages, by op number."""
    counts: dict[tuple[str, str, int], int] = {}
    sides_by_op = {}
    for number, call in _calls(program):
        sides = []
        for message in call.messages:
            size = groups[call.group].size
            is_send = message.direction == "send"
            shift = message.shift % size if is_send else -message.shift % size
            key = call.group, message.direction, shift
            counts[key] = count = counts.get(key, -1) + 1
            work = Collective("send", message.bytes, call.dtype, pair_name(call.group, shift))
            sides.append(Side(work, is_send, count))
        sides_by_op[number] = tuple(sides)
    return sides_by_op


def sends(work: PointToPoint, groups: Mapping[str, Group]) -> list[Collective]:
    """The sends of a call, as collectives of pairs."""
    size = groups[work.group].size
    return [
        Collective("send", message.bytes, work.dtype, pair_name(work.group, message.shift % size))
        for message in work.messages
        if message.direction == "send"
    ]


def fabric_collectives(program: Program, groups: Mapping[str, Group]) -> list[Collective]:
    """All collectives and sends that a rank of a program puts on links, in order. A send is the collective of
    a pair.
    """
    collectives: list[Collective] = []
    for op in program.ops:
        if type(op.work) is Collective:
            collectives.append(op.work)
        elif type(op.work) is PointToPoint:
            collectives += sends(op.work, groups)
    return collectives


def count_collectives(collectives: Iterable[Collective]) -> dict[Collective, int]:
    """How often each of `collectives` is among them, in the order of the first ones.

    Ops share their collectives, and a collective takes long to hash, so they are counted by identity first.
    """
    shared = list(collectives)
    by_id = {id(work): work for work in shared}
    counts: dict[Collective, int] = {}
    for number, count in Counter(map(id, shared)).items():
        work = by_id[number]
        counts[work] = counts.get(work, 0) + count
    return counts


def _sends(program: Program, groups: Mapping[str, Group]) -> Iterator[tuple[str, int]]:
    for number, call in _calls(program):
        size = groups[call.group].size
        for message in call.messages:
            if message.direction == "send":
                name, shift = program.ops[number].name, message.shift % size
                assert shift, f"'{name}': among {size} ranks, {message.shift} places on is the sender"
                yield call.group, shift


def _calls(program: Program) -> Iterator[tuple[int, PointToPoint]]:
    for number in program.message_ops:
        work = program.ops[number].work
        assert isinstance(work, PointToPoint)
        yield number, work


def pair_name(group: str, shift: int) -> str:
    """Name of the kind of pairs whose receivers are at the distance `shift` from the senders in a kind of
    group.
    """
    return f"{group} +{shift}"
