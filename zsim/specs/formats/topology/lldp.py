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
from typing import Any

from zsim.dataclass import dataclass
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.formats.topology.found import FoundTopology, gigabits, natural_order

_KEY = re.compile(r"^(?:([^\s:]+):\s*)?lldp\.(\S+?)\.(via|chassis|port)(\.[^=]*)?=(.*)$")
_PLAIN = re.compile(
    r"^(?:([^\s:]+):\s*)?\s*(Interface|SysName|PortID|PortDescr|Capability|MAU oper type):\s*(.*)$"
)
_RATE = re.compile(r"(\d+)\s*(G?)base", re.IGNORECASE)
_HERE = "this machine"
_MAX_CABLES = 200_000
Pair = tuple[str, str]


@dataclass
class _Seen:
    """A neighbour that `machine` sees on its `interface`."""

    machine: str
    interface: str
    peer: str = ""
    """The neighbour's name."""
    port: str = ""
    """The neighbour's port."""
    rate: float = 0.0
    """Gb/s, 0 where nothing says it."""
    bridges: bool | None = None  # None: nothing says
    """Whether the neighbour is a bridge or router, None where nothing says it."""


def is_lldp(text: str) -> bool:
    """Whether a text is lldpctl's."""
    return any(_KEY.match(line) for line in text.splitlines()[:200]) or (
        "LLDP neighbors:" in text or re.search(r"Interface:\s+\S+, via: LLDP", text) is not None
    )


def read_lldp(text: str, file: str, base: str | None) -> FoundTopology:
    """A network of links between machines and switches.

    Machines stand in the order of their names, and their cards in the order of their interfaces. Where
    nothing says a cable's rate, it is the rate of the cards of `base`. Cards slower than a machine's fastest
    (for its management) are left out.

    Raises InputError for text without a neighbour that has a name.
    """
    base = base or "dgx-h100"
    seen = [one for one in _neighbours(text) if one.peer]
    if not seen:
        raise InputError(
            f"{file}: no neighbour has a name; expected the output of lldpctl, such as "
            "'lldp.eth0.chassis.name=leaf01' or 'SysName: leaf01'"
        )
    if len(seen) > _MAX_CABLES:
        raise InputError(f"{file}: more than {_MAX_CABLES:,} neighbours")
    switches = _switches(seen)
    usual = load_cluster(base).nic.bandwidth * 8 / 1e9
    cards, notes = _cards(seen, switches, usual)
    if not cards:
        raise InputError(
            f"{file}: no machine is plugged into a switch; found only {', '.join(sorted(switches)[:5])}"
        )
    sizes = Counter({len(own): 0 for own in cards.values()})
    for own in cards.values():
        sizes[len(own)] += len(own)
    per_node = sizes.most_common(1)[0][0]
    nodes = {name: own for name, own in cards.items() if len(own) == per_node}
    if len(nodes) < len(cards):
        others = [name for name in cards if name not in nodes]
        notes.append(
            f"left out, with another number of cards: {', '.join(others[:5])} ({len(others)} machines)"
        )
    links: list[dict[str, Any]] = [
        {"from": f"node{number}.nic{card}", "to": _named(switch), "bandwidth": gigabits(rate)}
        for number, own in enumerate(nodes.values())
        for card, (_, switch, rate) in enumerate(own)
    ]
    links += _between(seen, switches, usual)
    fastest = max(rate for own in nodes.values() for _, _, rate in own)
    source = f"imported from {file}: lldpctl's neighbours"
    if not any(one.rate for one in seen):
        notes.append(f"nothing in {file} says a cable's rate: {usual:g} Gb/s, as a card of {base}")
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
    return FoundTopology(base, f"imported from {file} over {base}", tables, {}, tuple(notes))


def _neighbours(text: str) -> Iterator[_Seen]:
    """One entry per neighbour, from either format."""
    known: dict[Pair, _Seen] = {}
    here: dict[str, _Seen] = {}  # by machine: the entry that plain lines go on
    for line in text.splitlines():
        found = _KEY.match(line)
        if found is not None:
            machine, interface = _short(found[1] or _HERE), found[2]
            one = known.setdefault((machine, interface), _Seen(machine, interface))
            _take_key(one, found[3] + (found[4] or ""), found[5].strip().strip('"'))
            continue
        plain = _PLAIN.match(line)
        if plain is None:
            continue
        machine, name, value = _short(plain[1] or _HERE), plain[2], plain[3].strip()
        if name == "Interface":
            interface = value.partition(",")[0]
            here[machine] = known.setdefault((machine, interface), _Seen(machine, interface))
        elif machine in here:
            _take_plain(here[machine], name, value)
    yield from known.values()


