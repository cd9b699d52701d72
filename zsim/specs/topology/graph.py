"""A topology as a networkx graph, and its connectivity and bisection bandwidth.

Devices are `gpu7` (a rank), `nvswitch0` (of a domain), `pcie3`, `host1`, `nic12`, and the fabric's switches.
Edges carry `link` (its number), `tier`, `capacity` in bytes per second and `length`: 1, but 3 for a
dragonfly's global links (minimal routing uses one of them at most) and 0 for a card in its slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import networkx

    from zsim.specs.topology.topology import Topology

_GLOBAL = "global"


def topology_graph(topology: Topology) -> networkx.DiGraph[str]:
    """The graph of devices and directed links. Parallel links of two devices are one edge with `links`."""
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for name, link_class in topology.classes.items():
        length = 3 if link_class.tier == _GLOBAL else 1
        for position in range(link_class.count):
            ends = link_ends(topology, name, position)
            if ends is None:
                continue
            number = link_class.first + position
            if graph.has_edge(*ends):
                graph.edges[ends]["capacity"] += link_class.capacity
                graph.edges[ends]["links"].append(number)
                continue
            graph.add_edge(
                *ends,
                link=number,
                links=[number],
                tier=link_class.tier,
                capacity=link_class.capacity,
                length=length,
            )
    for nic in range(topology.num_nodes * topology.cluster.nic.per_node):
        host_side = _nic_host_side(topology, nic)
        graph.add_edge(host_side, f"nic{nic}", length=0)
        graph.add_edge(f"nic{nic}", host_side, length=0)
    return graph


def bisection_bandwidth(topology: Topology) -> float:
    """Bytes per second, in one direction, from the first half of the nodes to the second.

    It is the maximum flow over cards and switches, so at most what the nodes' cards can send. Equal nodes are
    divided in the order of their numbers, as jobs are placed. 0 for one node.
    """
    import networkx

    if topology.num_nodes < 2:
        return 0.0
    graph: networkx.DiGraph[str] = networkx.DiGraph()

    def add(source: str, target: str, capacity: float) -> None:
        if graph.has_edge(source, target):
            graph.edges[source, target]["capacity"] += capacity
        else:
            graph.add_edge(source, target, capacity=capacity)

    half = topology.num_nodes // 2
    cards, planes = topology.cluster.nic.per_node, topology.wiring.planes
    for name, link_class in topology.classes.items():
        if name in ("nic_out", "nic_in"):
            for port in range(link_class.count):
                nic, plane = divmod(port, planes)
                switch = topology.wiring.port(nic, plane)
                if name == "nic_out" and nic // cards < half:
                    add("first half", switch, link_class.capacity)
                elif name == "nic_in" and nic // cards >= half:
                    add(switch, "second half", link_class.capacity)
        elif link_class.first >= topology.classes["nic_out"].first:
            for position in range(link_class.count):
                source, target = topology.wiring.ends(name, position)
                if source != target:
                    add(source, target, link_class.capacity)
    return float(networkx.maximum_flow_value(graph, "first half", "second half"))


def is_connected(topology: Topology) -> bool:
    """Whether every GPU can reach every other GPU over the graph."""
    import networkx

    graph = topology_graph(topology)
    gpus = [device for device in graph if device.startswith("gpu")]
    descendants = networkx.descendants(graph, gpus[0]) | {gpus[0]}
    ancestors = networkx.ancestors(graph, gpus[0]) | {gpus[0]}
    return all(gpu in descendants and gpu in ancestors for gpu in gpus)


def _nic_host_side(topology: Topology, nic: int) -> str:
    """The PCIe switch that a card is under, or the host."""
    cluster = topology.cluster
    node, local = divmod(nic, cluster.nic.per_node)
    if cluster.nic.attached == "host":
        return f"host{node}"
    local_gpu = min(-(-local * cluster.gpus_per_node // cluster.nic.per_node), topology.gpus_per_node - 1)
    return f"pcie{node * topology.switches_per_node + local_gpu // cluster.pcie.gpus_per_switch}"


def link_ends(topology: Topology, name: str, position: int) -> tuple[str, str] | None:
    """The two devices that link `position` of a class connects. None for a mesh link of a GPU to itself."""
    gpus = topology.gpus_per_node
    if name in ("nvlink_out", "nvlink_in"):
        ends = f"gpu{position}", f"nvswitch{position // topology.ranks_per_domain}"
        return ends if name == "nvlink_out" else ends[::-1]
    if name == "nvlink_direct":
        source, local_target = divmod(position, gpus)
        target = source // gpus * gpus + local_target
        return None if source == target else (f"gpu{source}", f"gpu{target}")
    if name in ("pcie_up", "pcie_down"):
        ends = f"gpu{position}", f"pcie{int(topology.switch_of(np.array([position]))[0])}"
        return ends if name == "pcie_up" else ends[::-1]
    if name in ("c2c_up", "c2c_down"):
        ends = f"gpu{position}", f"host{position // gpus}"
        return ends if name == "c2c_up" else ends[::-1]
    if name in ("uplink_up", "uplink_down"):
        ends = f"pcie{position}", f"host{position // topology.switches_per_node}"
        return ends if name == "uplink_up" else ends[::-1]
    if name in ("nic_out", "nic_in"):
        nic, plane = divmod(position, topology.wiring.planes)
        ends = f"nic{nic}", topology.wiring.port(nic, plane)
        return ends if name == "nic_out" else ends[::-1]
    source_switch, target_switch = topology.wiring.ends(name, position)
    return None if source_switch == target_switch else (source_switch, target_switch)
