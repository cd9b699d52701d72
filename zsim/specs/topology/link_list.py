"""A fabric as an explicit list of links. Traffic takes all shortest paths evenly, or those that a hash
chooses.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.errors import InputError
from zsim.specs.cluster.network import Network
from zsim.specs.topology.wiring import Cards, Inventory, Links, Path, View, hashed_path, weighted_count

_NODE = re.compile(r"^node([0-9]{1,9})(?:\.nic([0-9]{1,9}))?$")
_MAX_PATHS = 64


class LinkList:
    """Switches and cables, listed one by one.

    A card is connected to the switch that its cable names, or else to that of its node's cable. If a node has
    several switches, its cards are connected to them in turn.
    """

    planes = 1

    def __init__(self, network: Network, cards: Cards, where: str) -> None:
        self.network = network
        self.cards = cards
        self._ports: dict[int, str] = {}
        self._node_ports: dict[int, list[str]] = {}
        self._trunks: list[tuple[str, str, float, str, int]] = []
        for number, cable in enumerate(network.links):
            ends = cable.source_end, cable.target_end
            nodes = [end for end in ends if _NODE.match(end)]
            if len(nodes) == 2 or ends[0] == ends[1]:
                raise InputError(f"{where}.links.{number}: a link must join a switch with something else")
            if nodes:
                switch = ends[0] if nodes[0] == ends[1] else ends[1]
                self._connect(nodes[0], switch)
            else:
                self._trunks.append((*ends, cable.bandwidth * cable.count, cable.tier, cable.count))
        for nic in range(cards.count):
            if nic not in self._ports and nic // cards.per_node not in self._node_ports:
                raise InputError(
                    f"{where}.links: no link for card {nic % cards.per_node} of node{nic // cards.per_node}; "
                    "every node needs one (or one for each of its cards)"
                )
        self._neighbours: dict[str, list[tuple[str, tuple[str, int]]]] = {}
        self._classes: dict[str, list[tuple[str, str, float]]] = {}
        for source, target, bandwidth, tier, _count in self._trunks:
            for start_switch, end_switch in ((source, target), (target, source)):
                name = f"{tier} {bandwidth / 1e9:g} GB/s"
                members = self._classes.setdefault(name, [])
                self._neighbours.setdefault(start_switch, []).append((end_switch, (name, len(members))))
                members.append((start_switch, end_switch, bandwidth))
        self._tiers = {f"{tier} {rate / 1e9:g} GB/s": tier for _, _, rate, tier, _ in self._trunks}
        self._path_cache: dict[tuple[str, str], list[Path]] = {}
        first = self.port(0, 0)
        for nic in range(1, cards.count):
            self._shortest_paths(first, self.port(nic, 0), where)

    def _connect(self, end: str, switch: str) -> None:
        match = _NODE.match(end)
        assert match is not None
        node = int(match[1])
        if match[2] is None:
            self._node_ports.setdefault(node, []).append(switch)
        else:
            self._ports[node * self.cards.per_node + int(match[2])] = switch

    def links(self) -> Sequence[Links]:
        efficiency = self.network.efficiency
        return [
            Links(name, self._tiers[name], len(members), members[0][2], efficiency)
            for name, members in self._classes.items()
        ]

    def port(self, nic: int, plane: int) -> str:
        if nic in self._ports:
            return self._ports[nic]
        node, card = divmod(nic, self.cards.per_node)
        switches = self._node_ports[node]
        return switches[card % len(switches)]

    def ends(self, name: str, position: int) -> tuple[str, str]:
        return self._classes[name][position][:2]

    def _shortest_paths(self, source: str, target: str, where: str = "network") -> list[Path]:
        """All shortest paths between two switches (at most 64), in the order of the list of links."""
        cached_paths = self._path_cache.get((source, target))
        if cached_paths is not None:
            return cached_paths
        distance = {target: 0}
        queue = deque([target])
        while queue:
            switch = queue.popleft()
            for neighbour, _link in self._neighbours.get(switch, ()):
                if neighbour not in distance:
                    distance[neighbour] = distance[switch] + 1
                    queue.append(neighbour)
        if source not in distance:
            raise InputError(f"{where}.links: there is no way from '{source}' to '{target}'")
        paths: list[tuple[str, Path]] = [(source, [])]
        for _ in range(distance[source]):
            paths = [
                (neighbour, [*path, link])
                for switch, path in paths
                for neighbour, link in self._neighbours[switch]
                if distance[neighbour] == distance[switch] - 1
            ][:_MAX_PATHS]
        self._path_cache[source, target] = [path for _, path in paths]
        return self._path_cache[source, target]

    def paths(self, source: int, target: int) -> list[tuple[float, int, Path]]:
        shortest_paths = self._shortest_paths(self.port(source, 0), self.port(target, 0))
        if self.network.routing == "hash":
            flows = self.network.flows_per_pair
            pair = np.array([source]), np.array([target])
            path_indices = [
                int(hashed_path(self.network, *pair, flow, len(shortest_paths))[0]) for flow in range(flows)
            ]
            return [(1 / flows, 0, shortest_paths[path]) for path in path_indices]
        return [(1 / len(shortest_paths), 0, path) for path in shortest_paths]

    def plane_shares(self, sources: Ints, targets: Ints) -> Floats | None:
        return None

    def add_usage(self, view: View, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        pairs, inverse = np.unique(np.stack([sources, targets]), axis=1, return_inverse=True)
        totals = weighted_count(inverse.ravel(), amount, pairs.shape[1])
        for source, target, total in zip(*pairs.tolist(), totals.tolist(), strict=True):
            for share, _plane, path in self.paths(source, target):
                for name, position in path:
                    view(name)[position] += share * total

    def gather(self, view: View, sources: Ints, targets: Ints, is_peak: bool) -> Floats:
        pairs, inverse = np.unique(np.stack([sources, targets]), axis=1, return_inverse=True)
        values = []
        for pair in zip(*pairs.tolist(), strict=True):
            path_values = [
                (share, sum(float(view(name)[position]) for name, position in path))
                for share, _, path in self.paths(*pair)
            ]
            values.append(
                max(value for _, value in path_values)
                if is_peak
                else sum(weight * value for weight, value in path_values)
            )
        return np.array(values, dtype=np.float64)[inverse.ravel()]

    def inventory(self) -> Inventory:
        ports_in_use: dict[str, int] = {}
        cables: dict[str, int] = {"card": self.cards.count}
        for nic in range(self.cards.count):
            ports_in_use[self.port(nic, 0)] = ports_in_use.get(self.port(nic, 0), 0) + 1
        for source, target, _bandwidth, tier, count in self._trunks:
            cables[tier] = cables.get(tier, 0) + count
            for end in (source, target):
                ports_in_use[end] = ports_in_use.get(end, 0) + count
        return Inventory(dict.fromkeys(ports_in_use, 1), ports_in_use, cables)