def _take_key(one: _Seen, key: str, value: str) -> None:
    if key == "chassis.name" and not one.peer:
        one.peer = _short(value)
    elif key in ("port.ifname", "port.local", "port.descr") and not one.port:
        one.port = value
    elif key in ("chassis.Bridge.enabled", "chassis.Router.enabled"):
        one.bridges = bool(one.bridges) or value == "on"
    elif key == "port.auto-negotiation.current":
        one.rate = _gigabits(value)


def _take_plain(one: _Seen, name: str, value: str) -> None:
    if name == "SysName" and not one.peer:
        one.peer = _short(value)
    elif name in ("PortID", "PortDescr") and not one.port:
        one.port = value.removeprefix("ifname ")
    elif name == "Capability":
        what, _, state = value.partition(",")
        if what in ("Bridge", "Router"):
            one.bridges = bool(one.bridges) or state.strip() == "on"
    elif name == "MAU oper type":
        one.rate = _gigabits(value)


def _gigabits(text: str) -> float:
    """100 for "100GbaseCR4", 1 for "1000BaseTFD", 0 where nothing says a rate."""
    found = _RATE.search(text)
    return 0.0 if found is None else float(found[1]) * (1.0 if found[2] else 1e-3)


def _short(name: str) -> str:
    """A name without its domain. Addresses are kept in full."""
    return name if re.fullmatch(r"[\d.]+", name) else name.partition(".")[0]


def _switches(seen: list[_Seen]) -> set[str]:
    """The names of the switches.

    A machine is a switch if it is a bridge, if it sees a machine that is not a bridge, or if it is known only
    as a neighbour of a machine that is no switch.
    """
    switches = {one.peer for one in seen if one.bridges}
    switches |= {one.machine for one in seen if one.bridges is False and one.peer not in switches}
    machines = {one.machine for one in seen}
    return switches | {one.peer for one in seen if one.machine not in switches and one.peer not in machines}


def _cards(
    seen: list[_Seen], switches: set[str], usual: float
) -> tuple[dict[str, list[tuple[str, str, float]]], list[str]]:
    """{machine: [(interface, switch, Gb/s)]}, and notes.

    Entries come from the machine's own text, or from that of its switches.
    """
    found: dict[str, dict[str, tuple[str, float]]] = {}
    own_text = {one.machine for one in seen}
    for one in seen:
        if one.machine not in switches and one.peer in switches:
            found.setdefault(one.machine, {})[one.interface] = (one.peer, one.rate)
        elif one.machine in switches and one.peer not in switches and one.peer not in own_text:
            card = one.port or f"{one.machine} {one.interface}"
            found.setdefault(one.peer, {})[card] = (one.machine, one.rate)
    cards, slow = {}, 0
    for machine in sorted(found, key=natural_order):
        own = found[machine]
        most = max(rate for _, rate in own.values())
        kept = {card: end for card, end in own.items() if not end[1] or end[1] == most}
        slow += len(own) - len(kept)
        cards[machine] = [
            (card, kept[card][0], kept[card][1] or usual) for card in sorted(kept, key=natural_order)
        ]
    return cards, [f"left out: {slow} cards that are slower than their machine's fastest"] if slow else []


def _between(seen: list[_Seen], switches: set[str], usual: float) -> Iterator[dict[str, Any]]:
    """The cables between switches. The larger of the counts of both ends is taken."""
    counts: Counter[Pair] = Counter()
    rates: dict[Pair, float] = {}
    for one in seen:
        if one.machine in switches and one.peer in switches:
            counts[one.machine, one.peer] += 1
            pair = min(one.machine, one.peer), max(one.machine, one.peer)
            rates[pair] = max(rates.get(pair, 0.0), one.rate)
    for (first, second), rate in sorted(rates.items()):
        count = max(counts[first, second], counts[second, first])
        yield {
            "from": _named(first), "to": _named(second), "bandwidth": gigabits(rate or usual), "count": count,
            "tier": "switch-switch",
        }  # fmt: skip


def _named(switch: str) -> str:
    """A switch's name, changed if it could be taken for a node's."""
    return f"switch {switch}" if re.match(r"node\d", switch) else switch
