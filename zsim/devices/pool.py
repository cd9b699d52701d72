"""The resources of nodes besides their links: memory bandwidth, cores, drives, and queues of their own.

They are numbered after the links of the topology, so that one activity can use both; a `Usage` is what one
unit of work takes of which of them. Folded, one activity stands for all ranks and carries the load of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from zsim.specs.topology import Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Scope = Literal["rank", "switch", "node"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Units of resource `indices[i]` that one unit of work takes: `weights[i]`."""

    indices: Ints
    weights: Floats


@dataclass(frozen=True, slots=True)
class ResourceClass:
    """`count` resources of one kind, numbered from `first`; one per rank, per PCIe switch or per node.

    `capacity` is per second: bytes, or 1 for a queue or for the time of a drive.
    """

    name: str
    scope: Scope
    first: int
    count: int
    capacity: float


class NodePool:
    """All resources that offloaded work of a topology's ranks can use, by name."""

    def __init__(self, topology: Topology, *, is_folded: bool) -> None:
        self.topology = topology
        self.is_folded = is_folded
        self.classes: dict[str, ResourceClass] = {}
        scopes: dict[str, Scope] = {
            "pcie_up": "rank", "pcie_down": "rank", "uplink_up": "switch", "uplink_down": "switch",
        }  # fmt: skip
        for name, scope in scopes.items():
            link = topology.classes[name]
            self.classes[name] = ResourceClass(name, scope, link.first, link.count, link.capacity)
        self._capacities: list[Floats] = []
        self._next = topology.num_links
        pcie = topology.cluster.pcie
        self._per_switch = pcie.gpus_per_switch
        self._switches = topology.switches_per_node

    def add(self, name: str, scope: Scope, capacity: float) -> None:
        """Add one resource per rank or per node."""
        count = self.topology.world_size if scope == "rank" else self.topology.num_nodes
        self.classes[name] = ResourceClass(name, scope, self._next, count, capacity)
        self._capacities.append(np.full(count, capacity))
        self._next += count

    @property
    def capacities(self) -> Floats:
        """Per added resource, in order: they follow the topology's links."""
        return np.concatenate(self._capacities) if self._capacities else np.zeros(0)

    def usage(self, rank: int, own: dict[str, float], spread: dict[str, float] | None = None) -> Usage:
        """What one unit of work of `rank` takes (of every rank, when folded; `rank` is then ignored).

        `own` is {resource: weight} on the rank's own link, switch and node; `spread` the same over all
        switches of its node, evenly.
        """
        parts = [self._entries(self.classes[name], weight, rank) for name, weight in own.items() if weight]
        for name, weight in (spread or {}).items():
            if weight:
                parts.append(self._spread(self.classes[name], weight, rank))
        indices, inverse = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
        weights = np.zeros(len(indices))
        np.add.at(weights, inverse, np.concatenate([part[1] for part in parts]))
        return Usage(indices, weights)

    def _entries(self, resource: ResourceClass, weight: float, rank: int) -> tuple[Ints, Floats]:
        topology = self.topology
        if not self.is_folded:
            place = {"rank": rank, "node": rank // topology.gpus_per_node, "switch": self._switch(rank)}
            return np.array([resource.first + place[resource.scope]]), np.array([weight])
        indices = resource.first + np.arange(resource.count)
        if resource.scope == "rank":
            return indices, np.full(resource.count, weight)
        if resource.scope == "node":
            return indices, np.full(resource.count, weight * topology.gpus_per_node)
        members = np.minimum(
            topology.gpus_per_node - np.arange(self._switches) * self._per_switch, self._per_switch
        )
        return indices, weight * np.tile(members, topology.num_nodes).astype(np.float64)

    def _spread(self, resource: ResourceClass, weight: float, rank: int) -> tuple[Ints, Floats]:
        each = weight / self._switches
        if self.is_folded:
            indices = resource.first + np.arange(resource.count)
            return indices, np.full(resource.count, each * self.topology.gpus_per_node)
        first = resource.first + rank // self.topology.gpus_per_node * self._switches
        return first + np.arange(self._switches), np.full(self._switches, each)

    def _switch(self, rank: int) -> int:
        node, local = divmod(rank, self.topology.gpus_per_node)
        return node * self._switches + local // self._per_switch
