"""Where bytes can flow: devices, directed links and routes of a cluster.

Links are numbered arithmetically from the node template, so that a route is a formula and the links of
16,384 GPUs cost a few arrays; `graph()` gives the same thing as a networkx graph, and tests hold every route
to be a shortest path in it. What joins the nodes is a `Wiring` (zsim.specs.wiring).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zsim.specs.generators import make_wiring
from zsim.specs.hardware import Cluster
from zsim.specs.wiring import Inventory

if TYPE_CHECKING:
    import networkx

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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

    Ranks are numbered node by node: rank = node * gpus_per_node + GPU of the node. A *domain* is what NVLink
    joins: a node, or several where a switched NVLink domain is larger. Raises InputError when the nodes do
    not fit the network's description.
    """

    def __init__(self, cluster: Cluster, num_nodes: int, gpus_per_node: int) -> None:
        self.cluster = cluster
        self.num_nodes = num_nodes
        self.gpus_per_node = gpus_per_node
        self.world_size = num_nodes * gpus_per_node
        self.ranks_per_domain = gpus_per_node * cluster.node_link.nodes_per_domain
        self.switches_per_node = -(-gpus_per_node // cluster.pcie.gpus_per_switch)
        self.wiring = make_wiring(cluster, num_nodes)
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
        planes = self.wiring.planes
        ports = num_nodes * nic.per_node * planes
        self._add("nic_out", "network", ports, nic.bandwidth / planes, nic.efficiency)
        self._add("nic_in", "network", ports, nic.bandwidth / planes, nic.efficiency)
        for links in self.wiring.links():
            self._add(links.name, links.tier, links.count, links.bandwidth, links.efficiency)

    def _add(self, name: str, tier: str, count: int, bandwidth: float, efficiency: float) -> None:
        self.classes[name] = LinkClass(name, tier, self.num_links, count, bandwidth, bandwidth * efficiency)
        self.num_links += count

    def capacities(self) -> Floats:
        """Bytes per second of every link."""
        return np.concatenate([np.full(c.count, c.capacity) for c in self.classes.values()])

    def leaves_node(self) -> Bools:
        """For every link, whether it is a card's or one between switches."""
        first = self.classes["nic_out"].first
        return np.arange(self.num_links) >= first

    def inventory(self) -> Inventory:
        """Switches, ports and cables between the nodes."""
        return self.wiring.inventory()

    def node_of(self, ranks: Ints) -> Ints:
        return ranks // self.gpus_per_node

    def domain_of(self, ranks: Ints) -> Ints:
        """The NVLink domain of each rank: its node, or the group of nodes that share NVLink switches."""
        return ranks // self.ranks_per_domain

    def nic_of(self, ranks: Ints) -> Ints:
        """The network card that each rank uses."""
        nics = self.cluster.nic.per_node
        return self.node_of(ranks) * nics + ranks % self.gpus_per_node * nics // self.cluster.gpus_per_node

    def add_routes(self, usage: Floats, sources: Ints, targets: Ints, amount: float) -> None:
        """Add `amount` to `usage` on every link of the route of each (source, target) pair of ranks."""
        is_local = self.domain_of(sources) == self.domain_of(targets)
        _count_links(usage, self._local_links(sources[is_local], targets[is_local]), amount)
        sources, targets = sources[~is_local], targets[~is_local]
        if not len(sources):
            return
        _count_links(usage, self._to_nic(sources), amount)
        _count_links(usage, self._from_nic(targets), amount)
        cards = self.nic_of(sources), self.nic_of(targets)
        self._add_ports(usage, *cards, amount)
        self.wiring.add_usage(lambda name: self._view(usage, name), *cards, amount)

    def _add_ports(self, usage: Floats, sources: Ints, targets: Ints, amount: float) -> None:
        planes = self.wiring.planes
        shares = self.wiring.plane_shares(sources, targets)
        for name, cards in (("nic_out", sources), ("nic_in", targets)):
            ports = self._view(usage, name).reshape(-1, planes)
            for plane in range(planes):
                weights = None if shares is None else shares[:, plane]
                count = np.bincount(cards, weights=weights, minlength=len(ports))
                ports[:, plane] += count * (amount if shares is not None else amount / planes)

    def _view(self, usage: Floats, name: str) -> Floats:
        link_class = self.classes[name]
        return usage[link_class.first : link_class.first + link_class.count]

    def paths(self, source: int, target: int) -> list[tuple[float, list[int]]]:
        """The routes from rank to rank: share of the bytes, link numbers in the order they are passed."""
        pair = np.array([source]), np.array([target])
        if source // self.ranks_per_domain == target // self.ranks_per_domain:
            return [(1.0, [int(links[0]) for links in self._local_links(*pair) if len(links)])]
        ways = []
        cards = int(self.nic_of(pair[0])[0]), int(self.nic_of(pair[1])[0])
        planes = self.wiring.planes
        out, into = (self.classes[name].first for name in ("nic_out", "nic_in"))
        before = [int(links[0]) for links in self._to_nic(pair[0]) if len(links)]
        after = [int(links[0]) for links in self._from_nic(pair[1]) if len(links)]
        for share, plane, path in self.wiring.paths(*cards):
            middle = [self.classes[name].first + position for name, position in path]
            ports = out + cards[0] * planes + plane, into + cards[1] * planes + plane
            ways.append((share, [*before, ports[0], *middle, ports[1], *after]))
        return ways

    def route(self, source: int, target: int) -> list[int]:
        """The first of the routes from rank to rank."""
        return self.paths(source, target)[0][1]

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

    def _to_nic(self, ranks: Ints) -> list[Ints]:
        staged = slice(0, 0) if self.cluster.nic.gpudirect else slice(None)
        up, uplink = self.classes["pcie_up"].first, self.classes["uplink_up"].first
        return [up + ranks, uplink + self._switch_of(ranks)[staged]]

    def _from_nic(self, ranks: Ints) -> list[Ints]:
        staged = slice(0, 0) if self.cluster.nic.gpudirect else slice(None)
        down, uplink = self.classes["pcie_down"].first, self.classes["uplink_down"].first
        return [uplink + self._switch_of(ranks)[staged], down + ranks]

    def _switch_of(self, ranks: Ints) -> Ints:
        local = ranks % self.gpus_per_node // self.cluster.pcie.gpus_per_switch
        return self.node_of(ranks) * self.switches_per_node + local

    def class_of(self, link: int) -> LinkClass:
        for link_class in self.classes.values():
            if link < link_class.first + link_class.count:
                return link_class
        raise IndexError(link)

    def graph(self) -> networkx.DiGraph[str]:
        """The same devices and links as a directed graph (`zsim.specs.topology_graph`)."""
        from zsim.specs.topology_graph import topology_graph

        return topology_graph(self)


def _count_links(usage: Floats, columns: list[Ints], amount: float) -> None:
    for links in columns:
        if len(links):
            low = int(links.min())
            counts = np.bincount(links - low)
            usage[low : low + len(counts)] += counts * amount
