"""The coarsest classes of ranks and of groups that may be simulated by one representative each.

# [Note: stable colours]
Ranks of a class run the same program on equally fast hardware, and for every kind of group they are in groups
of one class. Groups of a class have the same number of members of each class of ranks, and put the same bytes
on links of the same classes. Links of a class have the same capacity and carry the same bytes of each class
of groups. Where that holds, members of a class stay equal at every instant: the fluid rates of their
activities depend on nothing else.

The coarsest such classes are found by colour refinement: begin with one colour for everything that looks the
same, and split colours that break a rule until none does (Cardon, Crochemore 1982). For Markov chains and
fluid models it is called exact lumping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Floats, Ints, SplitMix64
from zsim.fabric.algorithms.link_usage import shape_traffic
from zsim.fabric.algorithms.methods import CallKind, Shape, call_kind, methods
from zsim.fabric.algorithms.rings import bytes_by_link, domains_of, partition_by_pattern
from zsim.fabric.messages import Pairs
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology

_NO_LOAD_BYTES = 64  # a norm, some flags: far below a nanosecond of any link, whichever links the call takes
_EQUAL = 1e-9  # relative: sums closer than this are one value up to rounding


@dataclass(frozen=True, slots=True)
class RankClasses:
    """Classes of ranks and of groups, numbered in the order of their first members."""

    class_of_rank: Ints
    """By rank, its class."""
    class_of_group: Mapping[str, Ints]
    """By kind of group, the class of each of its groups."""

    @property
    def representatives(self) -> list[int]:
        """The first rank of every class."""
        return [int(rank) for rank in np.unique(self.class_of_rank, return_index=True)[1]]

    @property
    def sizes(self) -> Ints:
        """Number of ranks of every class."""
        return np.bincount(self.class_of_rank)


@dataclass(frozen=True)
class JobPlacement:
    """One job on a fabric: the positions of its ranks, its groups and the collectives that it runs."""

    topology: Topology
    groups: Mapping[str, Group]
    collectives: Sequence[Collective]
    kinds: Ints
    """A number per rank, equal for ranks that are equal before refinement."""
    shares_nodes: bool = False
    """Whether ranks of a node share more than the links of collectives (host memory, cores, drives and the
    links to them).
    """


def isolate_representatives(classes: RankClasses) -> RankClasses:
    """The same classes, but with the first rank of each in a class by itself."""
    firsts = classes.representatives
    class_of_rank = 2 * classes.class_of_rank + 1
    class_of_rank[firsts] -= 1
    return RankClasses(_renumber(class_of_rank), classes.class_of_group)


def single_class(topology: Topology, groups: Mapping[str, Group]) -> RankClasses:
    """One class of all ranks, and one class of all groups of each kind."""
    counts = {name: len(group.members) for name, group in groups.items()}
    zeros = {name: np.zeros(count, dtype=np.int64) for name, count in counts.items()}
    return RankClasses(np.zeros(topology.world_size, dtype=np.int64), zeros)


def singleton_classes(topology: Topology, groups: Mapping[str, Group]) -> RankClasses:
    """Every rank and every group in a class by itself."""
    counts = {name: len(group.members) for name, group in groups.items()}
    return RankClasses(np.arange(topology.world_size), {name: np.arange(n) for name, n in counts.items()})


def refine_classes(placements: Sequence[JobPlacement], *, by_links: bool = True) -> list[RankClasses]:
    """The coarsest classes of each job. See [Note: stable colours].

    `by_links` false leaves the links out: groups with members of the same classes are then equal wherever
    they are.
    """
    refinements = [_ColorRefinement(placement) for placement in placements]
    is_needed = by_links and any(
        len(kind.members) > 1 or refinement.placement.shares_nodes
        for refinement in refinements
        for kind in refinement.kinds.values()
    )
    count = 0
    while True:
        links = _link_colours(refinements) if is_needed else None
        for refinement in refinements:
            refinement.split_groups(links)
            refinement.split_ranks(links)
        total = sum(refinement.count for refinement in refinements)
        if total == count:
            return [refinement.classes() for refinement in refinements]
        count = total


def _link_colours(refinements: Sequence[_ColorRefinement]) -> Ints:
    """Colour of every link: equal where capacity, fault delay and the bytes of every colour of groups are
    equal, which one randomly weighted sum of them tells."""
    topology = refinements[0].placement.topology
    hashes = SplitMix64(20012)
    capacities = topology.capacities()
    signature = capacities / capacities.max() * hashes.fractions(1)
    if topology.condition is not None and topology.condition.delays.any():
        delays = topology.condition.delays
        signature += delays / delays.max() * hashes.fractions(1)
    for refinement in refinements:
        for kind in refinement.kinds.values():
            for shape in kind.shapes:
                weights = hashes.fractions(int(kind.colours.max()) + 1)[kind.colours]
                for pattern in kind.patterns:
                    signature += kind.weighted_bytes(shape, pattern, weights)
    return _number_close_values(signature)


class _GroupKind:
    """The groups of one kind, their present colours, and the shapes of the algorithms that they may run."""

    def __init__(self, placement: JobPlacement, name: str, group: Group) -> None:
        topology = self.topology = placement.topology
        self.members = group.members
        self.is_pairs = isinstance(group, Pairs)
        self.colours = np.zeros(len(self.members), dtype=np.int64)
        self.group_of_slot = np.zeros(topology.num_slots, dtype=np.int64)
        slots = topology.slots[self.members]
        group_of_member = np.arange(len(self.members))[:, None]
        self.group_of_slot[slots[:, :1] if self.is_pairs else slots] = (
            group_of_member  # a pair's bytes are its sender's
        )
        self.patterns = partition_by_pattern(topology, slots)
        collectives = placement.collectives
        if len(self.members) == 1:  # cannot split: only its load on links could distinguish ranks
            collectives = [work for work in collectives if work.bytes > _NO_LOAD_BYTES]
        self.shapes = _shapes(topology, self.patterns, group, collectives)

    def weighted_bytes(self, shape: Shape, pattern: Ints, weights: Floats) -> Floats:
        """Bytes per link of the groups of a pattern, those of every group times its entry of `weights`."""
        traffic = shape_traffic(shape, self.topology, pattern)
        return bytes_by_link(
            self.topology, (part.scale(weights[self.group_of_slot[part.senders]]) for part in traffic)
        )

    def group_sums(self, shape: Shape, values: Floats) -> Floats:
        """By group, the sum of its bytes on every link times the link's entry of `values`."""
        sums = np.zeros(len(self.members))
        for pattern in self.patterns:
            for part in shape_traffic(shape, self.topology, pattern):
                groups = self.group_of_slot[part.senders]
                sums += np.bincount(groups, part.weigh(values, self.topology), len(sums))
        return sums


