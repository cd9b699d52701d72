"""Links of nodes of several types, relative to the links of the first type.

All nodes of a fabric are connected in the same way, and their links differ in rates and latencies. A link of
another type has the capacity of the first type's times a fraction, which may be above 1. If a node has
another number of cards, they are combined: it counts as having the first type's number of cards, which share
the bandwidth of its real ones. A longer latency than the first type's is added to every message over the
link. A shorter one is not subtracted.
"""

from __future__ import annotations

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.cluster import Cluster, NodeType
from zsim.specs.topology.node_links import Condition, LinkClass, NodeLinks

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
            "simulated "
            "here yet; expected a cluster of one of them"
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
        types_of_links = _types_of_links(topology.cluster, links, num_nodes)
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


def _types_of_links(cluster: Cluster, links: LinkClass, num_nodes: int) -> Ints:
    """Per link of a class of node links, the type of its node."""
    return np.repeat(cluster.node_type_indices, links.count // num_nodes)


def combine_conditions(first: Condition | None, fractions: Floats, delays: Floats) -> tuple[Floats, Floats]:
    """`fractions` and `delays` of faults, combined with those of the condition `first`."""
    return (fractions, delays) if first is None else (fractions * first.fractions, delays + first.delays)
