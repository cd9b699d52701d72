"""A fabric as it is drawn: boxes and lines, folded where there are too many.

Up to 24 nodes are drawn one by one (two NVLink domains at least). For more, nodes on the same switches (a
pod) are one box, many pods share boxes, and nodes under one switch are split into boxes of equal size.
Switches that join the same boxes are one circle. A dragonfly's groups and a torus's routers hold their nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.specs.topology.topology import Topology

MAX_NODES = 24  # drawn one by one
_SPLIT = 16  # boxes of nodes that are all on the same switches
_MAX_ROUTERS = 400  # of a torus, drawn one by one
Ends = tuple[str, str]
Position = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Line:
    """All links of two boxes: `count` cables (or bundles), `capacity` bytes per second in one direction."""

    ends: Ends
    tier: str
    count: int
    capacity: float
    links: Ints


@dataclass(frozen=True, eq=False)
class FabricBox:
    """One or several nodes or switches, drawn as one box."""

    name: str
    is_nodes: bool
    devices: int
    """The number of nodes or switches."""
    position: Position
    links: Mapping[str, Ints] = field(default_factory=dict)
    """The links inside its nodes, by tier."""


@dataclass(frozen=True)
class Drawing:
    boxes: tuple[FabricBox, ...]
    lines: tuple[Line, ...]
    num_nodes: int

    @property
    def is_folded(self) -> bool:
        return sum(box.is_nodes for box in self.boxes) < self.num_nodes or any(
            box.devices > 1 for box in self.boxes
        )

    def positions(self) -> dict[str, Position]:
        return {box.name: box.position for box in self.boxes}


def draw_fabric(topology: Topology) -> Drawing:
    """The fabric of `topology`, from the nodes' cards on."""
    cables = _merge_switches(topology, _cables(topology))
    names = _box_names(topology, cables)
    cables_by_ends: dict[Ends, list[tuple[str, Ints]]] = {}
    for (first, second), pair_cables in cables.items():
        ends = names[first], names[second]
        if ends[0] != ends[1]:
            cables_by_ends.setdefault(ends if ends[0] <= ends[1] else ends[::-1], []).extend(pair_cables)
    capacities = topology.capacities()
    lines = []
    for ends, end_cables in cables_by_ends.items():
        links = np.concatenate([tier_links for _, tier_links in end_cables])
        lines.append(
            Line(ends, end_cables[0][0], len(links) // 2, float(capacities[links].sum()) / 2, links)
        )  # fmt: skip
    members: dict[str, list[str]] = {}
    for device, name in names.items():
        members.setdefault(name, []).append(device)
    positions = _positions(topology, list(members), lines)
    boxes = [_box(topology, name, devices, positions[name]) for name, devices in members.items()]
    return Drawing(tuple(boxes), tuple(lines), topology.num_nodes)


def _cables(topology: Topology) -> dict[Ends, list[tuple[str, Ints]]]:
    """The tier and the links of both directions, by pair of devices."""
    links_by_pair: dict[Ends, tuple[str, list[int]]] = {}

    def add(first: str, second: str, tier: str, *links: int) -> None:
        pair = (first, second) if first <= second else (second, first)
        links_by_pair.setdefault(pair, (tier, []))[1].extend(links)

    per_node, wiring = topology.cluster.nic.per_node, topology.wiring
    out, back = topology.classes["nic_out"], topology.classes["nic_in"]
    for port in range(out.count):
        nic, plane = divmod(port, wiring.planes)
        switch = wiring.port(nic, plane)
        add(f"node{nic // per_node}", switch, out.tier, out.first + port, back.first + port)
    for links in wiring.links():
        link_class = topology.classes[links.name]
        for position in range(link_class.count):
            first, second = wiring.ends(links.name, position)
            if first != second:
                add(first, second, link_class.tier, link_class.first + position)
    return {pair: [(tier, np.array(links))] for pair, (tier, links) in links_by_pair.items()}


def _merge_switches(
    topology: Topology, cables: Mapping[Ends, list[tuple[str, Ints]]]
) -> dict[Ends, list[tuple[str, Ints]]]:
    """The cables with as many spines and cores as the fabric is built of. Several logical switches become one
    physical one, and a single leaf has none above it.
    """
    num_built, names = topology.inventory().switches, dict[str, str | None]()
    for role in ("spine", "core"):
        logical = {end for pair in cables for end in pair if _role(end) == role}
        for index, device in enumerate(sorted(logical, key=_numbers)):
            count = num_built.get(role, 0)
            packed = f"{role}{index * count // len(logical)}" if count < len(logical) else device
            names[device] = packed if count else None
    merged: dict[Ends, list[tuple[str, Ints]]] = {}
    for (left, right), links in cables.items():
        first, second = names.get(left, left), names.get(right, right)
        if first is None or second is None:
            continue
        merged.setdefault((first, second) if first <= second else (second, first), []).extend(links)
    return merged


def _box_names(topology: Topology, cables: Mapping[Ends, object]) -> dict[str, str]:
    """The box of each device."""
    devices = sorted(
        {end for pair in cables for end in pair}, key=lambda device: (_role(device), _numbers(device))
    )
    if topology.num_nodes <= max(MAX_NODES, 2 * topology.cluster.node_link.nodes_per_domain):
        return {device: device for device in devices}
    neighbours: dict[str, set[str]] = {device: set() for device in devices}
    for device, peer in cables:
        neighbours[device].add(peer)
        neighbours[peer].add(device)
    network = topology.cluster.network
    if network.kind in ("torus", "dragonfly"):
        return dict(_router_boxes(topology, devices, neighbours))
    names = _pods([device for device in devices if device.startswith("node")], neighbours)
    level = set(names)
    while level:
        next_level = [device for device in devices if device not in names and neighbours[device] & level]
        groups: dict[tuple[str, frozenset[str]], list[str]] = {}
        for device in next_level:
            lower_boxes = frozenset(names[peer] for peer in neighbours[device] & level)
            groups.setdefault((_role(device), lower_boxes), []).append(device)
        for (role, _), members in groups.items():
            first = members[0] if len(members) == 1 else f"{len(members)} x {role} from {members[0]}"
            names.update(dict.fromkeys(members, first))
        level = set(next_level)
    return names


def _pods(nodes: Sequence[str], neighbours: Mapping[str, set[str]]) -> dict[str, str]:
    """Nodes by pod: on the same switches. Many pods are bundled, few are split."""
    pods: dict[frozenset[str], list[str]] = {}
    for node in nodes:
        pods.setdefault(frozenset(neighbours[node]), []).append(node)
    boxes = list(pods.values())
    if len(boxes) > MAX_NODES:
        size = math.ceil(len(boxes) / MAX_NODES)
        bundles = [boxes[i : i + size] for i in range(0, len(boxes), size)]
        boxes = [[node for pod in bundle for node in pod] for bundle in bundles]
    elif len(boxes) < _SPLIT // 2:
        splits = _SPLIT // len(boxes)
        sizes = [math.ceil(len(pod) / splits) for pod in boxes]
        boxes = [
            pod[i : i + size]
            for pod, size in zip(boxes, sizes, strict=True)
            for i in range(0, len(pod), size)
        ]
    return {node: _range(box) for box in boxes for node in box}


def _range(nodes: Sequence[str]) -> str:
    numbers = [int(node.removeprefix("node")) for node in nodes]
    if len(numbers) == 1:
        return nodes[0]
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"nodes {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} nodes from {numbers[0]}"


def _router_boxes(
    topology: Topology, devices: Sequence[str], neighbours: Mapping[str, set[str]]
) -> Iterator[tuple[str, str]]:
    """Nodes in the box of their router. A dragonfly's routers are in the box of their group, those of a large
    torus in columns along z.
    """
    network = topology.cluster.network
    shape = network.shape
    routers = [device for device in devices if device.startswith("router")]
    is_torus = network.kind == "torus"
    for device in devices:
        router = device if device.startswith("router") else min(neighbours[device], key=_numbers)
        number = int(router.removeprefix("router"))
        if not is_torus:
            yield device, f"group {number // network.routers_per_group}"
        elif len(routers) > _MAX_ROUTERS and len(shape) > 2:
            column = number % (shape[0] * shape[1])
            yield device, f"column {column}"
        else:
            yield device, f"router{number}"


def _positions(topology: Topology, boxes: Sequence[str], lines: Sequence[Line]) -> dict[str, Position]:
    """Coordinates by box: tori as a grid, dragonflies as a ring, everything else in levels."""
    kind, shape = topology.cluster.network.kind, topology.cluster.network.shape
    if kind == "torus":
        return _grid_positions(topology, boxes, shape)
    if kind == "dragonfly":
        return _ring_positions(topology, boxes)
    level = {name: 0 for name in boxes if name.startswith("node") or " nodes from " in name}
    while True:
        above = {
            end
            for line in lines
            for end, neighbour in (line.ends, line.ends[::-1])
            if end not in level and neighbour in level
        }
        if not above:
            break
        height = max(level.values()) + 1
        level.update(dict.fromkeys(above, height))
    rows: dict[int, list[str]] = {}
    for name in boxes:
        rows.setdefault(level.get(name, 1), []).append(name)
    positions = {}
    for height, row_names in rows.items():
        row_names.sort(key=lambda name: (_role(name), _numbers(name)) if height else ("", _numbers(name)))
        for position, name in enumerate(row_names):
            positions[name] = ((position + 0.5) / len(row_names), float(height))
    return positions


def _grid_positions(topology: Topology, boxes: Sequence[str], shape: Sequence[int]) -> dict[str, Position]:
    positions: dict[str, Position] = {}
    for name in sorted(boxes, key=lambda box: box.startswith("node")):
        if name.startswith("node"):
            router = topology.wiring.port(int(name[4:]) * topology.cluster.nic.per_node, 0)
            positions[name] = positions[router][0] + 0.12, positions[router][1] - 0.2
            continue
        number, width = int(_numbers(name)[0]), shape[0]
        height = shape[1] if len(shape) > 1 else 1
        x, y, z = number % width, number // width % height, number // (width * height)
        step = z / max(math.prod(shape[2:]), 1)
        positions[name] = (x + 0.8 * step, y + 0.55 * step)
    return positions


def _ring_positions(topology: Topology, boxes: Sequence[str]) -> dict[str, Position]:
    positions: dict[str, Position] = {}
    rings = sorted((name for name in boxes if not name.startswith("node")), key=_numbers)
    for position, name in enumerate(rings):
        angle = 2 * math.pi * position / len(rings)
        positions[name] = (math.cos(angle), math.sin(angle))
    for name in boxes:
        if name.startswith("node"):
            x, y = positions[topology.wiring.port(int(name[4:]) * topology.cluster.nic.per_node, 0)]
            offset = (int(name[4:]) % 2) * 0.12
            positions[name] = (1.22 * x + offset, 1.22 * y + offset)
    return positions


def _box(topology: Topology, name: str, devices: Sequence[str], position: Position) -> FabricBox:
    nodes = [int(device[4:]) for device in devices if device.startswith("node")]
    switches = len(devices) - len(nodes)
    inner_links = dict(_inner_links(topology, nodes)) if nodes else {}
    return FabricBox(name, switches == 0, len(nodes) if switches == 0 else switches, position, inner_links)


def _inner_links(topology: Topology, nodes: Sequence[int]) -> Iterator[tuple[str, Ints]]:
    """The links inside nodes, by tier."""
    links_by_tier: dict[str, list[Ints]] = {}
    last = topology.classes["nic_out"].first
    for link_class in topology.classes.values():
        if link_class.first >= last or not link_class.count:
            continue
        per_node = link_class.count // topology.num_nodes
        indices = np.array(nodes)[:, None] * per_node + np.arange(per_node)
        links_by_tier.setdefault(link_class.tier, []).append(link_class.first + indices.ravel())
    yield from ((tier, np.concatenate(links)) for tier, links in links_by_tier.items())


def _role(device: str) -> str:
    return device.rpartition("plane")[2].lstrip("0123456789.").rstrip("0123456789.")


def _numbers(device: str) -> list[int]:
    digits = "".join(letter if letter.isdigit() else " " for letter in device)
    return [int(part) for part in digits.split()] or [0]


def line_loads(drawing: Drawing, loads: Floats) -> Floats:
    """The load of the busiest link of each line, as (lines, frames). `loads` is (links, frames), as
    `link_loads` returns it.
    """
    return np.array([busiest_link_loads(loads, line.links) for line in drawing.lines]).reshape(
        -1, loads.shape[1]
    )


def busiest_link_loads(loads: Floats, links: Ints) -> Floats:
    """The load of the busiest of `links`, frame by frame."""
    peak_loads: Floats = loads[links].max(axis=0, initial=0.0)
    return peak_loads
