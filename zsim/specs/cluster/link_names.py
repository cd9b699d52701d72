"""Links by the names that people use for them.

    node3.nic2           a network card's link, both ways (all its planes)
    node3                all cards of a node
    node3.gpu5.nvlink    a GPU's NVLink (.pcie: its PCIe link, .c2c: its C2C link)
    node3.pcie1          the uplink of a PCIe switch to the host
    leaf0-spine1         the cable between two switches, both ways
    leaf0                all cables of a switch to other switches
    nvlink, leaf-spine   a whole tier (nic_out, leaf_up: one direction of it)

`zsim topology show` lists the tiers, and the switches of each role (leaf0, leaf1, ... spine0, ...).
"""

from __future__ import annotations

import re

import numpy as np

from zsim.arrays import Ints
from zsim.errors import InputError, did_you_mean
from zsim.specs.topology.topology import Topology

NODE = re.compile(r"^node([0-9]{1,9})(?:\.(.+))?$")
_PART = re.compile(r"^(nic|gpu|pcie)([0-9]{1,9})(?:\.(nvlink|pcie|c2c))?$")
_MAX_OPTIONS = 2000  # names searched for the nearest
_FORMS = "expected a name like 'node3.nic2', 'node3.gpu5.nvlink', 'leaf0-spine1', or a tier like"


def find_links(topology: Topology, name: str, where: str) -> Ints:
    """Indices of the links called `name`. Raises InputError, beginning with `where`, if there are none."""
    match = NODE.match(name)
    if match is not None:
        return _node_links(topology, int(match[1]), match[2], where)
    members = [c for c in topology.classes.values() if name in (c.name, c.tier)]
    if members:
        return np.concatenate([np.arange(c.first, c.first + c.count) for c in members])
    cables = _switch_cables(topology)
    end_pairs = {(name, name)} | {
        (name[:dash], name[dash + 1 :]) for dash in range(1, len(name)) if name[dash] == "-"
    }
    links_of_cables = [
        link
        for (source, target), links in cables.items()
        if {(source, target), (target, source), (source, source), (target, target)} & end_pairs
        for link in links
    ]
    if links_of_cables:
        return np.array(sorted(links_of_cables), dtype=np.int64)
    tiers = list(dict.fromkeys(c.tier for c in topology.classes.values()))
    switches = {end for ends in cables for end in ends}
    pairs = [f"{source}-{target}" for source, target in list(cables)[:_MAX_OPTIONS]]
    options = [*topology.classes, *tiers, *sorted(switches)[:_MAX_OPTIONS], *pairs]
    hint = did_you_mean(name, options) or f"; {_FORMS} '{tiers[0]}'"
    raise InputError(f"{where}: no such link{hint}")


def find_node(topology: Topology, number: int, where: str) -> int:
    """`number`, if the fabric has that node. Otherwise raises InputError."""
    if number >= topology.num_nodes:
        raise InputError(f"{where}: the fabric has node0 to node{topology.num_nodes - 1}, not node{number}")
    return number


def find_card(topology: Topology, name: str, where: str) -> int:
    """Index of the network card called `node3.nic2`."""
    match = re.match(r"^node(\d+)\.nic(\d+)$", name)
    if match is None:
        raise InputError(f"{where}: found '{name}', expected a card's name like 'node3.nic2'")
    node, card = find_node(topology, int(match[1]), where), int(match[2])
    _check_index(card, topology.cluster.nic.per_node, "nic", where)
    return node * topology.cluster.nic.per_node + card


def _node_links(topology: Topology, number: int, part: str | None, where: str) -> Ints:
    node, nics, planes = (
        find_node(topology, number, where),
        topology.cluster.nic.per_node,
        topology.wiring.planes,
    )
    if part is None:
        ports = np.arange(node * nics * planes, (node + 1) * nics * planes)
        return _link_indices(topology, ("nic_out", "nic_in"), ports)
    match = _PART.match(part)
    if match is None or (match[1] == "gpu") == (match[3] is None):
        options = ["nic0", "gpu0.nvlink", "gpu0.pcie", "pcie0"]
        raise InputError(
            f"{where}: a node has no '{part}'{did_you_mean(part, options)}; expected one of "
            f"{', '.join(options)} (or another number)"
        )
    index = int(match[2])
    if match[1] == "nic":
        _check_index(index, nics, "nic", where)
        return _link_indices(
            topology, ("nic_out", "nic_in"), (node * nics + index) * planes + np.arange(planes)
        )
    if match[1] == "pcie":
        _check_index(index, topology.switches_per_node, "pcie", where)
        switch = np.array([node * topology.switches_per_node + index])
        return _link_indices(topology, ("uplink_up", "uplink_down"), switch)
    _check_index(index, topology.gpus_per_node, "gpu", where)
    slot = node * topology.gpus_per_node + index
    if match[3] == "c2c" and "c2c_up" not in topology.classes:
        raise InputError(f"{where}: the GPUs of '{topology.cluster.name}' have no C2C link; expected .pcie")
    if match[3] != "nvlink":
        return _link_indices(topology, (f"{match[3]}_up", f"{match[3]}_down"), np.array([slot]))
    return _nvlinks(topology, slot, where)


def _nvlinks(topology: Topology, slot: int, where: str) -> Ints:
    gpus = topology.gpus_per_node
    if "nvlink_direct" in topology.classes:
        first = slot // gpus * gpus
        outgoing, incoming = slot * gpus + np.arange(gpus), (first + np.arange(gpus)) * gpus + slot - first
        return _link_indices(topology, ("nvlink_direct",), np.unique(np.concatenate([outgoing, incoming])))
    if "nvlink_out" not in topology.classes:
        raise InputError(f"{where}: the nodes of '{topology.cluster.name}' have no NVLink")
    return _link_indices(topology, ("nvlink_out", "nvlink_in"), np.array([slot]))


def _link_indices(topology: Topology, names: tuple[str, ...], positions: Ints) -> Ints:
    return np.concatenate([topology.classes[name].first + positions for name in names])


def _check_index(index: int, count: int, device: str, where: str) -> None:
    if index >= count:
        raise InputError(f"{where}: a node has {device}0 to {device}{count - 1}, not {device}{index}")


def _switch_cables(topology: Topology) -> dict[tuple[str, str], list[int]]:
    """The links between switches, by the pair of switches that they join."""
    cables: dict[tuple[str, str], list[int]] = {}
    between = [c for c in topology.classes.values() if c.first > topology.classes["nic_in"].first]
    for link_class in between:
        for position in range(link_class.count):
            ends = topology.wiring.ends(link_class.name, position)
            if ends[0] != ends[1]:
                cables.setdefault(ends, []).append(link_class.first + position)
    return cables