class _ColorRefinement:
    """A job with the present colours of its ranks and groups."""

    def __init__(self, placement: JobPlacement) -> None:
        self.placement = placement
        self.ranks = _number_values(placement.kinds)
        self.kinds = {
            name: _GroupKind(placement, name, group)
            for name, group in placement.groups.items()
            if group.size > 1
        }
        slots = placement.topology.slots
        topology = placement.topology
        shared = [topology.node_of(slots), topology.switch_of(slots), topology.socket_of(slots)]
        self.neighbourhoods = (
            [_number_values(numbers) for numbers in shared] if placement.shares_nodes else []
        )

    @property
    def count(self) -> int:
        groups = sum(int(kind.colours.max()) + 1 for kind in self.kinds.values())
        return int(self.ranks.max()) + 1 + groups

    def split_groups(self, links: Ints | None) -> None:
        """Split the groups' colours by the colours of their members, and of the links that they use."""
        hashes = SplitMix64(20013)
        hash_of_colour = hashes.integers(int(self.ranks.max()) + 1)
        for kind in self.kinds.values():
            mixed = hash_of_colour[self.ranks[kind.members]]
            if kind.is_pairs:  # the sender's and the receiver's colours are not interchangeable
                mixed[:, 1] *= 3
            colours = _number_pairs(kind.colours, _number_values(mixed.sum(axis=1)))
            if links is not None:
                values = hashes.fractions(int(links.max()) + 1)[links]
                for shape in kind.shapes:
                    colours = _number_pairs(colours, _number_close_values(kind.group_sums(shape, values)))
            kind.colours = colours

    def split_ranks(self, links: Ints | None) -> None:
        """Split the ranks' colours by the colours of their groups and, where ranks of a node share more than
        links, by the colours of the ranks on the same node, PCIe switch and socket, and of the links between
        GPU and host, which collectives load too."""
        colours = self.ranks
        for kind in self.kinds.values():
            for column in (kind.members[:, :1], kind.members[:, 1:]) if kind.is_pairs else (kind.members,):
                group_colours = np.zeros(len(colours), dtype=np.int64)  # in no group of the kind
                group_colours[column] = kind.colours[:, None] + 1
                colours = _number_pairs(colours, group_colours)
        for indices in self.neighbourhoods:
            hash_of_colour = SplitMix64(20014).integers(int(colours.max()) + 1)
            sums = np.zeros(int(indices.max()) + 1, dtype=np.int64)
            np.add.at(sums, indices, hash_of_colour[colours])
            colours = _number_pairs(colours, _number_values(sums)[indices])
        if self.neighbourhoods and links is not None:
            topology = self.placement.topology
            names = ("pcie_up", "pcie_down", "uplink_up", "uplink_down", "c2c_up", "c2c_down")
            for name in (name for name in names if name in topology.classes):
                slots = topology.slots
                indices = topology.switch_of(slots) if name.startswith("uplink") else slots
                colours = _number_pairs(colours, links[topology.classes[name].first + indices])
        self.ranks = colours

    def classes(self) -> RankClasses:
        group_colours = {name: kind.colours for name, kind in self.kinds.items()}
        # The class of a group of one rank is the class of the rank.
        groups = self.placement.groups.items()
        single_rank_groups = {
            name: self.ranks[group.members[:, 0]] for name, group in groups if group.size == 1
        }
        return RankClasses(
            _renumber(self.ranks),
            {name: _renumber(colours) for name, colours in (group_colours | single_rank_groups).items()},
        )


