"""`ibnetdiscover`'s text: every cable of an InfiniBand fabric, with the cards' and switches' names.

Format: infiniband-diags, "TOPOLOGY FILE FORMAT" of ibnetdiscover(8). Rates of a lane: InfiniBand Architecture
Specification, volume 2 (SDR 2.5, DDR 5, QDR 10, FDR 14 Gb/s), and the InfiniBand Trade Association's roadmap
(EDR 25, HDR 50, NDR 100, XDR 200 Gb/s). A card's first word of description is its host, as
`rdma-ndd` and OFED set it ("node018 mlx5_0").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.errors import InputError
from zsim.specs.formats.topology.new_file import ImportedTopology, gigabits, natural_order

_LANE_GBPS = {
    "SDR": 2.5,
    "DDR": 5,
    "QDR": 10,
    "FDR10": 10,
    "FDR": 14,
    "EDR": 25,
    "HDR": 50,
    "NDR": 100,
    "XDR": 200,
}
_HEAD = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([SHR])-([0-9a-fx]+)"\s*#\s*"([^"]*)"', re.IGNORECASE)
_PORT = re.compile(r'\[(\d+)\](?:\([^)]*\))?\s+"([SHR])-([0-9a-fx]+)"\[(\d+)\]([^#]*)#(.*)', re.IGNORECASE)
_NAME = re.compile(r'"([^"]*)"')
_RATE = re.compile(r"\b(\d+)x([A-Z]{3}(?:10)?)\b")
_UNNAMED = re.compile(r"MT\d+|Mellanox|HCA|ConnectX", re.IGNORECASE)
_MAX_CARDS = 100_000


@dataclass
class _Fabric:
    """The fabric as the text describes it, by GUID."""

    switches: dict[str, str] = field(default_factory=dict)
    """{GUID: name}"""
    cards: dict[str, str] = field(default_factory=dict)
    """{GUID: description}"""
    links: Counter[tuple[str, str, float]] = field(default_factory=Counter)
    """{(the switch's GUID, the peer's GUID, Gb/s): cables as this end counts them}"""


def read_ibnetdiscover(text: str, file: str, base: str | None) -> ImportedTopology:
    """A network of links between switches and hosts.

    Hosts stand in the order of their names. They are those with the number of cards that covers most cards.
    """
    base = base or "dgx-h100"
    fabric = _parse(text, file)
    hosts = _hosts(fabric, file)
    num_cards = Counter({len(cards): 0 for cards in hosts.values()})
    for cards in hosts.values():
        num_cards[len(cards)] += len(cards)
    cards_per_node = num_cards.most_common(1)[0][0]  # by cards: a cluster's few login hosts have one each
    nodes = {host: cards for host, cards in hosts.items() if len(cards) == cards_per_node}
    endpoints = {
        guid: f"node{number}.nic{card}"
        for number, cards in enumerate(nodes.values())
        for card, guid in enumerate(cards)
    }
    endpoints |= _switch_names(fabric)
    links, rates = _links(fabric, endpoints)
    source = f"imported from {file}: ibnetdiscover's cables and their active rates"
    tables: dict[str, dict[str, Any]] = {
        "network": {"source": source, "evidence": "data sheet", "kind": "links", "links": links},
        "nic": {
            "source": source,
            "evidence": "data sheet",
            "per_node": cards_per_node,
            "bandwidth": gigabits(max(rates)),
        },
    }
    number = len(nodes)
    notes = [
        f"{number} nodes of {cards_per_node} cards under {len(fabric.switches)} switches: use it with "
        f"--nodes {number} or fewer",
        f"the fabric says nothing of GPUs, NVLink and PCIe: taken from {base}",
    ]
    if len(nodes) < len(hosts):
        omitted_hosts = [host for host in hosts if host not in nodes]
        notes.append(
            f"left out, with another number of cards: {', '.join(omitted_hosts[:5])} ({len(omitted_hosts)} "
            "hosts)"
        )
    return ImportedTopology(base, f"imported from {file} over {base}", tables, {}, tuple(notes))


def _parse(text: str, file: str) -> _Fabric:
    fabric = _Fabric()
    current: tuple[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        head = _HEAD.match(line)
        if head is not None:
            kind, guid, name = head[2].upper(), _guid(head[3]), head[4]
            current = kind, guid
            names = fabric.switches if kind == "S" else fabric.cards
            names[guid] = name
            if len(fabric.cards) > _MAX_CARDS:
                raise InputError(f"{file}: more than {_MAX_CARDS:,} cards")
            continue
        port = _PORT.match(line)
        if port is None:
            continue
        if current is None:
            raise InputError(f"{file}: line {number}: a port before any Switch or Ca; is the file cut?")
        if current[0] != "S":
            continue
        rate = _RATE.search(port[6])
        if rate is None or rate[2] not in _LANE_GBPS:
            raise InputError(
                f"{file}: line {number}: found no width and speed as in 4xNDR, expected one of "
                f"{', '.join(_LANE_GBPS)}"
            )
        kind, guid = port[2].upper(), _guid(port[3])
        name = _NAME.search(port[6])
        if kind == "H":
            fabric.cards.setdefault(guid, name[1] if name else "")
        fabric.links[current[1], guid, int(rate[1]) * _LANE_GBPS[rate[2]]] += 1
    if not fabric.links:
        raise InputError(f"{file}: no switch has a cable; expected the output of ibnetdiscover")
    return fabric


def _guid(text: str) -> str:
    return text.lower().removeprefix("0x").rjust(16, "0")


def _hosts(fabric: _Fabric, file: str) -> Mapping[str, list[str]]:
    """The cards of each host, both in the order of their names.

    Cards without a switch are left out. So are those that switches have for themselves (SHARP's aggregation
    nodes).
    """
    linked = {guid for _, guid, _ in fabric.links}
    cards_per_host: dict[str, list[tuple[Any, str]]] = {}
    for guid, name in fabric.cards.items():
        if guid not in linked or "aggregation node" in name.lower():
            continue
        host, _, device = name.partition(" ")
        if not host or _UNNAMED.match(host):
            raise InputError(
                f"{file}: card {guid} is called '{name}', which names no host; expected descriptions such as "
                "'node018 mlx5_0' (rdma-ndd sets them; or run ibnetdiscover with --node-name-map)"
            )
        cards_per_host.setdefault(host, []).append((natural_order(device), guid))
    if not cards_per_host:
        raise InputError(f"{file}: no card of a host is on a switch")
    return {
        host: [guid for _, guid in sorted(cards_per_host[host])]
        for host in sorted(cards_per_host, key=natural_order)
    }


def _switch_names(fabric: _Fabric) -> dict[str, str]:
    count = Counter(fabric.switches.values())
    return {
        guid: f"{name} {guid[-6:]}" if count[name] > 1 or re.match(r"node\d", name) or not name else name
        for guid, name in fabric.switches.items()
    }


def _links(fabric: _Fabric, endpoints: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[float]]:
    """The cables between known endpoints, and the rates of the cards' cables in Gb/s.

    Both switches of a cable list it. The larger of the two counts is taken.
    """
    links: list[dict[str, Any]] = []
    rates: list[float] = []
    switch_cables: dict[tuple[str, str, float], int] = {}
    for (switch, peer, rate), count in fabric.links.items():
        if peer in fabric.switches:
            first, second = sorted((switch, peer))
            key = first, second, rate
            switch_cables[key] = max(switch_cables.get(key, 0), count)
        elif peer in endpoints:
            rates.append(rate)
            link = {"from": endpoints[peer], "to": endpoints[switch], "bandwidth": gigabits(rate)}
            links.append(link if count == 1 else {**link, "count": count})
    for (first, second, rate), count in sorted(switch_cables.items()):
        link = {"from": endpoints[first], "to": endpoints[second], "bandwidth": gigabits(rate)}
        links.append({**link, "count": count, "tier": "switch-switch"})
    return links, rates
