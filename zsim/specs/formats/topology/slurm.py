"""Slurm's topology.conf and topology.yaml: the nodes under each switch. Rates are the preset's.

A tree becomes a list of links. Each switch has as many links to the one above as it has nodes below, so that
it does not block, since Slurm knows no rates. Blocks become leaves under one switch.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any

from zsim.errors import InputError
from zsim.specs.formats.topology.new_file import ImportedTopology

_MAX_NODES = 20_000
_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_slurm_topology(text: str, file: str, base: str | None) -> ImportedTopology:
    """A network of switches and nodes. Nodes are numbered in the order of the file."""
    base = base or "dgx-h100"
    is_yaml = "SwitchName=" not in text and "BlockName=" not in text
    notes: list[str] = []
    nodes_of, parent = _parse_yaml(text, file, notes) if is_yaml else _parse_conf(text, file)
    order = [node for nodes in nodes_of.values() for node in nodes]
    if not order:
        raise InputError(f"{file}: no switch has nodes; expected SwitchName=... Nodes=... or block entries")
    if len(set(order)) < len(order):
        raise InputError(f"{file}: a node is under two switches")
    nodes_below = {name: len(nodes) for name, nodes in nodes_of.items()}
    for name in nodes_of:
        ancestor = parent.get(name)
        seen = {name}
        while ancestor is not None:
            if ancestor in seen:
                raise InputError(f"{file}: switch '{ancestor}' is above itself")
            seen.add(ancestor)
            nodes_below[ancestor] = nodes_below.get(ancestor, 0) + len(nodes_of[name])
            ancestor = parent.get(ancestor)
    roots = {name for name in nodes_below if parent.get(name) is None}
    if len(roots) > 1:
        for name in sorted(roots):
            parent[name] = "slurm-top"
    number = {node: position for position, node in enumerate(order)}
    links: list[dict[str, Any]] = []
    for name, nodes in nodes_of.items():
        links += [
            {"from": f"node{number[node]}", "to": _safe(name), "bandwidth": "400 Gb/s"} for node in nodes
        ]
    for name, parent_name in parent.items():
        if parent_name is not None and nodes_below.get(name):
            ends = {"from": _safe(name), "to": _safe(parent_name), "bandwidth": "400 Gb/s"}
            links.append(ends | {"count": nodes_below[name] * 8, "tier": "switch-switch"})
    table = {
        "source": f"imported from {file}: Slurm says who is under which switch, not how fast or how thick; "
        "eight 400 Gb/s cables per node between switches, so that nothing blocks, are assumed",
        "evidence": "assumed",
        "kind": "links",
        "links": links,
    }
    notes += [
        f"{len(order)} nodes under {len(nodes_of)} leaf switches: use it with --nodes {len(order)} or fewer",
        f"Slurm gives no rates: the nodes are {base}'s, links between switches never block",
    ]
    return ImportedTopology(base, f"imported from {file} over {base}", {"network": table}, {}, tuple(notes))


def expand_hostlist(text: str, file: str) -> list[str]:
    """`tux[0-2,7],login` -> tux0, tux1, tux2, tux7, login (zero padding kept)."""
    names: list[str] = []
    for part in _PART.findall(text):
        words = _RANGES.split(part.strip())  # text and the content of brackets, alternately
        choices = [
            _expand_ranges(word, part, file) if index % 2 else [word] for index, word in enumerate(words)
        ]
        if "[" in "".join(words[::2]):
            raise InputError(f"{file}: '{part[:60]}' is not a host list")
        if len(names) + math.prod(map(len, choices)) > _MAX_NODES:
            raise InputError(f"{file}: more than {_MAX_NODES:,} nodes")
        names += map("".join, product(*choices))
    return names


def _expand_ranges(ranges: str, part: str, file: str) -> list[str]:
    """`0-2,7` -> 0, 1, 2, 7, each with as many digits as the first number of its range."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise InputError(f"{file}: '{part[:60]}' is not a host list")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MAX_NODES:
            raise InputError(f"{file}: more than {_MAX_NODES:,} nodes")
        numbers += [f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1)]
    return numbers


def _parse_conf(text: str, file: str) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    nodes_of: dict[str, list[str]] = {}
    parent: dict[str, str | None] = {}
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        words = dict(word.split("=", 1) for word in line.split("#", 1)[0].split() if "=" in word)
        keys = {key.lower(): value for key, value in words.items()}
        name = keys.get("switchname") or keys.get("blockname")
        if name is None:
            continue
        parent.setdefault(name, None)
        if "nodes" in keys:
            nodes_of[name] = expand_hostlist(keys["nodes"], file)
        for child in expand_hostlist(keys["switches"], file) if "switches" in keys else []:
            parent[child] = name
    return nodes_of, parent


def _parse_yaml(text: str, file: str, notes: list[str]) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """The default topology, or the first that has switches."""
    from zsim.specs.formats.safe_yaml import load_yaml

    content = load_yaml(text, file)
    nodes_of: dict[str, list[str]] = {}
    parent: dict[str, str | None] = {}
    topologies = [
        entry for entry in (content if isinstance(content, list) else [content]) if _has_switches(entry)
    ]
    chosen = next((entry for entry in topologies if entry.get("cluster_default")), (topologies or [{}])[0])
    if len(topologies) > 1:
        notes.append(
            f"{len(topologies)} topologies of the same nodes: '{chosen.get('topology', '')}' is taken, not "
            + ", ".join(f"'{entry.get('topology', '')}'" for entry in topologies if entry is not chosen)
        )
    for topology in [chosen] if topologies else []:
        for key, entries_key in (("tree", "switches"), ("block", "blocks")):
            part = topology.get(key) if isinstance(topology, dict) else None
            entries = part.get(entries_key) if isinstance(part, dict) else None
            for entry in entries if isinstance(entries, list) else []:
                name = entry.get("switch") or entry.get("block") if isinstance(entry, dict) else None
                if not isinstance(name, str):
                    raise InputError(f"{file}: {key}: expected entries with a 'switch' or 'block' name")
                parent.setdefault(name, None)
                if isinstance(entry.get("nodes"), str):
                    nodes_of[name] = expand_hostlist(entry["nodes"], file)
                for child in expand_hostlist(str(entry.get("children") or ""), file):
                    parent[child] = name
    return nodes_of, parent


def _has_switches(topology: Any) -> bool:
    """Whether an entry of a topology.yaml is a tree or has blocks. Others (`flat`) say nothing of "
    "switches."""
    return isinstance(topology, dict) and any(
        isinstance(topology.get(key), dict) for key in ("tree", "block")
    )


def _safe(name: str) -> str:
    """The switch's name, changed if it could be taken for a node's."""
    return f"switch-{name}" if re.match(r"^node\d+", name) else name
