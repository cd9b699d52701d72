"""Where bytes can flow: devices, directed links and routes of a cluster.

Links are numbered arithmetically from the node template, so that a route is a formula and the links of
16,384 GPUs cost a few arrays; `graph()` gives the same thing as a networkx graph, and tests hold every route
to be a shortest path in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zsim.specs.hardware import Cluster

if TYPE_CHECKING:
    import networkx

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinkClass:
    """All links of one kind and direction: `count` links numbered from `first`.

    `tier` is what people call it in a report; `bandwidth` the data sheet's figure per link and direction,
    `capacity` the part of it that large transfers get, both in bytes per second.
    """

    name: str
    tier: str
    first: int
    count: int
    bandwidth: float
    capacity: float


class Topology:
    """`num_nodes` identical nodes of `cluster`, `gpus_per_node` GPUs used on each.

    Ranks are numbered node by node: rank = node * gpus_per_node + GPU of the node.
    """

    def __init__(self, cluster: Cluster, num_nodes: int, gpus_per_node: int) -> None:
        self.cluster = cluster
        self.num_nodes = num_nodes
        self.gpus_per_node = gpus_per_node
        self.world_size = num_nodes * gpus_per_node
        self.switches_per_node = -(-gpus_per_node // cluster.pcie.gpus_per_switch)
        self.classes: dict[str, LinkClass] = {}
        self.num_links = 0
        link, pcie, nic = cluster.node_link, cluster.pcie, cluster.nic
        ranks = self.world_size
        if link.kind == "switch":
            self._add("nvlink_out", "nvlink", ranks, link.bandwidth, link.efficiency)
            self._add("nvlink_in", "nvlink", ranks, link.bandwidth, link.efficiency)
        elif link.kind == "mesh":
            peers = max(cluster.gpus_per_node - 1, 1)
            pairs = ranks * gpus_per_node
            self._add("nvlink_direct", "nvlink", pairs, link.bandwidth / peers, link.efficiency)
        self._add("pcie_up", "pcie", ranks, pcie.bandwidth, pcie.efficiency)
        self._add("pcie_down", "pcie", ranks, pcie.bandwidth, pcie.efficiency)
        switches = num_nodes * self.switches_per_node
        self._add("uplink_up", "pcie uplink", switches, pcie.bandwidth, pcie.efficiency)
        self._add("uplink_down", "pcie uplink", switches, pcie.bandwidth, pcie.efficiency)
        self._add("nic_out", "network", num_nodes * nic.per_node, nic.bandwidth, nic.efficiency)
        self._add("nic_in", "network", num_nodes * nic.per_node, nic.bandwidth, nic.efficiency)

    def _add(self, name: str, tier: str, count: int, bandwidth: float, efficiency: float) -> None:
        self.classes[name] = LinkClass(name, tier, self.num_links, count, bandwidth, bandwidth * efficiency)
        self.num_links += count

    def capacities(self) -> Floats:
        """Bytes per second of every link."""
        return np.concatenate([np.full(c.count, c.capacity) for c in self.classes.values()])

    def node_of(self, ranks: Ints) -> Ints:
        return ranks // self.gpus_per_node

    def add_routes(self, usage: Floats, sources: Ints, targets: Ints, amount: float) -> None:
        """Add `amount` to `usage` on every link of the route of each (source, target) pair of ranks."""
        is_local = self.node_of(sources) == self.node_of(targets)
        for links in self._local_links(sources[is_local], targets[is_local]):
            np.add.at(usage, links, amount)
        for links in self._remote_links(sources[~is_local], targets[~is_local]):
            np.add.at(usage, links, amount)

    def route(self, source: int, target: int) -> list[int]:
        """Link numbers from rank to rank, in the order the bytes pass them."""
        pair = np.array([source]), np.array([target])
        is_local = source // self.gpus_per_node == target // self.gpus_per_node
        columns = self._local_links(*pair) if is_local else self._remote_links(*pair)
        return [int(links[0]) for links in columns if len(links)]

    def _local_links(self, sources: Ints, targets: Ints) -> list[Ints]:
        first = {name: link_class.first for name, link_class in self.classes.items()}
        kind = self.cluster.node_link.kind
        if kind == "switch":
            return [first["nvlink_out"] + sources, first["nvlink_in"] + targets]
        if kind == "mesh":
            return [first["nvlink_direct"] + sources * self.gpus_per_node + targets % self.gpus_per_node]
        source_switch, target_switch = self._switch_of(sources), self._switch_of(targets)
        crosses = source_switch != target_switch
        if not self.cluster.pcie.peer_to_peer:
            crosses = np.ones_like(crosses)  # staged through host memory, even under one switch
        return [
            first["pcie_up"] + sources,
            first["uplink_up"] + source_switch[crosses],
            first["uplink_down"] + target_switch[crosses],
            first["pcie_down"] + targets,
        ]

    def _remote_links(self, sources: Ints, targets: Ints) -> list[Ints]:
        first = {name: link_class.first for name, link_class in self.classes.items()}
        staged = slice(0, 0) if self.cluster.nic.gpudirect else slice(None)
        return [
            first["pcie_up"] + sources,
            first["uplink_up"] + self._switch_of(sources)[staged],
            first["nic_out"] + self._nic_of(sources),
            first["nic_in"] + self._nic_of(targets),
            first["uplink_down"] + self._switch_of(targets)[staged],
            first["pcie_down"] + targets,
        ]

    def _switch_of(self, ranks: Ints) -> Ints:
        local = ranks % self.gpus_per_node // self.cluster.pcie.gpus_per_switch
        return self.node_of(ranks) * self.switches_per_node + local

    def _nic_of(self, ranks: Ints) -> Ints:
        nics = self.cluster.nic.per_node
        return self.node_of(ranks) * nics + ranks % self.gpus_per_node * nics // self.cluster.gpus_per_node

    def class_of(self, link: int) -> LinkClass:
        for link_class in self.classes.values():
            if link < link_class.first + link_class.count:
                return link_class
        raise IndexError(link)

    def graph(self) -> networkx.DiGraph[str]:
        """The same devices and links as a directed graph; edges carry `link`, `tier` and `capacity`."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        for name, link_class in self.classes.items():
            for position in range(link_class.count):
                ends = self._ends(name, position)
                if ends is not None:
                    number = link_class.first + position
                    graph.add_edge(*ends, link=number, tier=link_class.tier, capacity=link_class.capacity)
        for nic in range(self.classes["nic_out"].count):
            host_side = self._nic_host_side(nic)
            graph.add_edge(host_side, f"nic{nic}")
            graph.add_edge(f"nic{nic}", host_side)
        return graph

    def _nic_host_side(self, nic: int) -> str:
        """The PCIe switch a card sits under, or the host where bytes are staged in host memory."""
        nics = self.cluster.nic.per_node
        node, local = divmod(nic, nics)
        if not self.cluster.nic.gpudirect:
            return f"host{node}"
        local_gpu = min(-(-local * self.cluster.gpus_per_node // nics), self.gpus_per_node - 1)
        return f"pcie{node * self.switches_per_node + local_gpu // self.cluster.pcie.gpus_per_switch}"

    def _ends(self, name: str, position: int) -> tuple[str, str] | None:
        """The devices that link `position` of a class joins (None for a mesh link to oneself)."""
        gpus = self.gpus_per_node
        if name in ("nvlink_out", "nvlink_in"):
            ends = f"gpu{position}", f"nvswitch{position // gpus}"
            return ends if name == "nvlink_out" else ends[::-1]
        if name == "nvlink_direct":
            source, local_target = divmod(position, gpus)
            target = source // gpus * gpus + local_target
            return None if source == target else (f"gpu{source}", f"gpu{target}")
        if name in ("pcie_up", "pcie_down"):
            ends = f"gpu{position}", f"pcie{int(self._switch_of(np.array([position]))[0])}"
            return ends if name == "pcie_up" else ends[::-1]
        if name in ("uplink_up", "uplink_down"):
            ends = f"pcie{position}", f"host{position // self.switches_per_node}"
            return ends if name == "uplink_up" else ends[::-1]
        ends = f"nic{position}", "network"
        return ends if name == "nic_out" else ends[::-1]
