"""ASTRA-sim's analytical network yml, both ways.

Per dimension: `topology` Ring, Switch or FullyConnected, `npus_count`, `bandwidth` in GB/s per NPU, `latency`
in ns. The first dimension is the node, the others join nodes. Source: astra-sim/astra-network-analytical,
input examples.
"""

from __future__ import annotations

import math
from typing import Any

from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.formats.topology.new_file import ImportedTopology

_KINDS = ("Ring", "Switch", "FullyConnected")
_KEYS = ("topology", "npus_count", "bandwidth", "latency")


def read_astra_sim(text: str, file: str, base: str | None) -> ImportedTopology:
    """The topology over the preset `base` (default dgx-h100), which gives GPUs and host."""
    content = load_yaml(text, file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected the keys {', '.join(_KEYS)}")
    columns: dict[str, list[Any]] = {}
    for key in _KEYS:
        values = content.get(key)
        if not isinstance(values, list) or not values:
            raise InputError(f"{file}: {key}: expected a list with one entry per dimension")
        columns[key] = values
    dimensions = len(columns["topology"])
    if any(len(values) != dimensions for values in columns.values()) or dimensions > 4:
        raise InputError(f"{file}: expected 1 to 4 entries in each of {', '.join(_KEYS)}")
    for kind in columns["topology"]:
        if kind not in _KINDS:
            raise InputError(f"{file}: topology: found '{kind}', expected one of {', '.join(_KINDS)}")
    counts = [_positive(value, "npus_count", file, is_integer=True) for value in columns["npus_count"]]
    rates = [_positive(value, "bandwidth", file) for value in columns["bandwidth"]]
    delays = [_positive(value, "latency", file, allows_zero=True) for value in columns["latency"]]
    base = base or "dgx-h100"
    source = f"imported from {file} (ASTRA-sim analytical network)"
    kind = "switch" if columns["topology"][0] == "Switch" else "mesh"
    node_link: dict[str, Any] = {
        "source": source, "evidence": "assumed", "kind": kind, "bandwidth": f"{rates[0]:g} GB/s",
        "efficiency": 1.0, "latency": f"{delays[0]:g} ns",
    }  # fmt: skip
    tables: dict[str, dict[str, Any]] = {"node_link": node_link}
    notes = (
        ["a ring inside the node is taken as direct links to all"] if columns["topology"][0] == "Ring" else []
    )
    per_node = int(counts[0])
    if dimensions > 1:
        tables["nic"] = {
            "source": source, "evidence": "assumed", "per_node": per_node, "bandwidth": f"{rates[1]:g} GB/s",
            "efficiency": 1.0, "latency": f"{delays[1]:g} ns",
        }  # fmt: skip
        tables["network"] = _network(columns, counts, rates, delays, source, notes)
        notes.append(f"use it with --nodes {math.prod(int(count) for count in counts[1:])}")
    return ImportedTopology(
        base, f"imported from {file} over {base}", tables, {"gpus_per_node": per_node}, tuple(notes)
    )


def _network(
    columns: dict[str, list[Any]],
    counts: list[float],
    rates: list[float],
    delays: list[float],
    source: str,
    notes: list[str],
) -> dict[str, Any]:
    table: dict[str, Any] = {"source": source, "evidence": "assumed", "latency": f"{delays[1]:g} ns"}
    kinds = columns["topology"][1:]
    if all(kind == "Ring" for kind in kinds) and 2 <= len(kinds) <= 3:
        rate = counts[0] * min(rates[1:]) / 2
        return table | {
            "kind": "torus", "shape": [int(c) for c in counts[1:]], "link_bandwidth": f"{rate:g} GB/s",
        }  # fmt: skip
    if len(kinds) == 1:
        if kinds[0] != "Switch":
            notes.append(f"a {kinds[0]} between nodes is taken as one switch")
        return table | {"kind": "single-switch"}
    notes.append("dimensions above the second are taken as a two-level tree with their bandwidth on top")
    ratio = max(rates[1] / rates[2], 1.0)
    return table | {
        "kind": "fat-tree",
        "nodes_per_leaf": int(counts[1]),
        "oversubscription": 1.0,
        "link_bandwidth": f"{rates[1] / ratio:g} GB/s",
        **({"oversubscription": round(ratio, 6)} if ratio > 1 else {}),
    }


def astra_sim_yaml(cluster: Cluster, num_nodes: int) -> str:
    """The cluster in ASTRA-sim's terms: the rates that large transfers get, per GPU.

    Raises InputError for nodes of several types, since a dimension has one rate there.
    """
    if cluster.nodes:
        names = ", ".join(node.name for node in cluster.nodes)
        raise InputError(
            f"cluster '{cluster.name}' has nodes of several types ({names}), and a dimension of ASTRA-sim's "
            "one bandwidth; expected a cluster of one of them"
        )
    link, nic = cluster.node_link, cluster.nic
    node_rate = (
        link.bandwidth * link.efficiency
        if link.kind != "none"
        else (cluster.pcie.bandwidth * cluster.pcie.efficiency)
    )
    network_rate = nic.per_node * nic.bandwidth * nic.efficiency / cluster.gpus_per_node
    local = {"switch": "Switch", "mesh": "FullyConnected", "none": "Switch"}[link.kind]
    segment = link.segment(num_nodes)
    domain = cluster.gpus_per_node * segment
    outer = -(-num_nodes // segment)
    rows: list[tuple[str, int, float, float]] = [(local, min(domain, cluster.gpus_per_node * num_nodes),
                                                 node_rate, link.latency)]  # fmt: skip
    if outer > 1:
        if cluster.network.kind == "torus":
            rows += [("Ring", size, network_rate, cluster.network.latency) for size in cluster.network.shape]
        else:
            rows.append(("Switch", outer, network_rate, nic.latency + cluster.network.latency))
    lines = [f"# {cluster.name}, {num_nodes} nodes; bandwidth in GB/s per NPU, latency in ns"]
    lines.append("topology: [ " + ", ".join(row[0] for row in rows) + " ]")
    lines.append("npus_count: [ " + ", ".join(str(row[1]) for row in rows) + " ]")
    lines.append("bandwidth: [ " + ", ".join(f"{row[2] / 1e9:.6g}" for row in rows) + " ]")
    lines.append("latency: [ " + ", ".join(f"{row[3] * 1e9:.6g}" for row in rows) + " ]")
    return "\n".join(lines) + "\n"


def _positive(
    value: object, key: str, file: str, *, is_integer: bool = False, allows_zero: bool = False
) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not allows_zero) or (is_integer and value != int(value)):  # type: ignore[operator, call-overload]
        number_kind = "whole number" if is_integer else "number"
        raise InputError(f"{file}: {key}: found {str(value)[:40]!r}, expected a positive {number_kind}")
    if value > 1e7:  # type: ignore[operator]
        raise InputError(f"{file}: {key}: {value} is more than hardware has")
    return float(value)  # type: ignore[arg-type]
