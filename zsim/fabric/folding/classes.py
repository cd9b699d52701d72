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

import numpy as np

from zsim.arrays import Floats, Hashes, Ints
from zsim.dataclass import dataclass
from zsim.fabric.algorithms.methods import CallKind, Shape, call_kind, methods
from zsim.fabric.algorithms.others import link_usage
from zsim.fabric.algorithms.rings import by_pattern, domains_of
from zsim.fabric.messages import Pairs
from zsim.plan.ops import Collective, Group
from zsim.specs.topology.topology import Topology

_NO_LOAD_BYTES = 64  # a norm, some flags: far below a nanosecond of any link, whichever links the call takes
_EQUAL = 1e-9  # relative: sums closer than this are one value up to rounding


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of ranks and of groups, numbered in the order of their first members."""

    of_rank: Ints
    """By rank, its class."""
    blocks: Mapping[str, Ints]
    """By kind of group, the class of each of its groups."""

    @property
    def representatives(self) -> list[int]:
        """The first rank of every class."""
        return [int(rank) for rank in np.unique(self.of_rank, return_index=True)[1]]

    @property
    def sizes(self) -> Ints:
        """Number of ranks of every class."""
        return np.bincount(self.of_rank)


@dataclass(frozen=True)
class JobPlacement:
    """One job on a fabric: the positions of its ranks, its groups and the collectives that it runs."""

    topology: Topology
    groups: Mapping[str, Group]
    works: Sequence[Collective]
    kinds: Ints
    """A number per rank, equal for ranks that are equal before refinement."""
    shares_nodes: bool = False
    """Whether ranks of a node share more than the links of collectives (host memory, cores, drives and the
    links to them).
    """


def first_apart(classes: Classes) -> Classes:
    """The same classes, but with the first rank of each in a class by itself."""
    firsts = classes.representatives
    of_rank = 2 * classes.of_rank + 1
    of_rank[firsts] -= 1
    return Classes(_in_order(of_rank), classes.blocks)


def one_class(topology: Topology, groups: Mapping[str, Group]) -> Classes:
    """One class of all ranks, and one class of all groups of each kind."""
    counts = {name: len(group.members) for name, group in groups.items()}
    zeros = {name: np.zeros(count, dtype=np.int64) for name, count in counts.items()}
    return Classes(np.zeros(topology.world_size, dtype=np.int64), zeros)


def each_by_itself(topology: Topology, groups: Mapping[str, Group]) -> Classes:
    """Every rank and every group in a class by itself."""
    counts = {name: len(group.members) for name, group in groups.items()}
    return Classes(np.arange(topology.world_size), {name: np.arange(n) for name, n in counts.items()})


def stable_classes(all_placed: Sequence[JobPlacement], *, by_links: bool = True) -> list[Classes]:
    """The coarsest classes of each job. See [Note: stable colours].

    `by_links` false leaves the links out: groups with members of the same classes are then equal wherever
    they are.
    """
    colourings = [_Colouring(placed) for placed in all_placed]
    is_needed = by_links and any(
        len(kind.members) > 1 or colouring.placed.shares_nodes
        for colouring in colourings
        for kind in colouring.kinds.values()
    )
    count = 0
    while True:
        links = _link_colours(colourings) if is_needed else None
        for colouring in colourings:
            colouring.split_groups(links)
            colouring.split_ranks(links)
        total = sum(colouring.count for colouring in colourings)
        if total == count:
            return [colouring.classes() for colouring in colourings]
        count = total


def _link_colours(colourings: Sequence[_Colouring]) -> Ints:
    """Colour of every link: equal where capacity, fault delay and the bytes of every colour of groups are
    equal, which one randomly weighted sum of them tells."""
    topology = colourings[0].placed.topology
    hashes = Hashes(20012)
    capacities = topology.capacities()
    signature = capacities / capacities.max() * hashes.fractions(1)
    if topology.condition is not None and topology.condition.delays.any():
        delays = topology.condition.delays
        signature += delays / delays.max() * hashes.fractions(1)
    for colouring in colourings:
        for kind in colouring.kinds.values():
            for shape in kind.shapes:
                weights = hashes.fractions(int(kind.colours.max()) + 1)[kind.colours]
                view = _Weighted(colouring.placed.topology, kind.of_slot, weights)
                for alike in kind.patterns:
                    signature += link_usage(shape, view, alike)
    return _values(signature)


class _Kind:
    """The groups of one kind, their present colours, and the shapes of the algorithms that they may run."""

    def __init__(self, placed: JobPlacement, name: str, group: Group) -> None:
        topology = placed.topology
        self.members = group.members
        self.is_pairs = isinstance(group, Pairs)
        self.colours = np.zeros(len(self.members), dtype=np.int64)
        self.of_slot = np.zeros(topology.num_slots, dtype=np.int64)
        slots = topology.slots[self.members]
        of_member = np.arange(len(self.members))[:, None]
        self.of_slot[slots[:, :1] if self.is_pairs else slots] = of_member  # a pair's bytes are its sender's
        self.patterns = by_pattern(topology, slots)
        works = placed.works
        if len(self.members) == 1:  # cannot split: only its load on links could tell ranks apart
            works = [work for work in works if work.bytes > _NO_LOAD_BYTES]
        self.shapes = _shapes(topology, self.patterns, group, works)


class _Colouring:
    """A job with the present colours of its ranks and groups."""

    def __init__(self, placed: JobPlacement) -> None:
        self.placed = placed
        self.ranks = _numbered(placed.kinds)
        self.kinds = {
            name: _Kind(placed, name, group) for name, group in placed.groups.items() if group.size > 1
        }
        slots = placed.topology.slots
        topology = placed.topology
        shared = [topology.node_of(slots), topology.switch_of(slots), topology.socket_of(slots)]
        self.neighbourhoods = [_numbered(places) for places in shared] if placed.shares_nodes else []

    @property
    def count(self) -> int:
        groups = sum(int(kind.colours.max()) + 1 for kind in self.kinds.values())
        return int(self.ranks.max()) + 1 + groups

    def split_groups(self, links: Ints | None) -> None:
        """Split the groups' colours by the colours of their members, and of the links that they use."""
        hashes = Hashes(20013)
        of_colour = hashes.integers(int(self.ranks.max()) + 1)
        for kind in self.kinds.values():
            mixed = of_colour[self.ranks[kind.members]]
            if kind.is_pairs:  # the sender's and the receiver's colours are not interchangeable
                mixed[:, 1] *= 3
            colours = _both(kind.colours, _numbered(mixed.sum(axis=1)))
            if links is not None:
                values = hashes.fractions(int(links.max()) + 1)[links]
                for shape in kind.shapes:
                    gathered = _Gathered(self.placed.topology, kind.of_slot, values, len(kind.members))
                    for alike in kind.patterns:
                        link_usage(shape, gathered, alike)
                    colours = _both(colours, _values(gathered.found))
            kind.colours = colours

    def split_ranks(self, links: Ints | None) -> None:
        """Split the ranks' colours by the colours of their groups and, where ranks of a node share more than
        links, by the colours of the ranks on the same node, PCIe switch and socket, and of the links between
        GPU and host, which collectives load too."""
        colours = self.ranks
        for kind in self.kinds.values():
            for column in (kind.members[:, :1], kind.members[:, 1:]) if kind.is_pairs else (kind.members,):
                own = np.zeros(len(colours), dtype=np.int64)  # in no group of the kind
                own[column] = kind.colours[:, None] + 1
                colours = _both(colours, own)
        for places in self.neighbourhoods:
            of_colour = Hashes(20014).integers(int(colours.max()) + 1)
            sums = np.zeros(int(places.max()) + 1, dtype=np.int64)
            np.add.at(sums, places, of_colour[colours])
            colours = _both(colours, _numbered(sums)[places])
        if self.neighbourhoods and links is not None:
            topology = self.placed.topology
            for name in ("pcie_up", "pcie_down", "uplink_up", "uplink_down"):
                slots = topology.slots
                places = slots if name.startswith("pcie") else topology.switch_of(slots)
                colours = _both(colours, links[topology.classes[name].first + places])
        self.ranks = colours

    def classes(self) -> Classes:
        blocks = {name: kind.colours for name, kind in self.kinds.items()}
        # The class of a group of one rank is the class of the rank.
        groups = self.placed.groups.items()
        alone = {name: self.ranks[group.members[:, 0]] for name, group in groups if group.size == 1}
        return Classes(
            _in_order(self.ranks), {name: _in_order(own) for name, own in (blocks | alone).items()}
        )


