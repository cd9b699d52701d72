"""Resources of nodes other than their links: memory bandwidth, cores, drives and the ranks' queues.

They are numbered after the links of the topology, so that one activity can use both. A `ResourceUsage` is the
units of each that one unit of work takes. An activity represents all ranks of a class and carries the load of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass
from zsim.devices.sockets import Shares, Sockets, sockets_of
from zsim.specs.topology.topology import Topology

Scope = Literal["rank", "switch", "socket", "node"]


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """One unit of work takes `weights[i]` units of resource `indices[i]`."""

    indices: Ints
    weights: Floats


@dataclass(frozen=True, slots=True)
class ResourceClass:
    """`count` resources of one kind, numbered from `first`: one per rank, per PCIe switch, per socket or per
    node.
    """

    name: str
    scope: Scope
    first: int
    count: int
    capacity: float
    """Per second: bytes, or seconds of a queue, of cores or of drives. Where nodes differ, it is the capacity
    of the first.
    """


class NodePool:
    """All resources that the offloaded work of a topology's ranks can use, by name. `class_of_rank` is the
    class of every rank.
    """

    def __init__(self, topology: Topology, of_rank: Ints) -> None:
        self.topology = topology
        self._of_rank = of_rank
        self.classes: dict[str, ResourceClass] = {}
        scopes: dict[str, Scope] = {
            "pcie_up": "rank", "pcie_down": "rank", "uplink_up": "switch", "uplink_down": "switch",
        }  # fmt: skip
        for name, scope in scopes.items():
            link = topology.classes[name]
            self.classes[name] = ResourceClass(name, scope, link.first, link.count, link.capacity)
        self._capacities: list[Floats] = []
        self._next = topology.num_links

    def add(self, name: str, scope: Scope, *of_type: float) -> None:
        """Add one resource per GPU, per socket or per node, with the capacity of its node's type. A single
        capacity is that of all nodes.
        """
        topology = self.topology
        sockets = topology.num_nodes * topology.cluster.host.sockets
        count = {"rank": topology.num_slots, "node": topology.num_nodes, "socket": sockets}[scope]
        self.classes[name] = ResourceClass(name, scope, self._next, count, of_type[0])
        types = topology.cluster.type_of_node if len(of_type) > 1 else np.zeros(topology.num_nodes, np.int64)
        self._capacities.append(np.repeat(np.array(of_type)[types], count // topology.num_nodes))
        self._next += count

    def type_of(self, rank: int) -> int:
        """The type of a rank's node, by its index in the cluster's `hosts`."""
        types = self.topology.cluster.type_of_node
        return int(types[self.topology.node_of(self.topology.slots[rank])]) if len(types) else 0

    @property
    def capacities(self) -> Floats:
        """Capacity of every added resource, in order. Their numbers follow the topology's links."""
        return np.concatenate(self._capacities) if self._capacities else np.zeros(0)

    def ranks_beside(self, rank: int) -> int:
        """Number of ranks on the node of `rank`, `rank` included."""
        nodes = self.topology.node_of(self.topology.slots)
        return int((nodes == nodes[rank]).sum())

    def usage(
        self,
        rank: int,
        own: dict[str, float],
        spread: dict[str, float] | None = None,
        on_sockets: Callable[[Sockets], Mapping[str, Shares]] | None = None,
    ) -> ResourceUsage:
        """Usage of one unit of work of every rank in the class of `rank`.

        `rank_weights` is {resource: weight} on each rank's own link, switch and node. `switch_weights` is
        {resource: weight}, distributed evenly over all switches of the rank's node. `weights_of_sockets`
        gives {resource: weight per socket} for the ranks of a socket.
        """
        slots = self.topology.slots[self._of_rank == self._of_rank[rank]]
        parts = [self._entries(self.classes[name], weight, slots) for name, weight in own.items() if weight]
        if on_sockets is not None:
            parts += self._on_sockets(on_sockets, slots)
        for name, weight in (spread or {}).items():
            if weight:
                parts.append(self._spread(self.classes[name], weight, slots))
        indices, inverse = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
        weights = np.zeros(len(indices))
        np.add.at(weights, inverse, np.concatenate([part[1] for part in parts]))
        return ResourceUsage(indices, weights)

    def _entries(self, resource: ResourceClass, weight: float, slots: Ints) -> tuple[Ints, Floats]:
        """Indices and weights when every slot puts `weight` on the resource that belongs to it."""
        places = {"rank": lambda own: own, "node": self.topology.node_of, "switch": self.topology.switch_of}
        used, counts = np.unique(places[resource.scope](slots), return_counts=True)
        return resource.first + used, counts.astype(np.float64) * weight

    def _spread(self, resource: ResourceClass, weight: float, slots: Ints) -> tuple[Ints, Floats]:
        """Indices and weights when every slot distributes `weight` over all PCIe switches of its node."""
        switches = self.topology.switches_per_node
        nodes, counts = np.unique(self.topology.node_of(slots), return_counts=True)
        indices = resource.first + (nodes[:, None] * switches + np.arange(switches)).ravel()
        return indices, np.repeat(weight / switches * counts, switches)

    def _on_sockets(
        self, weights_of: Callable[[Sockets], Mapping[str, Shares]], slots: Ints
    ) -> list[tuple[Ints, Floats]]:
        """Indices and weights of the resources that every slot uses on the sockets of its node."""
        cluster = self.topology.cluster
        count = cluster.host.sockets
        numbers, members = np.unique(self.topology.socket_of(slots), return_counts=True)
        parts = []
        for own in range(count):
            here = numbers % count == own
            for name, weights in weights_of(sockets_of(cluster, own)).items():
                if name not in self.classes or not here.any():
                    continue
                places = (numbers[here] // count * count)[:, None] + np.arange(count)
                amounts = members[here][:, None] * np.asarray(weights, dtype=np.float64)
                used = amounts.ravel() > 0
                parts.append((self.classes[name].first + places.ravel()[used], amounts.ravel()[used]))
        return parts
