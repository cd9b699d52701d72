"""Devices, directed links and routes of a cluster: where bytes can flow.

Links are numbered arithmetically from the node template, so that a route is a formula and the links of 16,384
GPUs cost a few arrays. `topology_graph` gives the same as a networkx graph, and tests check that every route
is a shortest path in it. A `Wiring` (zsim.specs.topology.wiring) connects the nodes.

# [Note: ranks and slots]
A slot is a GPU's position in the fabric: node * gpus_per_node + GPU of the node. Links and routes are defined
between slots, and `slots[rank]` is the slot of a job's rank. A job that fills its fabric has rank r on slot
r. The slots of a job on scattered or uneven nodes, or of a co-located job, are arbitrary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.link_list import LinkList
from zsim.specs.topology.node_links import (
    Condition,
    LinkClass,
    NodeLinks,
    check_node_count,
    condition_of_types,
)
from zsim.specs.topology.trees import SingleSwitch, Tree
from zsim.specs.topology.wiring import Cards, Hop, HopWiring, Inventory, Links, Wiring, weighted_count


class Topology(NodeLinks):
    """`num_nodes` nodes of `cluster`, with `gpus_per_node` GPUs used on each.

    `slots` holds the slot of each rank, see [Note: ranks and slots]. A *domain* is a set of GPUs that NVLink
    connects: a node, or several nodes under a switched NVLink domain. `condition` describes faults, and links
    of types of nodes other than the first. It is None if there are neither.

    Raises InputError if the nodes do not fit the network's description, or their number is not the one that
    the cluster lists.
    """

    def __init__(
        self, cluster: Cluster, num_nodes: int, gpus_per_node: int, slots: Ints | None = None
    ) -> None:
        self.cluster = cluster
        self.num_nodes = num_nodes
        self.gpus_per_node = gpus_per_node
        self.num_slots = num_nodes * gpus_per_node
        self.slots: Ints = np.arange(self.num_slots) if slots is None else slots
        self.condition: Condition | None = None
        link = cluster.node_link
        self.nodes_per_domain = link.segment(num_nodes) if slots is None else link.nodes_per_domain
        self.ranks_per_domain = gpus_per_node * self.nodes_per_domain
        self.switches_per_node = -(-gpus_per_node // cluster.pcie.gpus_per_switch)
        self.wiring = make_wiring(cluster, num_nodes)
        self.classes: dict[str, LinkClass] = {}
        self.num_links = 0
        pcie, nic = cluster.pcie, cluster.nic
        ranks = self.num_slots
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
        if (c2c := cluster.c2c) is not None:
            self._add("c2c_up", "c2c", ranks, c2c.bandwidth, c2c.from_gpu_efficiency)
            self._add("c2c_down", "c2c", ranks, c2c.bandwidth, c2c.to_gpu_efficiency)
        planes = self.wiring.planes
        ports = num_nodes * nic.per_node * planes
        self._add("nic_out", "network", ports, nic.bandwidth / planes, nic.efficiency)
        self._add("nic_in", "network", ports, nic.bandwidth / planes, nic.efficiency)
        for links in self.wiring.links():
            self._add(links.name, links.tier, links.count, links.bandwidth, links.efficiency)
        if cluster.nodes:
            check_node_count(cluster, num_nodes)
            self.condition = condition_of_types(self, num_nodes, self.num_links)

    def _add(self, name: str, tier: str, count: int, bandwidth: float, efficiency: float) -> None:
        self.classes[name] = LinkClass(name, tier, self.num_links, count, bandwidth, bandwidth * efficiency)
        self.num_links += count

    @property
    def world_size(self) -> int:
        return len(self.slots)

    def replace_slots(self, slots: Ints) -> Topology:
        """The same fabric with the ranks of another job."""
        topology = copy.copy(self)
        topology.slots = slots
        return topology

    def apply_condition(self, condition: Condition) -> Topology:
        """The same fabric with the faults of `condition`."""
        topology = copy.copy(self)
        topology.condition = condition
        return topology

    @property
    def route_key(self) -> Hashable:
        """The facts that the links of routes depend on. They are equal for fabrics that differ only in their
        rates.

        None for a fabric with faults.
        """
        if self.condition is not None:
            return None
        cluster, network = self.cluster, self.cluster.network
        link, pcie, cards = cluster.node_link, cluster.pcie, cluster.nic
        return (
            (self.num_nodes, self.gpus_per_node, self.slots.tobytes()),
            (cluster.gpus_per_node, cluster.host.sockets, link.kind, self.nodes_per_domain),
            (pcie.gpus_per_switch, pcie.peer_to_peer),
            (cards.per_node, cards.gpudirect, cards.attached),
            (network.model_dump_json(), 1.0 if network.link_bandwidth is None else cards.bandwidth),
            tuple(
                (link_class.name, link_class.first, link_class.count) for link_class in self.classes.values()
            ),
        )

    def capacities(self) -> Floats:
        """Bytes per second of every link."""
        capacities = np.concatenate([np.full(c.count, c.capacity) for c in self.classes.values()])
        return capacities if self.condition is None else capacities * self.condition.fractions

    def leaves_node(self) -> Bools:
        """Per link, whether it is a network card's or one between switches."""
        leaves_node = np.ones(self.num_links, dtype=np.bool_)
        leaves_node[: self.classes["nic_out"].first] = False
        return leaves_node

    def inventory(self) -> Inventory:
        """Switches, ports and cables between the nodes."""
        return self.wiring.inventory()

    # -- routes -------------------------------------------------------------------------------------

    def add_routes(self, usage: Floats, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        """Add `amount` (one for all, or one per pair) to `usage` on every link of the route of each (source,
        target) pair of slots."""
        if not len(sources):
            return
        is_local = self.domain_of(sources) == self.domain_of(targets)
        local, far = _split(amount, is_local)
        _count_links(usage, self.local_links(sources[is_local], targets[is_local]), local)
        sources, targets = sources[~is_local], targets[~is_local]
        if not len(sources):
            return
        _count_links(usage, self.links_to_nic(sources), far)
        _count_links(usage, self.links_from_nic(targets), far)
        cards = self.nic_of(sources), self.nic_of(targets)
        self._add_ports(usage, *cards, far)
        self.wiring.add_usage(lambda name: self._view(usage, name), *cards, far)

    def add_links(self, usage: Floats, name: str, slots: Ints, amount: float | Floats) -> None:
        """Add `amount` to the link of each slot in the class `name` (a class with one link per slot)."""
        usage[self.classes[name].first + slots] += amount

    def gather_routes(self, values: Floats, sources: Ints, targets: Ints, *, is_peak: bool = False) -> Floats:
        """Per pair of slots, the sum of `values` over the links of its route, each times the share of the
        pair's bytes on it.

        It is the reverse of `add_routes`. With `is_peak`, the maximum over parallel links replaces their
        mean.
        """
        totals = np.zeros(len(sources))
        is_local = self.domain_of(sources) == self.domain_of(targets)
        totals[is_local] = _sum_links(values, self.local_links(sources[is_local], targets[is_local]))
        sources, targets = sources[~is_local], targets[~is_local]
        if len(sources):
            cards = self.nic_of(sources), self.nic_of(targets)
            columns = [*self.links_to_nic(sources), *self.links_from_nic(targets)]
            ports = self._gather_ports(values, *cards, is_peak)
            fabric_values = self.wiring.gather(lambda name: self._view(values, name), *cards, is_peak)
            totals[~is_local] = _sum_links(values, columns) + ports + fabric_values
        return totals

    def _add_ports(self, usage: Floats, sources: Ints, targets: Ints, amount: float | Floats) -> None:
        planes = self.wiring.planes
        shares = self.wiring.plane_shares(sources, targets)
        for name, cards in (("nic_out", sources), ("nic_in", targets)):
            ports = self._view(usage, name).reshape(-1, planes)
            for plane in range(planes):
                weights = amount / planes if shares is None else shares[:, plane] * amount
                ports[:, plane] += weighted_count(cards, weights, len(ports))

    def _gather_ports(self, values: Floats, sources: Ints, targets: Ints, is_peak: bool) -> Floats:
        planes = self.wiring.planes
        shares = self.wiring.plane_shares(sources, targets)
        totals = np.zeros(len(sources))
        for name, cards in (("nic_out", sources), ("nic_in", targets)):
            ports = self._view(values, name).reshape(-1, planes)[cards]
            if is_peak:
                totals += ports.max(axis=1)
            else:
                totals += ports.mean(axis=1) if shares is None else (ports * shares).sum(axis=1)
        return totals

    def _view(self, usage: Floats, name: str) -> Floats:
        link_class = self.classes[name]
        return usage[link_class.first : link_class.first + link_class.count]

    def paths(self, source: int, target: int) -> list[tuple[float, list[int]]]:
        """The routes from slot to slot: share of the bytes, and link indices in order."""
        pair = np.array([source]), np.array([target])
        if source // self.ranks_per_domain == target // self.ranks_per_domain:
            return [(1.0, _first_links(self.local_links(*pair)))]
        routes = []
        cards = int(self.nic_of(pair[0])[0]), int(self.nic_of(pair[1])[0])
        planes = self.wiring.planes
        first_out, first_in = (self.classes[name].first for name in ("nic_out", "nic_in"))
        source_links, target_links = (
            _first_links(self.links_to_nic(pair[0])),
            _first_links(self.links_from_nic(pair[1])),
        )
        for share, plane, path in self.wiring.paths(*cards):
            middle = [self.classes[name].first + position for name, position in path]
            ports = first_out + cards[0] * planes + plane, first_in + cards[1] * planes + plane
            routes.append((share, [*source_links, ports[0], *middle, ports[1], *target_links]))
        return routes

    def route(self, source: int, target: int) -> list[int]:
        """The first route from slot to slot."""
        return self.paths(source, target)[0][1]

    def class_of(self, link: int) -> LinkClass:
        for link_class in self.classes.values():
            if link < link_class.first + link_class.count:
                return link_class
        raise IndexError(link)


def _split(amount: float | Floats, is_first: Bools) -> tuple[float | Floats, float | Floats]:
    if isinstance(amount, np.ndarray):
        return amount[is_first], amount[~is_first]
    return amount, amount


def _first_links(columns: list[Ints]) -> list[int]:
    return [int(links[0]) for links in columns if len(links) and links[0] >= 0]


def _count_links(usage: Floats, columns: list[Ints], amount: float | Floats) -> None:
    for column in columns:
        links, weights = column, amount
        is_used = links >= 0
        if not is_used.all():
            links, (weights, _) = links[is_used], _split(amount, is_used)
        if len(links):
            low = int(links.min())
            counts = weighted_count(links - low, weights, int(links.max()) - low + 1)
            usage[low : low + len(counts)] += counts


def _sum_links(values: Floats, columns: list[Ints]) -> Floats:
    sums = np.zeros(len(columns[0]))
    for links in columns:
        sums += np.where(links >= 0, values[links], 0.0)  # -1: no link
    return sums


def make_wiring(cluster: Cluster, num_nodes: int) -> Wiring:
    """The fabric of `num_nodes` nodes that a cluster's `[network]` describes.

    Raises InputError if the numbers of the description do not fit together.
    """
    kinds: dict[str, Callable[[Network, Cards, str], Wiring]] = {
        "single-switch": SingleSwitch,
        "fat-tree": Tree,
        "rail-optimized": Tree,
        "dragonfly": Dragonfly,
        "torus": Torus,
        "links": LinkList,
    }
    cards = Cards(num_nodes, cluster.nic.per_node, cluster.nic.bandwidth)
    return kinds[cluster.network.kind](cluster.network, cards, f"{cluster.name}: network")


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
