"""`lldpctl`'s text: the switch that each card of each machine is plugged into.

Formats: lldpd's `lldpctl -f keyvalue` ("lldp.eth0.chassis.name=leaf01") and its plain one ("Interface: eth0",
"SysName: leaf01"), as lldpcli(8) has them. With several machines the lines begin with the machine's name, as
`clush` and `pdsh` print them ("node01: lldp.eth0..."). Switches may be among the machines. A cable that both
of its ends report counts once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.topology.new_file import ImportedTopology, gigabits, natural_order

_KEY = re.compile(r"^(?:([^\s:]+):\s*)?lldp\.(\S+?)\.(via|chassis|port)(\.[^=]*)?=(.*)$")
_PLAIN = re.compile(
    r"^(?:([^\s:]+):\s*)?\s*(Interface|SysName|PortID|PortDescr|Capability|MAU oper type):\s*(.*)$"
)
_RATE = re.compile(r"(\d+)\s*(G?)base", re.IGNORECASE)
_LOCAL_MACHINE = "this machine"
_MAX_CABLES = 200_000
Pair = tuple[str, str]


@dataclass
class _Neighbour:
    """A neighbour that `machine` sees on its `interface`."""

    machine: str
    interface: str
    peer: str = ""
    """The neighbour's name."""
    port: str = ""
    """The neighbour's port."""
    rate: float = 0.0
    """Gb/s, 0 where nothing says it."""
    is_bridge: bool | None = None  # None: nothing says
    """Whether the neighbour is a bridge or router, None where nothing says it."""


def is_lldp(text: str) -> bool:
    """Whether a text is lldpctl's."""
    return any(_KEY.match(line) for line in text.splitlines()[:200]) or (
        "LLDP neighbors:" in text or re.search(r"Interface:\s+\S+, via: LLDP", text) is not None
    )


def read_lldp(text: str, file: str, base: str | None) -> ImportedTopology:
    """A network of links between machines and switches.

    Machines stand in the order of their names, and their cards in the order of their interfaces. Where
    nothing says a cable's rate, it is the rate of the cards of `base`. Cards slower than a machine's fastest
    (for its management) are left out.

    Raises InputError for text without a neighbour that has a name.
    """
    base = base or "dgx-h100"
    neighbours = [neighbour for neighbour in _neighbours(text) if neighbour.peer]
    if not neighbours:
        raise InputError(
            f"{file}: no neighbour has a name; expected the output of lldpctl, such as "
            "'lldp.eth0.chassis.name=leaf01' or 'SysName: leaf01'"
        )
    if len(neighbours) > _MAX_CABLES:
        raise InputError(f"{file}: more than {_MAX_CABLES:,} neighbours")
    switches = _switches(neighbours)
    default_gbps = load_cluster(base).nic.bandwidth * 8 / 1e9
    cards, notes = _cards(neighbours, switches, default_gbps)
    if not cards:
        raise InputError(
            f"{file}: no machine is plugged into a switch; found only {', '.join(sorted(switches)[:5])}"
        )
    sizes = Counter({len(machine_cards): 0 for machine_cards in cards.values()})
    for machine_cards in cards.values():
        sizes[len(machine_cards)] += len(machine_cards)
    per_node = sizes.most_common(1)[0][0]
    nodes = {name: machine_cards for name, machine_cards in cards.items() if len(machine_cards) == per_node}
    if len(nodes) < len(cards):
        omitted_machines = [name for name in cards if name not in nodes]
        notes.append(
            f"left out, with another number of cards: {', '.join(omitted_machines[:5])} "
            f"({len(omitted_machines)} machines)"
        )
    links: list[dict[str, Any]] = [
        {"from": f"node{number}.nic{card}", "to": _switch_name(switch), "bandwidth": gigabits(rate)}
        for number, machine_cards in enumerate(nodes.values())
        for card, (_, switch, rate) in enumerate(machine_cards)
    ]
    links += _switch_links(neighbours, switches, default_gbps)
    fastest = max(rate for machine_cards in nodes.values() for _, _, rate in machine_cards)
    source = f"imported from {file}: lldpctl's neighbours"
    if not any(neighbour.rate for neighbour in neighbours):
        notes.append(f"nothing in {file} says a cable's rate: {default_gbps:g} Gb/s, as a card of {base}")
    notes = [
        f"{len(nodes)} nodes of {per_node} cards under {len(switches)} switches: use it with --nodes "
        f"{len(nodes)} or fewer",
        f"neighbours say nothing of GPUs, NVLink and PCIe: taken from {base}",
        *notes,
    ]
    tables: dict[str, dict[str, Any]] = {
        "network": {"source": source, "evidence": "data sheet", "kind": "links", "links": links},
        "nic": {
            "source": source, "evidence": "data sheet", "per_node": per_node, "bandwidth": gigabits(fastest),
        },
    }  # fmt: skip
    return ImportedTopology(base, f"imported from {file} over {base}", tables, {}, tuple(notes))


def _neighbours(text: str) -> Iterator[_Neighbour]:
    """One entry per neighbour, from either format."""
    entries: dict[Pair, _Neighbour] = {}
    current_entries: dict[str, _Neighbour] = {}  # by machine: the entry that plain lines go on
    for line in text.splitlines():
        match = _KEY.match(line)
        if match is not None:
            machine, interface = _short_name(match[1] or _LOCAL_MACHINE), match[2]
            entry = entries.setdefault((machine, interface), _Neighbour(machine, interface))
            _read_key(entry, match[3] + (match[4] or ""), match[5].strip().strip('"'))
            continue
        plain = _PLAIN.match(line)
        if plain is None:
            continue
        machine, name, value = _short_name(plain[1] or _LOCAL_MACHINE), plain[2], plain[3].strip()
        if name == "Interface":
            interface = value.partition(",")[0]
            current_entries[machine] = entries.setdefault(
                (machine, interface), _Neighbour(machine, interface)
            )
        elif machine in current_entries:
            _read_plain(current_entries[machine], name, value)
    yield from entries.values()


