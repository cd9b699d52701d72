"""Fabrics without levels: dragonfly and torus."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zsim.arrays import Ints
from zsim.errors import InputError
from zsim.specs.cluster.network import Network
from zsim.specs.topology.wiring import Cards, Hop, HopWiring, Inventory, Links


class Dragonfly(HopWiring):
    """Groups of a routers that are all connected within a group. A trunk of m cables connects every two
    groups.

    Minimal routing goes to the router that holds the trunk to the target's group, over the trunk, and to the
    target's router. With h global ports per router and g groups, m is the largest divisor of h up to a h / (g
    - 1).

    Source: Kim, Dally, Scott, Abts, Technology-driven, highly-scalable dragonfly topology (ISCA 2008).
    """

    def __init__(self, network: Network, cards: Cards, where: str) -> None:
        super().__init__(network)
        self.cards = cards
        self.routers = network.routers_per_group
        self.nodes_per_router = network.nodes_per_router
        self.groups = -(-cards.num_nodes // (self.nodes_per_router * self.routers))
        h = network.global_links_per_router
        max_trunk_cables = self.routers * h // max(self.groups - 1, 1)
        if max_trunk_cables < 1:
            raise InputError(
                f"{where}: {self.groups} groups of {self.routers} routers with {h} global links each cannot "
                f"all be joined; expected at most {self.routers * h + 1} groups"
            )
        self.trunk = max(m for m in range(1, h + 1) if h % m == 0 and m <= max_trunk_cables)
        self.trunks_per_router = h // self.trunk
        self.bandwidth = network.link_bandwidth or cards.bandwidth
        self.ports = self.nodes_per_router * cards.per_node + self.routers - 1 + h
        if network.switch_ports is not None and self.ports > network.switch_ports:
            raise InputError(
                f"{where}: a router needs {self.ports} ports, but switch_ports is {network.switch_ports}"
            )

    def links(self) -> Sequence[Links]:
        local = self.groups * self.routers * self.routers
        efficiency = self.network.efficiency
        return [
            Links("local", "group", local, self.bandwidth, efficiency),
            Links("global", "global", self.groups * self.groups, self.bandwidth * self.trunk, efficiency),
        ]

    def _router(self, nics: Ints) -> Ints:
        return nics // (self.cards.per_node * self.nodes_per_router)

    def _gateway(self, group: Ints, target_group: Ints) -> Ints:
        """Index within `group` of the router that holds the trunk to `target_group`."""
        return (target_group - group - 1) % max(self.groups, 1) // self.trunks_per_router

    def hops(self, sources: Ints, targets: Ints) -> list[Hop]:
        source, target = self._router(sources), self._router(targets)
        a = self.routers
        source_group, target_group = source // a, target // a
        is_far = source_group != target_group
        exit_router = np.where(is_far, self._gateway(source_group, target_group), target % a)
        entry_router = np.where(is_far, self._gateway(target_group, source_group), target % a)
        first = source % a != exit_router
        last = entry_router != target % a
        return [
            Hop("local", (source * a + exit_router)[first], 1, first),
            Hop("global", (source_group * self.groups + target_group)[is_far], 1, is_far),
            Hop("local", ((target_group * a + entry_router) * a + target % a)[last], 1, last),
        ]

    def port(self, nic: int, plane: int) -> str:
        return f"router{nic // (self.cards.per_node * self.nodes_per_router)}"

    def ends(self, name: str, position: int) -> tuple[str, str]:
        if name == "local":
            source, local_target = divmod(position, self.routers)
            return f"router{source}", f"router{source // self.routers * self.routers + local_target}"
        source, target = divmod(position, self.groups)
        source_group, target_group = np.array([source]), np.array([target])
        return (
            f"router{source * self.routers + int(self._gateway(source_group, target_group)[0])}",
            f"router{target * self.routers + int(self._gateway(target_group, source_group)[0])}",
        )

    def inventory(self) -> Inventory:
        routers = self.groups * self.routers
        cables = {
            "card": self.cards.count,
            "group": routers * (self.routers - 1) // 2,
            "global": self.groups * (self.groups - 1) // 2 * self.trunk,
        }
        return Inventory({"router": routers}, {"router": self.ports}, cables)


class Torus(HopWiring):
    """A router per node, in a ring along each of two or three dimensions.

    Routes go dimension by dimension, the short way round, and upwards if both ways are equally long.
    """

    def __init__(self, network: Network, cards: Cards, where: str) -> None:
        super().__init__(network)
        self.cards = cards
        self.shape = network.shape
        room = math.prod(self.shape)
        if cards.num_nodes > room:
            raise InputError(
                f"{where}: {cards.num_nodes} nodes do not fit on a torus of "
                f"{' x '.join(map(str, self.shape))}"
            )
        self.num_routers = room
        self.bandwidth = network.link_bandwidth or cards.bandwidth

    def links(self) -> Sequence[Links]:
        bandwidth, efficiency = self.bandwidth, self.network.efficiency
        names = [f"{'xyz'[d]}_{sign}" for d in range(len(self.shape)) for sign in ("up", "down")]
        return [Links(name, f"torus {name[0]}", self.num_routers, bandwidth, efficiency) for name in names]

    def hops(self, sources: Ints, targets: Ints) -> list[Hop]:
        router_index, target = sources // self.cards.per_node, targets // self.cards.per_node
        hops: list[Hop] = []
        stride = 1
        for dimension, size in enumerate(self.shape):
            coordinate, target_coordinate = router_index // stride % size, target // stride % size
            distance_up = (target_coordinate - coordinate) % size
            goes_up = distance_up <= size - distance_up
            distance = np.where(goes_up, distance_up, size - distance_up)
            for step in range(int(distance.max(initial=0))):
                for name, is_chosen, sign in (("up", goes_up, 1), ("down", ~goes_up, -1)):
                    mask = is_chosen & (distance > step)
                    step_coordinate = (coordinate + sign * step) % size
                    router = router_index + (step_coordinate - coordinate) * stride
                    hops.append(Hop(f"{'xyz'[dimension]}_{name}", router[mask], 1, mask))
            router_index = router_index + (target_coordinate - coordinate) * stride
            stride *= size
        return hops

    def port(self, nic: int, plane: int) -> str:
        return f"router{nic // self.cards.per_node}"

    def ends(self, name: str, position: int) -> tuple[str, str]:
        dimension, sign = "xyz".index(name[0]), 1 if name.endswith("_up") else -1
        stride, size = math.prod(self.shape[:dimension]), self.shape[dimension]
        coordinate = position // stride % size
        return f"router{position}", f"router{position + ((coordinate + sign) % size - coordinate) * stride}"

    def inventory(self) -> Inventory:
        sizes = [size for size in self.shape if size > 1]
        cables = {"card": self.cards.count}
        for dimension, size in enumerate(self.shape):
            if size > 1:  # a ring of two has two cables between its two routers, one each way of "up"
                cables[f"torus {'xyz'[dimension]}"] = self.num_routers
        ports = self.cards.per_node + 2 * len(sizes)
        return Inventory({"router": self.num_routers}, {"router": ports}, cables)
