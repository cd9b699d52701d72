"""The links inside a node, over which bytes pass between a GPU and another GPU or a network card.

# [Note: nodes of several types]
All nodes of a fabric are connected in the same way, and their links differ in rates and latencies. A link of
another type has the capacity of the first type's times a fraction, which may be above 1. If a node has
another number of cards, they are combined: it counts as having the first type's number of cards, which share
the bandwidth of its real ones. A longer latency than the first type's is added to every message over the
link. A shorter one is not subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.cluster import Cluster, NodeType


@dataclass(frozen=True, slots=True)
class LinkClass:
    """All links of one kind and direction, numbered consecutively."""

    name: str
    tier: str
    """Name of the kind of link in reports."""
    first: int
    """Number of the first link."""
    count: int
    bandwidth: float
    """Bytes per second of one link in one direction, as the data sheet says."""
    capacity: float
    """Bytes per second of one link that large transfers reach."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Faults of a fabric."""

    fractions: Floats
    """Per link, the fraction of its capacity that is left."""
    delays: Floats
    """Per link, the seconds added to a message."""
    carriers: Ints
    """Per network card, the card of the node that carries its traffic. It is the card itself unless that is
    dead.
    """


class NodeLinks:
    """Slots and links inside the nodes of a topology."""

    cluster: Cluster
    gpus_per_node: int
    ranks_per_domain: int
    switches_per_node: int
    classes: dict[str, LinkClass]
    """The classes of links by name."""
    condition: Condition | None

    def node_of(self, slots: Ints) -> Ints:
        return slots // self.gpus_per_node

    def domain_of(self, slots: Ints) -> Ints:
        """The NVLink domain of each slot: its node, or the group of nodes that share NVLink switches."""
        return slots // self.ranks_per_domain

    def nearest_card_of(self, slots: Ints) -> Ints:
        """The network card nearest to each slot."""
        nics, gpus = self.cluster.nic.per_node, self.cluster.gpus_per_node
        if nics == gpus == self.gpus_per_node:
            return slots  # divisions of all slots of a large fabric take long
        return self.node_of(slots) * nics + slots % self.gpus_per_node * nics // gpus

    def nic_of(self, slots: Ints) -> Ints:
        """The network card that each slot uses. It is the nearest, or another card of the node if that one is
        dead.
        """
        cards = self.nearest_card_of(slots)
        return cards if self.condition is None else self.condition.carriers[cards]

    def local_links(self, sources: Ints, targets: Ints) -> list[Ints]:
        """Columns of links, with one entry per pair. An entry is -1 where a pair has no link."""
        first = {name: link_class.first for name, link_class in self.classes.items()}
        kind = self.cluster.node_link.kind
        if kind == "switch":
            return [first["nvlink_out"] + sources, first["nvlink_in"] + targets]
        if kind == "mesh":
            return [first["nvlink_direct"] + sources * self.gpus_per_node + targets % self.gpus_per_node]
        source_switch, target_switch = self.switch_of(sources), self.switch_of(targets)
        crosses = source_switch != target_switch
        if not self.cluster.pcie.peer_to_peer:
            crosses = np.ones_like(crosses)  # staged through host memory, even under one switch
        return [
            first["pcie_up"] + sources,
            np.where(crosses, first["uplink_up"] + source_switch, -1),
            np.where(crosses, first["uplink_down"] + target_switch, -1),
            first["pcie_down"] + targets,
        ]

    def links_to_nic(self, slots: Ints) -> list[Ints]:
        return self._card_links(slots, "nvlink_out", "nvlink_in", "pcie_up", "uplink_up", "uplink_down")

    def links_from_nic(self, slots: Ints) -> list[Ints]:
        columns = self._card_links(slots, "nvlink_in", "nvlink_out", "pcie_down", "uplink_down", "uplink_up")
        return columns[::-1]

    def _card_links(
        self, slots: Ints, near: str, far: str, pcie: str, uplink: str, other_uplink: str
    ) -> list[Ints]:
        """Links between slots and the cards that they use, from the GPU's side.

        # [Note: staged bytes]
        Without GPUDirect the GPU copies into the host's memory, from which the card reads. A card under the
        GPUs' switches reads over its own switch's uplink, which carries the bytes that a GPU there sends up
        and down again. So a port with traffic in both directions gets half (NCCL's authors,
        github.com/NVIDIA/nccl/issues/638).

        # [Note: another GPU's card]
        A GPU whose nearest card is dead reaches another card over NVLink and through the GPU nearest to that
        card (PXN, NCCL 2.12). Without an NVLink switch it goes through the host, over both PCIe switches'
        uplinks.
        """
        first = {name: self.classes[name].first for name in (pcie, uplink, other_uplink)}
        cards = self.cluster.nic
        leaves, returns = not cards.gpudirect or cards.attached == "host", self.copies_twice
        up = [first[uplink] + self.switch_of(slots)] if leaves else []
        down = [first[other_uplink] + self._card_switch_of(slots)] if returns else []
        if self.condition is None or (self.nic_of(slots) == self.nearest_card_of(slots)).all():
            return [first[pcie] + slots, *up, *down]
        proxies = self._proxies(slots)
        moves = proxies != slots
        proxy_switches = self.switch_of(proxies)
        if self.cluster.node_link.kind == "switch":
            return [
                np.where(moves, self.classes[near].first + slots, -1),
                np.where(moves, self.classes[far].first + proxies, -1),
                first[pcie] + proxies,
                np.where(leaves, first[uplink] + proxy_switches, -1),
                *down,
            ]
        switch = self.switch_of(slots)
        crosses = moves & (proxy_switches != switch)
        return [
            first[pcie] + slots,
            np.where(crosses | leaves, first[uplink] + switch, -1),
            np.where(
                returns | (crosses & (not leaves)), first[other_uplink] + self._card_switch_of(slots), -1
            ),
        ]

    @property
    def copies_twice(self) -> bool:
        """Whether bytes cross two PCIe uplinks on their way to a card. See [Note: staged bytes]."""
        cards = self.cluster.nic
        return not cards.gpudirect and cards.attached == "switch"

    def is_under_card(self, slots: Ints) -> Bools:
        """Whether each slot's PCIe switch is that of the card that it uses."""
        is_same_switch: Bools = self.switch_of(slots) == self._card_switch_of(slots)
        return is_same_switch

    def _card_switch_of(self, slots: Ints) -> Ints:
        """The PCIe switch of the GPU nearest to the card that each slot uses."""
        return self.switch_of(self.node_of(slots) * self.gpus_per_node + self._nearest_to_card(slots))

    def _nearest_to_card(self, slots: Ints) -> Ints:
        """The GPU of the node that is nearest to the card that each slot uses."""
        nics, gpus = self.cluster.nic.per_node, self.cluster.gpus_per_node
        return np.minimum(-(-(self.nic_of(slots) % nics) * gpus // nics), self.gpus_per_node - 1)

    def _proxies(self, slots: Ints) -> Ints:
        """The slot nearest to the card that each slot uses. It is the slot itself unless its nearest card is
        dead.
        """
        card_slots = self.node_of(slots) * self.gpus_per_node + self._nearest_to_card(slots)
        return np.where(self.nic_of(slots) == self.nearest_card_of(slots), slots, card_slots)

    def switch_of(self, slots: Ints) -> Ints:
        """The PCIe switch of each slot."""
        local = slots % self.gpus_per_node // self.cluster.pcie.gpus_per_switch
        return self.node_of(slots) * self.switches_per_node + local

    def socket_of(self, slots: Ints) -> Ints:
        """The socket that each slot's GPU is attached to. A node's GPUs are divided evenly among its sockets,
        in order.
        """
        sockets = self.cluster.host.sockets
        local = slots % self.gpus_per_node * sockets // self.cluster.gpus_per_node
        return self.node_of(slots) * sockets + local


_NVLINK = ("nvlink_out", "nvlink_in", "nvlink_direct")
_PCIE = ("pcie_up", "pcie_down", "uplink_up", "uplink_down")
_CARDS = ("nic_out", "nic_in")


def check_node_count(cluster: Cluster, num_nodes: int) -> None:
    """Raises InputError if a cluster that lists its nodes has another number of them."""
    if cluster.nodes and num_nodes != len(cluster.node_type_indices):
        raise InputError(f"nodes: found {num_nodes:,}, but {listed_nodes(cluster)}; expected as many")


def listed_nodes(cluster: Cluster) -> str:
    """`cluster 'x' has 4 nodes (2 h100-sxm-80gb, 2 a100-sxm-80gb)`."""
    counts = ", ".join(f"{node_type.count:,} {node_type.name}" for node_type in cluster.nodes)
    return f"cluster '{cluster.name}' has {len(cluster.node_type_indices):,} nodes ({counts})"


def require_identical_nodes(cluster: Cluster, subject: str) -> None:
    """Raises NotSimulatedError, beginning with `subject`, for a cluster with nodes of several types."""
    if cluster.nodes:
        names = ", ".join(dict.fromkeys(node_type.name for node_type in cluster.nodes))
        raise NotSimulatedError(
            f"{subject}: cluster '{cluster.name}' has nodes of several types ({names}), which is not "
            "simulated here yet; expected a cluster of one of them"
        )


def condition_of_types(topology: NodeLinks, num_nodes: int, num_links: int) -> Condition | None:
    """The capacities and latencies of the links of a cluster with several types of nodes, relative to the
    first type's.

    None where all nodes are identical or their types differ only in their GPU.
    """
    types = topology.cluster.nodes
    cards = topology.cluster.nic.per_node
    if all(_rates(node_type) == _rates(types[0]) for node_type in types[1:]):
        return None
    fractions, delays = np.ones(num_links), np.zeros(num_links)
    for name, rates in (*((n, 0) for n in _NVLINK), *((n, 1) for n in _PCIE), *((n, 2) for n in _CARDS)):
        links = topology.classes.get(name)
        if links is None or not links.count:
            continue
        first = _rates(types[0])[rates]
        type_rates = [_rates(node_type)[rates] for node_type in types]
        types_of_links = np.repeat(topology.cluster.node_type_indices, links.count // num_nodes)
        inside = slice(links.first, links.first + links.count)
        speeds = [rate / first[0] if first[0] else 1.0 for rate, _ in type_rates]
        fractions[inside] = np.array(speeds)[types_of_links]
        extra_latencies = [
            max(latency - first[1], 0.0) / 2 for _, latency in type_rates
        ]  # half at either end of a route
        if name in _PCIE:
            extra_latencies = [0.0] * len(
                extra_latencies
            )  # copies have the latency of [pcie]; routes that end at cards have theirs
        delays[inside] = np.array(extra_latencies)[types_of_links]
    return Condition(fractions, delays, np.arange(num_nodes * cards))


def _rates(node_type: NodeType) -> tuple[tuple[float, float], ...]:
    """(bytes per second of large transfers, latency) of NVLink, PCIe and all cards of a node."""
    link, pcie, nic = node_type.node_link, node_type.pcie, node_type.nic
    return (
        (link.bandwidth * link.efficiency, link.latency),
        (pcie.bandwidth * pcie.efficiency, pcie.latency),
        (nic.per_node * nic.bandwidth * nic.efficiency, nic.latency),
    )


def combine_conditions(first: Condition | None, fractions: Floats, delays: Floats) -> tuple[Floats, Floats]:
    """`fractions` and `delays` of faults, combined with those of the condition `first`."""
    return (fractions, delays) if first is None else (fractions * first.fractions, delays + first.delays)
