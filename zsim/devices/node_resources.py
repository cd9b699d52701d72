"""Resources of nodes other than their links: memory bandwidth, cores, drives and the ranks' queues.

They are numbered after the links of the topology, so that one activity can use both. A `ResourceUsage` is the
units of each that one unit of work takes. An activity represents all ranks of a class and carries the load of
all.

NUMA: the sockets whose memory and cores a rank uses, and the bytes that cross between sockets.

A node's memory and cores are split evenly over its sockets, and so are its GPUs, in order. A byte that goes
from one socket to another leaves the first over its outgoing links and enters the second over its incoming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.specs.cluster.cluster import Cluster
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

    def __init__(self, topology: Topology, class_of_rank: Ints) -> None:
        self.topology = topology
        self._class_of_rank = class_of_rank
        self.classes: dict[str, ResourceClass] = {}
        scopes: dict[str, Scope] = {
            "pcie_up": "rank", "pcie_down": "rank", "uplink_up": "switch", "uplink_down": "switch",
        }  # fmt: skip
        scopes |= {name: "rank" for name in ("c2c_up", "c2c_down") if name in topology.classes}
        for name, scope in scopes.items():
            link = topology.classes[name]
            self.classes[name] = ResourceClass(name, scope, link.first, link.count, link.capacity)
        self._capacities: list[Floats] = []
        self._next = topology.num_links

    def add(self, name: str, scope: Scope, *type_capacities: float) -> None:
        """Add one resource per GPU, per socket or per node, with the capacity of its node's type. A single
        capacity is that of all nodes.
        """
        topology = self.topology
        sockets = topology.num_nodes * topology.cluster.host.sockets
        count = {"rank": topology.num_slots, "node": topology.num_nodes, "socket": sockets}[scope]
        self.classes[name] = ResourceClass(name, scope, self._next, count, type_capacities[0])
        types = (
            topology.cluster.node_type_indices
            if len(type_capacities) > 1
            else np.zeros(topology.num_nodes, np.int64)
        )
        self._capacities.append(np.repeat(np.array(type_capacities)[types], count // topology.num_nodes))
        self._next += count

    def type_of(self, rank: int) -> int:
        """The type of a rank's node, by its index in the cluster's `hosts`."""
        types = self.topology.cluster.node_type_indices
        return int(types[self.topology.node_of(self.topology.slots[rank])]) if len(types) else 0

    @property
    def capacities(self) -> Floats:
        """Capacity of every added resource, in order. Their numbers follow the topology's links."""
        return np.concatenate(self._capacities) if self._capacities else np.zeros(0)

    def ranks_on_node(self, rank: int) -> int:
        """Number of ranks on the node of `rank`, `rank` included."""
        nodes = self.topology.node_of(self.topology.slots)
        return int((nodes == nodes[rank]).sum())

    def usage(
        self,
        rank: int,
        rank_weights: dict[str, float],
        switch_weights: dict[str, float] | None = None,
        weights_of_sockets: Callable[[Sockets], Mapping[str, Shares]] | None = None,
    ) -> ResourceUsage:
        """Usage of one unit of work of every rank in the class of `rank`.

        `rank_weights` is {resource: weight} on each rank's own link, switch and node. `switch_weights` is
        {resource: weight}, distributed evenly over all switches of the rank's node. `weights_of_sockets`
        gives {resource: weight per socket} for the ranks of a socket.
        """
        slots = self.topology.slots[self._class_of_rank == self._class_of_rank[rank]]
        entries = [
            self._entries(self.classes[name], weight, slots)
            for name, weight in rank_weights.items()
            if weight
        ]
        if weights_of_sockets is not None:
            entries += self._socket_entries(weights_of_sockets, slots)
        for name, weight in (switch_weights or {}).items():
            if weight:
                entries.append(self._switch_entries(self.classes[name], weight, slots))
        indices, inverse = np.unique(np.concatenate([entry[0] for entry in entries]), return_inverse=True)
        weights = np.zeros(len(indices))
        np.add.at(weights, inverse, np.concatenate([entry[1] for entry in entries]))
        return ResourceUsage(indices, weights)

    def _entries(self, resource: ResourceClass, weight: float, slots: Ints) -> tuple[Ints, Floats]:
        """Indices and weights when every slot puts `weight` on the resource that belongs to it."""
        resources_of_slots = {
            "rank": lambda slot: slot,
            "node": self.topology.node_of,
            "switch": self.topology.switch_of,
        }
        numbers, counts = np.unique(resources_of_slots[resource.scope](slots), return_counts=True)
        return resource.first + numbers, counts.astype(np.float64) * weight

    def _switch_entries(self, resource: ResourceClass, weight: float, slots: Ints) -> tuple[Ints, Floats]:
        """Indices and weights when every slot distributes `weight` over all PCIe switches of its node."""
        switches = self.topology.switches_per_node
        nodes, counts = np.unique(self.topology.node_of(slots), return_counts=True)
        indices = resource.first + (nodes[:, None] * switches + np.arange(switches)).ravel()
        return indices, np.repeat(weight / switches * counts, switches)

    def _socket_entries(
        self, weights_of_sockets: Callable[[Sockets], Mapping[str, Shares]], slots: Ints
    ) -> list[tuple[Ints, Floats]]:
        """Indices and weights of the resources that every slot uses on the sockets of its node."""
        cluster = self.topology.cluster
        count = cluster.host.sockets
        numbers, members = np.unique(self.topology.socket_of(slots), return_counts=True)
        entries = []
        for socket in range(count):
            is_on_socket = numbers % count == socket
            for name, weights in weights_of_sockets(sockets_of(cluster, socket)).items():
                if name not in self.classes or not is_on_socket.any():
                    continue
                sockets = (numbers[is_on_socket] // count * count)[:, None] + np.arange(count)
                amounts = members[is_on_socket][:, None] * np.asarray(weights, dtype=np.float64)
                is_used = amounts.ravel() > 0
                entries.append(
                    (self.classes[name].first + sockets.ravel()[is_used], amounts.ravel()[is_used])
                )
        return entries


Shares = Sequence[float]  # part of something on each socket, in order


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets of a node, as seen by the ranks of one of them (`local`)."""

    count: int
    local: int
    placement: str
    is_bound: bool

    @property
    def gpu(self) -> Shares:
        """Where the rank's GPU is attached."""
        return self._single(self.local)

    @property
    def memory(self) -> Shares:
        """Where the rank's host memory is."""
        if self.placement == "first":
            return self._single(0)
        return self.interleaved if self.placement == "interleaved" else self._single(self.local)

    @property
    def threads(self) -> Shares:
        """Where the rank's CPU threads run."""
        return self._single(self.local) if self.is_bound else self.interleaved

    @property
    def interleaved(self) -> Shares:
        """Evenly over all sockets, like a stripe over drives."""
        return [1.0 / self.count] * self.count

    def _single(self, socket: int) -> Shares:
        return [float(number == socket) for number in range(self.count)]


def sockets_of(cluster: Cluster, local: int) -> Sockets:
    """The sockets of a cluster's node for ranks on socket `local`."""
    return Sockets(cluster.host.sockets, local, cluster.offload.placement, cluster.offload.bound)


def outgoing_bytes(source: Shares, target: Shares) -> list[float]:
    """Bytes that leave each socket when one byte goes from `source` to `target`."""
    return [share * (1.0 - target[number]) for number, share in enumerate(source)]


def crossings(source: Shares, target: Shares) -> dict[str, list[float]]:
    """Weights on each socket's links, out and in, of one byte from `source` to `target`."""
    return {"socket_out": outgoing_bytes(source, target), "socket_in": outgoing_bytes(target, source)}
