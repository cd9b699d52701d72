"""Recorded ranks that are replayed concurrently. Each represents all ranks at its position in a pipeline.

# [Note: places of a pipeline]
A simulated step has one rank of every class, and the recording of a pipeline one rank of every stage: the
first, in even distances. The ranks up to the next recorded one are at the same position, and all of them
again where the stages begin anew. Groups of ranks without a file are copies of those with files, moved by the
distance between their first ranks. Whether ranks at one position also load the links identically is then
decided as for a simulated job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Ints
from zsim.engine.replay import collective_of, messages_of, shift_of
from zsim.fabric.folding.classes import JobPlacement, refine_classes
from zsim.fabric.messages import Pairs, pair_name
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology
from zsim.trace.collective_names import group_ranks
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace


@dataclass(frozen=True)
class RepresentativeRanks:
    """The recorded ranks as representatives of the whole world."""

    groups: dict[str, Group]
    """The groups of the whole world, pairs included."""
    communicator_indices: Mapping[str, Ints]
    """See `Fabric`."""
    by_links: bool
    """Whether members of a block load the same links identically."""


def find_representatives(step: Trace, topology: Topology) -> RepresentativeRanks | None:
    """The representatives of the step's world, or None if the recording does not determine them. None too if
    it has no messages whose two sides are known.
    """
    ranks = np.unique(step.ranks).tolist()
    info_of_group = {info.group: info for info in step.infos if info.kind in COLLECTIVES}
    if not any(info.messages for info in step.infos) or not _are_messages_paired(step.infos):
        return None
    rows = {name: _recorded_communicators(step, name, info, ranks) for name, info in info_of_group.items()}
    kinds = _rank_kinds(ranks, step.world_size)
    if kinds is None or not all(_is_complete(info, rows.get(info.group, []), kinds) for info in step.infos):
        return None
    groups: dict[str, Group] = {}
    for name, communicators in rows.items():
        members = _translate_communicators(communicators, kinds)
        if members is None:
            return None
        groups[name] = Group(name, members)
    payloads = [payload for info in dict.fromkeys(step.infos) for payload in _link_payloads(info)]
    groups |= _pairs(step, groups, kinds, ranks)
    placement = JobPlacement(topology, groups, payloads, kinds)
    for by_links in (True, False):
        classes = refine_classes([placement], by_links=by_links)[0]
        if classes.representatives == sorted(ranks):
            return RepresentativeRanks(groups, classes.class_of_group, by_links)
    return None


def _are_messages_paired(infos: Iterable[SpanInfo]) -> bool:
    """Whether every send has a receive of its size, one position back or any other number of positions."""
    sides: dict[str, set[tuple[str, int, int]]] = {"send": set(), "recv": set()}
    for info in infos:
        for direction, count, distance in info.messages:
            sides[direction].add((info.group, count, shift_of(direction, distance, max(info.group_size, 1))))
    return sides["send"] == sides["recv"]


def _recorded_communicators(
    step: Trace, name: str, info: SpanInfo, ranks: Sequence[int]
) -> list[tuple[int, ...]]:
    """The communicators of a kind of group that the recording names."""
    named = step.metadata.get("group_members", {}).get(name)
    if named is not None:
        return [tuple(row) for row in named]
    rows = (tuple(group_ranks(name, info.group_size, rank, step.metadata)) for rank in ranks)
    return list(dict.fromkeys(rows))


def _rank_kinds(ranks: Sequence[int], world: int) -> Ints | None:
    """A number per rank of the world, equal for ranks at the position of one recorded rank, or None if the
    recorded ranks do not have one position each. See [Note: places of a pipeline].
    """
    if len(ranks) == world:
        return np.arange(world)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else world
    is_even = list(ranks) == list(range(0, len(ranks) * stride, stride))
    if not is_even or world % (len(ranks) * stride):
        return None
    return np.arange(world) // stride % len(ranks)


def _is_complete(info: SpanInfo, rows: Sequence[tuple[int, ...]], kinds: Ints) -> bool:
    """Whether the other sides of a call's messages are recorded.

    The ranks of the call's group are at one position each, or all at the same one. In the latter case every
    call must send on what it receives, as in a ring. (A file of one pipeline rank has neither.)
    """
    if not info.messages:
        return True
    if all(len(set(kinds[list(row)].tolist())) == len(row) for row in rows):
        return True
    sides: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for direction, count, distance in info.messages:
        sides[direction == "send"].append((count, shift_of(direction, distance, info.group_size)))
    is_ring = sorted(sides[True]) == sorted(sides[False])
    return is_ring and all(len(set(kinds[list(row)].tolist())) == 1 for row in rows)


def _translate_communicators(communicators: Sequence[tuple[int, ...]], kinds: Ints) -> Ints | None:
    """All communicators of a kind of group, from those that are recorded, or None where they do not fit the
    world.
    """
    world = len(kinds)
    by_kind = {int(kinds[row[0]]): row for row in reversed(communicators)}
    is_free, rows = np.ones(world, dtype=bool), []
    exact = {row[0]: row for row in communicators}
    for rank in range(world):
        template = exact.get(rank) or by_kind.get(int(kinds[rank]))
        if not is_free[rank] or template is None:
            continue
        row = np.array(template) + (rank - template[0])
        if row.max() >= world or row.min() < 0 or not is_free[row].all():
            return None
        if not np.array_equal(kinds[row], kinds[np.array(template)]):
            return None
        is_free[row] = False
        rows.append(row)
    return np.array(rows) if rows else None


def _link_payloads(info: SpanInfo) -> list[Collective]:
    """The payloads that a call puts on links: a collective, or its sends."""
    if info.messages:
        return [payload for is_sent, payload in messages_of(info) if is_sent]
    return [collective_of(info)] if info.kind in COLLECTIVES else []


def _pairs(step: Trace, groups: Mapping[str, Group], kinds: Ints, ranks: Sequence[int]) -> dict[str, Pairs]:
    """The pairs between which ranks send, by name."""
    senders: dict[tuple[str, int], set[int]] = {}
    for rank in ranks:
        for info in {step.infos[i] for i in np.unique(step.info_indices[step.ranks == rank]).tolist()}:
            for direction, _, distance in info.messages:
                if direction == "send":
                    key = info.group, shift_of(direction, distance, info.group_size)
                    senders.setdefault(key, set()).add(int(kinds[rank]))
    pairs_by_name = {}
    for (name, shift), sender_kinds in sorted(senders.items()):
        members = groups[name].members
        sends = np.isin(kinds[members], sorted(sender_kinds))
        pairs = np.stack([members, np.roll(members, -shift, axis=1)], axis=2)[sends]
        pairs_by_name[pair_name(name, shift)] = Pairs(pair_name(name, shift), pairs)
    return pairs_by_name