def _shapes(
    topology: Topology, patterns: Sequence[Ints], group: Group, collectives: Iterable[Collective]
) -> list[Shape]:
    """The shapes of all algorithms that the groups of a kind may run."""
    costs = topology.cluster.collectives
    has_switch = topology.cluster.node_link.kind == "switch"
    kinds: dict[CallKind, None] = dict.fromkeys(
        call_kind(work) for work in collectives if work.group == group.name
    )
    if "reduce_scatter" in kinds and costs.reduce_scatter == "all_reduce":
        kinds["all_reduce"] = None
    shapes: dict[Shape, None] = {}
    for pattern in patterns:
        count, max_local = domains_of(topology, pattern[0])
        for kind in kinds:
            kind_methods = methods(
                kind, group.size, count, costs, has_switch=has_switch, most_local_ranks=max_local
            )
            shapes |= dict.fromkeys(method.shape for method in kind_methods)
    return list(shapes)


def _number_close_values(values: Floats) -> Ints:
    """A number for each value, the same for values that differ by rounding only."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    steps = np.diff(ordered) > _EQUAL * np.maximum(np.abs(ordered[1:]), np.abs(ordered[:-1]))
    numbers = np.empty(len(values), dtype=np.int64)
    numbers[order] = np.concatenate([[0], np.cumsum(steps)])
    return numbers


def _number_pairs(first: Ints, second: Ints) -> Ints:
    """A number for each pair of numbers, equal for equal pairs."""
    return _number_values(first * (int(second.max()) + 1) + second)


def _number_values(values: Ints) -> Ints:
    numbers: Ints = np.unique(values, return_inverse=True)[1]
    return numbers


def _renumber(colours: Ints) -> Ints:
    """The same classes, numbered in the order in which they first appear."""
    _, firsts, inverse = np.unique(colours, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    numbers: Ints = rank[inverse]
    return numbers