def _read_key(neighbour: _Neighbour, key: str, value: str) -> None:
    if key == "chassis.name" and not neighbour.peer:
        neighbour.peer = _short_name(value)
    elif key in ("port.ifname", "port.local", "port.descr") and not neighbour.port:
        neighbour.port = value
    elif key in ("chassis.Bridge.enabled", "chassis.Router.enabled"):
        neighbour.is_bridge = bool(neighbour.is_bridge) or value == "on"
    elif key == "port.auto-negotiation.current":
        neighbour.rate = _gigabits(value)


def _read_plain(neighbour: _Neighbour, name: str, value: str) -> None:
    if name == "SysName" and not neighbour.peer:
        neighbour.peer = _short_name(value)
    elif name in ("PortID", "PortDescr") and not neighbour.port:
        neighbour.port = value.removeprefix("ifname ")
    elif name == "Capability":
        capability, _, state = value.partition(",")
        if capability in ("Bridge", "Router"):
            neighbour.is_bridge = bool(neighbour.is_bridge) or state.strip() == "on"
    elif name == "MAU oper type":
        neighbour.rate = _gigabits(value)


def _gigabits(text: str) -> float:
    """100 for "100GbaseCR4", 1 for "1000BaseTFD", 0 where nothing says a rate."""
    match = _RATE.search(text)
    return 0.0 if match is None else float(match[1]) * (1.0 if match[2] else 1e-3)


def _short_name(name: str) -> str:
    """A name without its domain. Addresses are kept in full."""
    return name if re.fullmatch(r"[\d.]+", name) else name.partition(".")[0]


def _switches(neighbours: list[_Neighbour]) -> set[str]:
    """The names of the switches.

    A machine is a switch if it is a bridge, if it sees a machine that is not a bridge, or if it is known only
    as a neighbour of a machine that is no switch.
    """
    switches = {neighbour.peer for neighbour in neighbours if neighbour.is_bridge}
    switches |= {
        neighbour.machine
        for neighbour in neighbours
        if neighbour.is_bridge is False and neighbour.peer not in switches
    }
    machines = {neighbour.machine for neighbour in neighbours}
    return switches | {
        neighbour.peer
        for neighbour in neighbours
        if neighbour.machine not in switches and neighbour.peer not in machines
    }


def _cards(
    neighbours: list[_Neighbour], switches: set[str], default_gbps: float
) -> tuple[dict[str, list[tuple[str, str, float]]], list[str]]:
    """{machine: [(interface, switch, Gb/s)]}, and notes.

    Entries come from the machine's own text, or from that of its switches.
    """
    ends_per_machine: dict[str, dict[str, tuple[str, float]]] = {}
    reporters = {neighbour.machine for neighbour in neighbours}
    for neighbour in neighbours:
        if neighbour.machine not in switches and neighbour.peer in switches:
            ends_per_machine.setdefault(neighbour.machine, {})[neighbour.interface] = (
                neighbour.peer,
                neighbour.rate,
            )
        elif (
            neighbour.machine in switches
            and neighbour.peer not in switches
            and neighbour.peer not in reporters
        ):
            card = neighbour.port or f"{neighbour.machine} {neighbour.interface}"
            ends_per_machine.setdefault(neighbour.peer, {})[card] = (neighbour.machine, neighbour.rate)
    cards, num_slow = {}, 0
    for machine in sorted(ends_per_machine, key=natural_order):
        ends = ends_per_machine[machine]
        fastest = max(rate for _, rate in ends.values())
        fast_ends = {card: end for card, end in ends.items() if not end[1] or end[1] == fastest}
        num_slow += len(ends) - len(fast_ends)
        cards[machine] = [
            (card, fast_ends[card][0], fast_ends[card][1] or default_gbps)
            for card in sorted(fast_ends, key=natural_order)
        ]
    return cards, [
        f"left out: {num_slow} cards that are slower than their machine's fastest"
    ] if num_slow else []


def _switch_links(
    neighbours: list[_Neighbour], switches: set[str], default_gbps: float
) -> Iterator[dict[str, Any]]:
    """The cables between switches. The larger of the counts of both ends is taken."""
    counts: Counter[Pair] = Counter()
    rates: dict[Pair, float] = {}
    for neighbour in neighbours:
        if neighbour.machine in switches and neighbour.peer in switches:
            counts[neighbour.machine, neighbour.peer] += 1
            pair = min(neighbour.machine, neighbour.peer), max(neighbour.machine, neighbour.peer)
            rates[pair] = max(rates.get(pair, 0.0), neighbour.rate)
    for (first, second), rate in sorted(rates.items()):
        count = max(counts[first, second], counts[second, first])
        yield {
            "from": _switch_name(first), "to": _switch_name(second),
            "bandwidth": gigabits(rate or default_gbps), "count": count, "tier": "switch-switch",
        }  # fmt: skip


def _switch_name(switch: str) -> str:
    """A switch's name, changed if it could be taken for a node's."""
    return f"switch {switch}" if re.match(r"node\d", switch) else switch
