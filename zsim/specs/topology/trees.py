"""Fabrics with levels of switches: single switch, two- and three-level trees, rails, planes.

Numbering, with n1 uplinks of a leaf and n2 uplinks of a middle switch, in every plane:

    leaf_up      leaf (planes n1) + plane n1 + i              leaf -> spine i (of its pod, with 3 levels)
    core_up      pod (planes n1 n2) + plane n1 n2 + i n2 + j        spine i of a pod -> core (i, j)

leaf_down and core_down are numbered likewise, in the other direction. A leaf holds `nodes_per_leaf` nodes
with all their cards or, if rail-optimized, one rail of them.

Sources of the shapes: C. Leiserson, Fat-trees (1985). Al-Fares et al., A scalable, commodity data center
network architecture (SIGCOMM 2008). NVIDIA DGX SuperPOD reference architecture, "Compute fabric" (rails).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zsim.arrays import Ints
from zsim.errors import InputError
from zsim.specs.cluster.network import Network
from zsim.specs.presets import topology_preset_names
from zsim.specs.topology.wiring import Cards, Hop, HopWiring, Inventory, Links


class SingleSwitch(HopWiring):
    """One switch that never blocks, with as many ports as there are cards."""

    def __init__(self, network: Network, cards: Cards, where: str) -> None:
        super().__init__(network)
        self.cards = cards
        _check_ports(where, "switch", cards.count, network)

    def links(self) -> Sequence[Links]:
        return ()

    def hops(self, sources: Ints, targets: Ints) -> list[Hop]:
        return []

    def port(self, nic: int, plane: int) -> str:
        return "network"

    def ends(self, name: str, position: int) -> tuple[str, str]:
        raise AssertionError("one switch has no links to others")

    def inventory(self) -> Inventory:
        return Inventory({"switch": 1}, {"switch": self.cards.count}, {"card": self.cards.count})


class Tree(HopWiring):
    """Two or three levels of switches. A leaf connects a group of nodes, or one rail of a group of nodes."""

    def __init__(self, network: Network, cards: Cards, where: str) -> None:
        super().__init__(network)
        self.cards = cards
        self.planes = network.planes
        self.has_rails = network.kind == "rail-optimized"
        self.rails = cards.per_node if self.has_rails else 1
        self.nodes_per_leaf = network.nodes_per_leaf
        blocks = -(-cards.num_nodes // self.nodes_per_leaf)  # leaves of one rail
        self.num_leaves = blocks * self.rails
        self.down_ports = self.nodes_per_leaf * cards.per_node // self.rails
        port = cards.bandwidth / self.planes
        self.link_bandwidth = network.link_bandwidth or port
        down = self.down_ports * port
        self.uplinks = _whole_uplinks(where, down / network.oversubscription / self.link_bandwidth)
        self.has_core = network.levels == 3
        self.leaves_per_pod = (
            network.leaves_per_pod * self.rails if self.has_core else max(self.num_leaves, 1)
        )
        self.num_pods = -(-self.num_leaves // self.leaves_per_pod)
        core_links = self.leaves_per_pod / network.spine_oversubscription if self.has_core else 1.0
        self.core_uplinks = max(round(core_links), 1)
        # 192 leaves at 7:1 give 27.4 uplinks: 27 links, each slightly faster.
        self.core_bandwidth = self.link_bandwidth * core_links / self.core_uplinks
        self.num_paths = self.planes * self.uplinks * self.core_uplinks
        _check_ports(where, "leaf", self.down_ports + self.uplinks, network)
        middle = min(self.leaves_per_pod, self.num_leaves)
        _check_ports(where, "spine", middle + (self.core_uplinks if self.has_core else 0), network)
        if self.has_core:
            _check_ports(where, "core", self.num_pods, network)

    def links(self) -> Sequence[Links]:
        ups = self.num_leaves * self.planes * self.uplinks
        bandwidth, efficiency = self.link_bandwidth, self.network.efficiency
        links = [Links(name, "leaf-spine", ups, bandwidth, efficiency) for name in ("leaf_up", "leaf_down")]
        if self.has_core:
            cores, bandwidth = self.num_pods * self.num_paths, self.core_bandwidth
            links += [Links(n, "spine-core", cores, bandwidth, efficiency) for n in ("core_up", "core_down")]
        return links

    def leaf_of(self, nics: Ints) -> Ints:
        node, card = nics // self.cards.per_node, nics % self.cards.per_node
        return node // self.nodes_per_leaf * self.rails + (card if self.has_rails else 0)

    def hops(self, sources: Ints, targets: Ints) -> list[Hop]:
        source, target = self.leaf_of(sources), self.leaf_of(targets)
        leaves = source != target
        width = self.planes * self.uplinks
        hops = [Hop("leaf_up", source[leaves], width, leaves)]
        if self.has_core:
            source_pod, target_pod = source // self.leaves_per_pod, target // self.leaves_per_pod
            pods = source_pod != target_pod
            hops.append(Hop("core_up", source_pod[pods], self.num_paths, pods))
            hops.append(Hop("core_down", target_pod[pods], self.num_paths, pods))
        return [*hops, Hop("leaf_down", target[leaves], width, leaves)]

    def port(self, nic: int, plane: int) -> str:
        return self._name("leaf", int(self.leaf_of(np.array([nic]))[0]), plane)

    def _name(self, role: str, number: int | str, plane: int) -> str:
        return f"{role}{number}" if self.planes == 1 else f"plane{plane}.{role}{number}"

    def ends(self, name: str, position: int) -> tuple[str, str]:
        if name in ("leaf_up", "leaf_down"):
            leaf, remainder = divmod(position, self.planes * self.uplinks)
            plane, spine = divmod(remainder, self.uplinks)
            pod = leaf // self.leaves_per_pod
            spine_name: int | str = f"{pod}.{spine}" if self.has_core else spine
            ends = self._name("leaf", leaf, plane), self._name("spine", spine_name, plane)
            return ends if name == "leaf_up" else ends[::-1]
        pod, remainder = divmod(position, self.num_paths)
        plane, remainder = divmod(remainder, self.uplinks * self.core_uplinks)
        spine, core = divmod(remainder, self.core_uplinks)
        ends = self._name("spine", f"{pod}.{spine}", plane), self._name("core", f"{spine}.{core}", plane)
        return ends if name == "core_up" else ends[::-1]

    def inventory(self) -> Inventory:
        planes, leaves, uplinks = self.planes, self.num_leaves, self.uplinks
        if leaves == 1:
            return Inventory({"leaf": planes}, {"leaf": self.down_ports}, {"card": self.cards.count * planes})
        switches = {"leaf": leaves * planes}
        ports = {"leaf": self.down_ports + uplinks}
        cables = {"card": self.cards.count * planes, "leaf-spine": leaves * planes * uplinks}
        if self.has_core and self.num_pods > 1:
            pods = self.num_pods
            spine_ports = self.leaves_per_pod + self.core_uplinks
            switches["spine"], ports["spine"] = self._pack_switches(pods * uplinks * planes, spine_ports)
            cores = uplinks * self.core_uplinks * planes
            switches["core"], ports["core"] = self._pack_switches(cores, pods)
            cables["spine-core"] = pods * self.num_paths
        else:
            switches["spine"], ports["spine"] = self._pack_switches(uplinks * planes, leaves)
        return Inventory(switches, ports, cables)

    def _pack_switches(self, count: int, ports: int) -> tuple[int, int]:
        """(switches, ports of each) after several small switches are packed into one large one (parallel
        cables).
        """
        per_switch = max((self.network.switch_ports or ports) // ports, 1)
        return -(-count // per_switch), ports * min(per_switch, count)


def _whole_uplinks(where: str, links: float) -> int:
    """`links` as an integer. Raises InputError unless it is a whole number, up to rounding."""
    count = round(links)
    if count < 1 or abs(links - count) > 1e-6 * count:
        raise InputError(
            f"{where}: oversubscription leaves {links:.4g} uplinks for a switch; expected a whole number, so "
            "change it, the nodes of a leaf or link_bandwidth"
        )
    return count


def _larger_fabric_hint(where: str) -> str:
    """End of an error text: how to get room for more leaves than two levels have.

    `where` begins with the cluster's name. Some clusters ship a preset with a third level.
    """
    name = where.partition(":")[0].partition(",")[0]
    preset = f"{name}-3-level"
    if preset in topology_preset_names():
        return f"; expected fewer nodes, or the cluster '{preset}', which is {name} with levels = 3"
    return "; expected fewer nodes, or levels = 3"


def _check_ports(where: str, role: str, num_ports: int, network: Network) -> None:
    if network.switch_ports is not None and num_ports > network.switch_ports:
        hint = _larger_fabric_hint(where) if role == "spine" and network.levels == 2 else ""
        raise InputError(
            f"{where}: a {role} needs {num_ports} ports, but switch_ports is {network.switch_ports}{hint}"
        )