class _Weighted(Topology):
    """A topology that multiplies the bytes of every group by `weights[group]`."""

    def __init__(self, topology: Topology, of_slot: Ints, weights: Floats) -> None:
        self.__dict__.update(topology.__dict__)
        self._of_slot, self._weights = of_slot, weights

    def add_routes(self, usage: Floats, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        super().add_routes(usage, sources, targets, amount * self._weights[self._of_slot[sources]])

    def add_links(self, usage: Floats, name: str, slots: Ints, amount: float | Floats) -> None:
        super().add_links(usage, name, slots, amount * self._weights[self._of_slot[slots]])


class _Gathered(Topology):
    """A topology that adds up, per group, its bytes on every link times the link's entry of `values`."""

    def __init__(self, topology: Topology, of_slot: Ints, values: Floats, num_groups: int) -> None:
        self.__dict__.update(topology.__dict__)
        self._of_slot, self._values = of_slot, values
        self.found = np.zeros(num_groups)

    def add_routes(self, usage: Floats, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        sums = amount * self.gather_routes(self._values, sources, targets)
        self.found += np.bincount(self._of_slot[sources], sums, len(self.found))

    def add_links(self, usage: Floats, name: str, slots: Ints, amount: float | Floats) -> None:
        sums = amount * self._values[self.classes[name].first + slots]
        self.found += np.bincount(self._of_slot[slots], sums, len(self.found))


def _shapes(
    topology: Topology, patterns: Sequence[Ints], group: Group, works: Iterable[Collective]
) -> list[Shape]:
    """The shapes of all algorithms that the groups of a kind may run."""
    costs = topology.cluster.collectives
    has_switch = topology.cluster.node_link.kind == "switch"
    kinds: dict[CallKind, None] = dict.fromkeys(call_kind(work) for work in works if work.group == group.name)
    if "reduce_scatter" in kinds and costs.reduce_scatter == "all_reduce":
        kinds["all_reduce"] = None
    found: dict[Shape, None] = {}
    for alike in patterns:
        count, most = domains_of(topology, alike[0])
        for kind in kinds:
            own = methods(kind, group.size, count, costs, has_switch=has_switch, most_local_ranks=most)
            found |= dict.fromkeys(method.shape for method in own)
    return list(found)


def _values(values: Floats) -> Ints:
    """A number for each value, the same for values that differ by rounding only."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    steps = np.diff(ordered) > _EQUAL * np.maximum(np.abs(ordered[1:]), np.abs(ordered[:-1]))
    found = np.empty(len(values), dtype=np.int64)
    found[order] = np.concatenate([[0], np.cumsum(steps)])
    return found


def _both(one: Ints, other: Ints) -> Ints:
    """A number for each pair of numbers, equal for equal pairs."""
    return _numbered(one * (int(other.max()) + 1) + other)


def _numbered(values: Ints) -> Ints:
    numbers: Ints = np.unique(values, return_inverse=True)[1]
    return numbers


def _in_order(colours: Ints) -> Ints:
    """The same classes, numbered in the order in which they first appear."""
    _, firsts, inverse = np.unique(colours, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    numbers: Ints = rank[inverse]
    return numbers
