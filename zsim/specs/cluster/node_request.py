"""`nodes` of a cluster file: the types of its nodes, and the number of each.

`fabric` and `oversubscription` next to `extends` say the fabric in two words. They take the place of a
`[network]` table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.network import KEYS, SHARED_KEYS, Network
from zsim.specs.presets import gpu_preset_names, topology_preset_names

NODE_KEYS = ("gpu", "gpus_per_node", "node_link", "pcie", "nic", "host")  # what nodes differ in
_ENTRY_KEYS = ("count", "gpu", "like")
_SOME_NODES = re.compile(r"^\s*([0-9]{1,7})\s*x?\s+(\S+)\s*$")


def read_node_entries(nodes: Any, file: str) -> list[dict[str, Any]]:
    """The entries of `nodes`, each with `count` and one of `gpu` and `like`.

    They are as the file's tables, or from text like "2 dgx-h100, 2 dgx-a100-80gb".

    Raises InputError for entries of another shape, and for names of neither a GPU nor a cluster.
    """
    where = f"{file}: nodes"
    if isinstance(nodes, str):
        nodes = [_parse_entry(part, where) for part in nodes.split(",")]
    if not isinstance(nodes, list) or not nodes:
        raise InputError(f'{where}: expected a list of tables, or text like "2 dgx-h100, 2 dgx-a100-80gb"')
    entries = []
    for number, entry in enumerate(nodes):
        entry_path = f"{where}[{number}]"
        if not isinstance(entry, Mapping):
            raise InputError(
                f"{entry_path}: found {entry!r}, expected a table with `count`, and `gpu` or `like`"
            )
        for key in entry:
            if key not in _ENTRY_KEYS:
                hint = did_you_mean(str(key), _ENTRY_KEYS) or f"; expected one of {', '.join(_ENTRY_KEYS)}"
                raise InputError(f"{entry_path}: unknown key '{key}'{hint}")
        if ("gpu" in entry) == ("like" in entry):
            keys_found = "both `gpu` and `like`" if "gpu" in entry else "neither `gpu` nor `like`"
            raise InputError(
                f"{entry_path}: found {keys_found}; expected one: `gpu`, another GPU in this cluster's "
                "nodes, or `like`, the cluster whose nodes these are"
            )
        count = entry.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(f"{entry_path}.count: found {count!r}, expected a number of nodes")
        entries.append({**entry, "count": count})
    return entries


def check_no_unused_keys(stated: Mapping[str, Any], nodes: Any, file: str) -> None:
    """Raises InputError where a file of several types of nodes states what none of these nodes takes from it.

    That is a GPU, and with `like` in every entry anything else of a node.
    """
    entries = read_node_entries(nodes, file)
    used_keys = () if all("like" in entry for entry in entries) else NODE_KEYS[1:]
    for key in NODE_KEYS:
        if key not in stated or key in used_keys:
            continue
        like = next((entry["like"] for entry in entries if "like" in entry), "dgx-h100")
        suggestion = f'`like` a file of your own (extends = "{like}", {key} changed)'
        if key == "gpu":
            suggestion = (
                f'gpu = {{ extends = "h100-sxm-80gb", power_limit = "500 W" }} in its entry, or {suggestion}'
            )
        raise InputError(
            f"{file}: {key}: would change nothing, each type under `nodes` has its own; expected in place: "
            f"{suggestion}"
        )


def refuse_node_counts(text: str) -> None:
    """Raises InputError for text that counts nodes of types, "1 dgx-h100, 1 dgx-a100-80gb", in the place of a
    cluster's name.
    """
    counts = text.split(",")
    if all(_SOME_NODES.match(count) for count in counts):
        like = counts[0].split()[-1]
        raise InputError(
            f"cluster: found '{text}', numbers of nodes of types; they are a cluster's `nodes`: expected "
            f'--cluster {like} --set cluster.nodes="{text}", or in a file cluster = {{ extends = "{like}", '
            f'nodes = "{text}" }}'
        )


def _parse_entry(text: str, where: str) -> dict[str, Any]:
    """An entry of `nodes` from text: "2 dgx-h100", "2x h100-sxm-80gb"."""
    match = _SOME_NODES.match(text)
    if match is None:
        raise InputError(
            f"{where}: found '{text.strip()}', expected a number of nodes and the name of a GPU or a "
            "cluster, like '2 dgx-h100'"
        )
    name = match[2]
    if name.endswith(".toml") or name in topology_preset_names():
        return {"like": name, "count": int(match[1])}
    if name in gpu_preset_names():
        return {"gpu": name, "count": int(match[1])}
    names = (*gpu_preset_names(), *topology_preset_names())
    raise InputError(f"{where}: unknown GPU or cluster '{name}'{did_you_mean(name, names)}")


NETWORK_ALIASES: Mapping[str, str] = {
    "fabric": "the network's shape, in place of a [network] table; the shape's other keys are as in the file "
    "that is extended; left out: that file's shape if it is a tree, else a fat tree",
    "oversubscription": "bandwidth of a leaf's downlinks over that of its uplinks, in place of a [network] "
    "table; left out: 1",
    "nodes_per_leaf": "nodes under one leaf switch, in place of a [network] table; left out: the usual "
    "number, made whole by the uplinks",
}
_TREES = ("fat-tree", "rail-optimized")


def expand_aliases(data: Mapping[str, Any], parent: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The tables of a file with its short form written as a `[network]` table.

    `parent` has the tables of the file that it extends. A shape that is not stated is the parent's if that is
    a tree, else a fat tree. If the nodes of a leaf are not stated, they are the most, up to the usual number,
    that complete uplinks serve.

    Raises InputError if there is a `[network]` table too, no such shape, or nothing but the short form.
    """
    short = {key: data[key] for key in NETWORK_ALIASES if key in data}
    if not short:
        return dict(data)
    if "network" in data:
        raise InputError(
            f"{file}: {', '.join(short)}: found beside a [network] table; expected one or the other"
        )
    if not parent and "gpu" not in data:
        raise InputError(
            f"{file}: found {', '.join(short)} alone, expected the cluster whose nodes they join: "
            'extends = "dgx-h100", another preset, or a file'
        )
    parent_network = parent.get("network")
    parent_network = dict(parent_network) if isinstance(parent_network, Mapping) else {}
    default_kind = parent_network["kind"] if parent_network.get("kind") in _TREES else "fat-tree"
    kind = short.pop("fabric", default_kind)
    if not isinstance(kind, str) or kind not in KEYS:
        raise InputError(
            f"{file}: fabric: found {kind!r}{did_you_mean(str(kind), KEYS)}; expected one of "
            f"{', '.join(KEYS)}"
        )
    oversubscription = short.get("oversubscription")
    if (
        kind in _TREES
        and "nodes_per_leaf" not in short
        and isinstance(oversubscription, int)
        and oversubscription > 1
    ):
        usual_nodes = parent_network.get("nodes_per_leaf", Network.model_fields["nodes_per_leaf"].default)
        if isinstance(usual_nodes, int):
            short["nodes_per_leaf"] = (
                max(usual_nodes // oversubscription, 1) * oversubscription
            )  # so that uplinks are whole
    network = {"source": f"the shape as {file} says in short", "evidence": "assumed", "kind": kind, **short}
    other_keys = {key: value for key, value in data.items() if key not in NETWORK_ALIASES}
    return {**other_keys, "network": network}


def shared_keys_of(network: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The keys of a `[network]` table that belong to another shape too."""
    allowed = (*SHARED_KEYS, *KEYS.get(kind, ()))
    return {key: value for key, value in network.items() if key in allowed}
