"""A fabric as it is drawn: boxes and lines, folded where there are too many.

Up to 24 nodes are drawn one by one (two NVLink domains at least). For more, nodes on the same switches (a
pod) are one box, many pods share boxes, and nodes under one switch are split into boxes of equal size.
Switches that join the same boxes are one circle. A dragonfly's groups and a torus's routers hold their nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass
from zsim.specs.topology.topology import Topology

MAX_NODES = 24  # drawn one by one
_SPLIT = 16  # boxes of nodes that are all on the same switches
_MAX_ROUTERS = 400  # of a torus, drawn one by one
Ends = tuple[str, str]
Place = tuple[float, float]


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
    place: Place
    links: Mapping[str, Ints] = field(default_factory=dict)
    """The links inside its nodes, by tier."""


@dataclass(frozen=True)
class Picture:
    boxes: tuple[FabricBox, ...]
    lines: tuple[Line, ...]
    num_nodes: int

    @property
    def is_folded(self) -> bool:
        return sum(box.is_nodes for box in self.boxes) < self.num_nodes or any(
            box.devices > 1 for box in self.boxes
        )

    def places(self) -> dict[str, Place]:
        return {box.name: box.place for box in self.boxes}


def picture(topology: Topology) -> Picture:
    """The fabric of `topology`, from the nodes' cards on."""
    cables = _as_built(topology, _cables(topology))
    names = _folded(topology, cables)
    joined: dict[Ends, list[tuple[str, Ints]]] = {}
    for (one, other), own in cables.items():
        ends = names[one], names[other]
        if ends[0] != ends[1]:
            joined.setdefault(ends if ends[0] <= ends[1] else ends[::-1], []).extend(own)
    capacities = topology.capacities()
    lines = []
    for ends, parts in joined.items():
        links = np.concatenate([own for _, own in parts])
        lines.append(
            Line(ends, parts[0][0], len(links) // 2, float(capacities[links].sum()) / 2, links)
        )  # fmt: skip
    members: dict[str, list[str]] = {}
    for device, name in names.items():
        members.setdefault(name, []).append(device)
    places = _places(topology, list(members), lines)
    boxes = [_box(topology, name, devices, places[name]) for name, devices in members.items()]
    return Picture(tuple(boxes), tuple(lines), topology.num_nodes)


def _cables(topology: Topology) -> dict[Ends, list[tuple[str, Ints]]]:
    """The tier and the links of both directions, by pair of devices."""
    found: dict[Ends, tuple[str, list[int]]] = {}

    def add(one: str, other: str, tier: str, *links: int) -> None:
        pair = (one, other) if one <= other else (other, one)
        found.setdefault(pair, (tier, []))[1].extend(links)

    per_node, wiring = topology.cluster.nic.per_node, topology.wiring
    out, back = topology.classes["nic_out"], topology.classes["nic_in"]
    for port in range(out.count):
        nic, plane = divmod(port, wiring.planes)
        switch = wiring.port(nic, plane)
        add(f"node{nic // per_node}", switch, out.tier, out.first + port, back.first + port)
    for links in wiring.links():
        own = topology.classes[links.name]
        for position in range(own.count):
            one, other = wiring.ends(links.name, position)
            if one != other:
                add(one, other, own.tier, own.first + position)
    return {pair: [(tier, np.array(links))] for pair, (tier, links) in found.items()}


def _as_built(
    topology: Topology, cables: Mapping[Ends, list[tuple[str, Ints]]]
) -> dict[Ends, list[tuple[str, Ints]]]:
    """The cables with as many spines and cores as the fabric is built of. Several logical switches become one
    physical one, and a single leaf has none above it.
    """
    built, names = topology.inventory().switches, dict[str, str | None]()
    for role in ("spine", "core"):
        own = {end for pair in cables for end in pair if _role(end) == role}
        for place, device in enumerate(sorted(own, key=_numbers)):
            count = built.get(role, 0)
            packed = f"{role}{place * count // len(own)}" if count < len(own) else device
            names[device] = packed if count else None
    found: dict[Ends, list[tuple[str, Ints]]] = {}
    for (one, other), parts in cables.items():
        first, second = names.get(one, one), names.get(other, other)
        if first is None or second is None:
            continue
        found.setdefault((first, second) if first <= second else (second, first), []).extend(parts)
    return found


def _folded(topology: Topology, cables: Mapping[Ends, object]) -> dict[str, str]:
    """The box of each device."""
    devices = sorted({end for pair in cables for end in pair}, key=lambda one: (_role(one), _numbers(one)))
    if topology.num_nodes <= max(MAX_NODES, 2 * topology.cluster.node_link.nodes_per_domain):
        return {device: device for device in devices}
    beside: dict[str, set[str]] = {device: set() for device in devices}
    for one, other in cables:
        beside[one].add(other)
        beside[other].add(one)
    network = topology.cluster.network
    if network.kind in ("torus", "dragonfly"):
        return dict(_of_routers(topology, devices, beside))
    names = _pods([device for device in devices if device.startswith("node")], beside)
    level = set(names)
    while level:
        above = [one for one in devices if one not in names and beside[one] & level]
        groups: dict[tuple[str, frozenset[str]], list[str]] = {}
        for one in above:
            below = frozenset(names[other] for other in beside[one] & level)
            groups.setdefault((_role(one), below), []).append(one)
        for (role, _), own in groups.items():
            first = own[0] if len(own) == 1 else f"{len(own)} x {role} from {own[0]}"
            names.update(dict.fromkeys(own, first))
        level = set(above)
    return names


def _pods(nodes: Sequence[str], beside: Mapping[str, set[str]]) -> dict[str, str]:
    """Nodes by pod: on the same switches. Many pods are bundled, few are split."""
    pods: dict[frozenset[str], list[str]] = {}
    for node in nodes:
        pods.setdefault(frozenset(beside[node]), []).append(node)
    parts = list(pods.values())
    if len(parts) > MAX_NODES:
        size = math.ceil(len(parts) / MAX_NODES)
        bundles = [parts[i : i + size] for i in range(0, len(parts), size)]
        parts = [[node for pod in bundle for node in pod] for bundle in bundles]
    elif len(parts) < _SPLIT // 2:
        pieces = _SPLIT // len(parts)
        sizes = [math.ceil(len(pod) / pieces) for pod in parts]
        parts = [
            pod[i : i + size]
            for pod, size in zip(parts, sizes, strict=True)
            for i in range(0, len(pod), size)
        ]
    return {node: _range(part) for part in parts for node in part}


def _range(nodes: Sequence[str]) -> str:
    numbers = [int(node.removeprefix("node")) for node in nodes]
    if len(numbers) == 1:
        return nodes[0]
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"nodes {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} nodes from {numbers[0]}"


def _of_routers(
    topology: Topology, devices: Sequence[str], beside: Mapping[str, set[str]]
) -> Iterator[tuple[str, str]]:
    """Nodes in the box of their router. A dragonfly's routers are in the box of their group, those of a large
    torus in columns along z.
    """
    network = topology.cluster.network
    shape = network.shape
    routers = [device for device in devices if device.startswith("router")]
    is_torus = network.kind == "torus"
    for device in devices:
        router = device if device.startswith("router") else min(beside[device], key=_numbers)
        number = int(router.removeprefix("router"))
        if not is_torus:
            yield device, f"group {number // network.routers_per_group}"
        elif len(routers) > _MAX_ROUTERS and len(shape) > 2:
            column = number % (shape[0] * shape[1])
            yield device, f"column {column}"
        else:
            yield device, f"router{number}"


def _places(topology: Topology, boxes: Sequence[str], lines: Sequence[Line]) -> dict[str, Place]:
    """Coordinates by box: tori as a grid, dragonflies as a ring, everything else in levels."""
    kind, shape = topology.cluster.network.kind, topology.cluster.network.shape
    if kind == "torus":
        return _on_a_grid(topology, boxes, shape)
    if kind == "dragonfly":
        return _on_a_ring(topology, boxes)
    level = {name: 0 for name in boxes if name.startswith("node") or " nodes from " in name}
    while True:
        above = {
            here
            for line in lines
            for here, other in (line.ends, line.ends[::-1])
            if here not in level and other in level
        }
        if not above:
            break
        height = max(level.values()) + 1
        level.update(dict.fromkeys(above, height))
    rows: dict[int, list[str]] = {}
    for name in boxes:
        rows.setdefault(level.get(name, 1), []).append(name)
    places = {}
    for height, own in rows.items():
        own.sort(key=lambda name: (_role(name), _numbers(name)) if height else ("", _numbers(name)))
        for position, name in enumerate(own):
            places[name] = ((position + 0.5) / len(own), float(height))
    return places


def _on_a_grid(topology: Topology, boxes: Sequence[str], shape: Sequence[int]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name in sorted(boxes, key=lambda one: one.startswith("node")):
        if name.startswith("node"):
            router = topology.wiring.port(int(name[4:]) * topology.cluster.nic.per_node, 0)
            places[name] = places[router][0] + 0.12, places[router][1] - 0.2
            continue
        number, width = int(_numbers(name)[0]), shape[0]
        height = shape[1] if len(shape) > 1 else 1
        x, y, z = number % width, number // width % height, number // (width * height)
        step = z / max(math.prod(shape[2:]), 1)
        places[name] = (x + 0.8 * step, y + 0.55 * step)
    return places


def _on_a_ring(topology: Topology, boxes: Sequence[str]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    rings = sorted((name for name in boxes if not name.startswith("node")), key=_numbers)
    for position, name in enumerate(rings):
        angle = 2 * math.pi * position / len(rings)
        places[name] = (math.cos(angle), math.sin(angle))
    for name in boxes:
        if name.startswith("node"):
            x, y = places[topology.wiring.port(int(name[4:]) * topology.cluster.nic.per_node, 0)]
            spread = (int(name[4:]) % 2) * 0.12
            places[name] = (1.22 * x + spread, 1.22 * y + spread)
    return places


def _box(topology: Topology, name: str, devices: Sequence[str], place: Place) -> FabricBox:
    nodes = [int(device[4:]) for device in devices if device.startswith("node")]
    switches = len(devices) - len(nodes)
    own = dict(_inside(topology, nodes)) if nodes else {}
    return FabricBox(name, switches == 0, len(nodes) if switches == 0 else switches, place, own)


def _inside(topology: Topology, nodes: Sequence[int]) -> Iterator[tuple[str, Ints]]:
    """The links inside nodes, by tier."""
    found: dict[str, list[Ints]] = {}
    last = topology.classes["nic_out"].first
    for own in topology.classes.values():
        if own.first >= last or not own.count:
            continue
        per_node = own.count // topology.num_nodes
        places = np.array(nodes)[:, None] * per_node + np.arange(per_node)
        found.setdefault(own.tier, []).append(own.first + places.ravel())
    yield from ((tier, np.concatenate(parts)) for tier, parts in found.items())


def _role(device: str) -> str:
    return device.rpartition("plane")[2].lstrip("0123456789.").rstrip("0123456789.")


def _numbers(device: str) -> list[int]:
    digits = "".join(letter if letter.isdigit() else " " for letter in device)
    return [int(part) for part in digits.split()] or [0]


def line_loads(drawn: Picture, loads: Floats) -> Floats:
    """The load of the busiest link of each line, as (lines, frames). `loads` is (links, frames), as
    `link_loads` returns it.
    """
    return np.array([busiest(loads, line.links) for line in drawn.lines]).reshape(-1, loads.shape[1])


def busiest(loads: Floats, links: Ints) -> Floats:
    """The load of the busiest of `links`, frame by frame."""
    found: Floats = loads[links].max(axis=0, initial=0.0)
    return found
