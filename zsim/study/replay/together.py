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

import numpy as np

from zsim.arrays import Ints
from zsim.dataclass import dataclass
from zsim.engine.recorded import collective_of, messages_of, shift_of
from zsim.fabric.folding.classes import JobPlacement, stable_classes
from zsim.fabric.messages import Pairs, pair_name
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology
from zsim.trace.collective_names import group_ranks
from zsim.trace.trace import COLLECTIVES, SpanInfo, Trace


@dataclass(frozen=True)
class Together:
    """The recorded ranks as representatives of the whole world."""

    groups: dict[str, Group]
    """The groups of the whole world, pairs included."""
    blocks: Mapping[str, Ints]
    """See `Fabric`."""
    by_links: bool
    """Whether members of a block load the same links identically."""


def find_together(step: Trace, topology: Topology) -> Together | None:
    """The representatives of the step's world, or None if the recording does not determine them. None too if
    it has no messages whose two sides are known.
    """
    ranks = np.unique(step.ranks).tolist()
    used = {info.group: info for info in step.infos if info.kind in COLLECTIVES}
    if not any(info.messages for info in step.infos) or not _have_sides(step.infos):
        return None
    rows = {name: _known_rows(step, name, info, ranks) for name, info in used.items()}
    kinds = _kinds(ranks, step.world_size)
    if kinds is None or not all(_is_complete(info, rows.get(info.group, []), kinds) for info in step.infos):
        return None
    groups: dict[str, Group] = {}
    for name, known in rows.items():
        members = _moved(known, kinds)
        if members is None:
            return None
        groups[name] = Group(name, members)
    works = [work for info in dict.fromkeys(step.infos) for work in _works(info)]
    groups |= _pairs(step, groups, kinds, ranks)
    placed = JobPlacement(topology, groups, works, kinds)
    for by_links in (True, False):
        classes = stable_classes([placed], by_links=by_links)[0]
        if classes.representatives == sorted(ranks):
            return Together(groups, classes.blocks, by_links)
    return None


def _have_sides(infos: Iterable[SpanInfo]) -> bool:
    """Whether every send has a receive of its size, one position back or any other number of positions."""
    sides: dict[str, set[tuple[str, int, int]]] = {"send": set(), "recv": set()}
    for info in infos:
        for way, count, places in info.messages:
            sides[way].add((info.group, count, shift_of(way, places, max(info.group_size, 1))))
    return sides["send"] == sides["recv"]


def _known_rows(step: Trace, name: str, info: SpanInfo, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The communicators of a kind of group that the recording names."""
    named = step.metadata.get("group_members", {}).get(name)
    if named is not None:
        return [tuple(row) for row in named]
    own = (tuple(group_ranks(name, info.group_size, rank, step.metadata)) for rank in ranks)
    return list(dict.fromkeys(own))


def _kinds(ranks: Sequence[int], world: int) -> Ints | None:
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
    for way, count, places in info.messages:
        sides[way == "send"].append((count, shift_of(way, places, info.group_size)))
    is_ring = sorted(sides[True]) == sorted(sides[False])
    return is_ring and all(len(set(kinds[list(row)].tolist())) == 1 for row in rows)


def _moved(known: Sequence[tuple[int, ...]], kinds: Ints) -> Ints | None:
    """All communicators of a kind of group, from those that are recorded, or None where they do not fit the
    world.
    """
    world = len(kinds)
    by_kind = {int(kinds[row[0]]): row for row in reversed(known)}
    is_free, found = np.ones(world, dtype=bool), []
    exact = {row[0]: row for row in known}
    for rank in range(world):
        like = exact.get(rank) or by_kind.get(int(kinds[rank]))
        if not is_free[rank] or like is None:
            continue
        row = np.array(like) + (rank - like[0])
        if row.max() >= world or row.min() < 0 or not is_free[row].all():
            return None
        if not np.array_equal(kinds[row], kinds[np.array(like)]):
            return None
        is_free[row] = False
        found.append(row)
    return np.array(found) if found else None


def _works(info: SpanInfo) -> list[Collective]:
    """The payloads that a call puts on links: a collective, or its sends."""
    if info.messages:
        return [work for is_sent, work in messages_of(info) if is_sent]
    return [collective_of(info)] if info.kind in COLLECTIVES else []


def _pairs(step: Trace, groups: Mapping[str, Group], kinds: Ints, ranks: Sequence[int]) -> dict[str, Pairs]:
    """The pairs between which ranks send, by name."""
    senders: dict[tuple[str, int], set[int]] = {}
    for rank in ranks:
        for info in {step.infos[i] for i in np.unique(step.info_indices[step.ranks == rank]).tolist()}:
            for way, _, places in info.messages:
                if way == "send":
                    key = info.group, shift_of(way, places, info.group_size)
                    senders.setdefault(key, set()).add(int(kinds[rank]))
    found = {}
    for (name, shift), own in sorted(senders.items()):
        members = groups[name].members
        sends = np.isin(kinds[members], sorted(own))
        pairs = np.stack([members, np.roll(members, -shift, axis=1)], axis=2)[sends]
        found[pair_name(name, shift)] = Pairs(pair_name(name, shift), pairs)
    return found
