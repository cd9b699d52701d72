"""Traffic of an algorithm: the parts of which it consists, and what is summed over the links they take.

Algorithms (`zsim.fabric.algorithms.rings`, `zsim.fabric.algorithms.link_usage`) yield their parts one by one.
Whoever asks decides what to sum: bytes per link, bytes weighted by the sender's group, or values of links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.specs.topology.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class RouteTraffic:
    """Bytes on every link of the routes of pairs of slots."""

    senders: Ints
    """By pair, the slot that the bytes leave."""
    receivers: Ints
    """By pair, the slot that they arrive at."""
    amount: float | Floats
    """Bytes of every pair, or of each pair."""

    def scale(self, factors: Floats) -> RouteTraffic:
        """The same pairs with `factors` (one per pair) times the bytes."""
        return RouteTraffic(self.senders, self.receivers, self.amount * factors)

    def add_to(self, usage: Floats, topology: Topology) -> None:
        """Add the bytes to `usage`, which has an entry per link."""
        topology.add_routes(usage, self.senders, self.receivers, self.amount)

    def weigh(self, values: Floats, topology: Topology) -> Floats:
        """Per pair, the sum of its bytes on each link times the link's entry of `values`."""
        return self.amount * topology.gather_routes(values, self.senders, self.receivers)


@dataclass(frozen=True, slots=True, eq=False)
class LinkTraffic:
    """Bytes on the links of slots in a class that has one link per slot."""

    name: str
    """Of the class of links."""
    senders: Ints
    """The slots."""
    amount: float | Floats
    """Bytes of every slot, or of each slot."""

    def scale(self, factors: Floats) -> LinkTraffic:
        """The same links with `factors` (one per slot) times the bytes."""
        return LinkTraffic(self.name, self.senders, self.amount * factors)

    def add_to(self, usage: Floats, topology: Topology) -> None:
        """Add the bytes to `usage`, which has an entry per link."""
        topology.add_links(usage, self.name, self.senders, self.amount)

    def weigh(self, values: Floats, topology: Topology) -> Floats:
        """Per slot, its bytes times its link's entry of `values`."""
        weighed: Floats = self.amount * values[topology.classes[self.name].first + self.senders]
        return weighed


Traffic: TypeAlias = RouteTraffic | LinkTraffic


def bytes_by_link(topology: Topology, traffic: Iterable[Traffic]) -> Floats:
    """Bytes per link of all parts of some traffic."""
    usage = np.zeros(topology.num_links)
    for part in traffic:
        part.add_to(usage, topology)
    return usage
