"""`nodes` of a cluster file: the types of its nodes, and the number of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.presets import gpu_preset_names, topology_preset_names

OF_NODES = ("gpu", "gpus_per_node", "node_link", "pcie", "nic", "host")  # what nodes differ in
_KEYS = ("count", "gpu", "like")
_SOME_NODES = re.compile(r"^\s*([0-9]{1,7})\s*x?\s+(\S+)\s*$")


def asked_nodes(nodes: Any, file: str) -> list[dict[str, Any]]:
    """The entries of `nodes`, each with `count` and one of `gpu` and `like`.

    They are as the file's tables, or from text like "2 dgx-h100, 2 dgx-a100-80gb".

    Raises InputError for entries of another shape, and for names of neither a GPU nor a cluster.
    """
    where = f"{file}: nodes"
    if isinstance(nodes, str):
        nodes = [_entry_of(part, where) for part in nodes.split(",")]
    if not isinstance(nodes, list) or not nodes:
        raise InputError(f'{where}: expected a list of tables, or text like "2 dgx-h100, 2 dgx-a100-80gb"')
    found = []
    for number, entry in enumerate(nodes):
        place = f"{where}[{number}]"
        if not isinstance(entry, Mapping):
            raise InputError(f"{place}: found {entry!r}, expected a table with `count`, and `gpu` or `like`")
        for key in entry:
            if key not in _KEYS:
                hint = did_you_mean(str(key), _KEYS) or f"; expected one of {', '.join(_KEYS)}"
                raise InputError(f"{place}: unknown key '{key}'{hint}")
        if ("gpu" in entry) == ("like" in entry):
            has = "both `gpu` and `like`" if "gpu" in entry else "neither `gpu` nor `like`"
            raise InputError(
                f"{place}: found {has}; expected one: `gpu`, another GPU in this cluster's nodes, or `like`, "
                "the cluster whose nodes these are"
            )
        count = entry.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(f"{place}.count: found {count!r}, expected a number of nodes")
        found.append({**entry, "count": count})
    return found


def check_nodes_take(stated: Mapping[str, Any], nodes: Any, file: str) -> None:
    """Raises InputError where a file of several types of nodes states what none of these nodes takes from it.

    That is a GPU, and with `like` in every entry anything else of a node.
    """
    entries = asked_nodes(nodes, file)
    taken = () if all("like" in entry for entry in entries) else OF_NODES[1:]
    for key in OF_NODES:
        if key not in stated or key in taken:
            continue
        like = next((entry["like"] for entry in entries if "like" in entry), "dgx-h100")
        own = f'`like` a file of your own (extends = "{like}", {key} changed)'
        if key == "gpu":
            own = f'gpu = {{ extends = "h100-sxm-80gb", power_limit = "500 W" }} in its entry, or {own}'
        raise InputError(
            f"{file}: {key}: would change nothing, each type under `nodes` has its own; expected in place: "
            f"{own}"
        )


def check_is_name(text: str) -> None:
    """Raises InputError for text that counts nodes of types, "1 dgx-h100, 1 dgx-a100-80gb", in the place of a
    cluster's name.
    """
    parts = text.split(",")
    if all(_SOME_NODES.match(part) for part in parts):
        like = parts[0].split()[-1]
        raise InputError(
            f"cluster: found '{text}', numbers of nodes of types; they are a cluster's `nodes`: expected "
            f'--cluster {like} --set cluster.nodes="{text}", or in a file cluster = {{ extends = "{like}", '
            f'nodes = "{text}" }}'
        )


def _entry_of(part: str, where: str) -> dict[str, Any]:
    """An entry of `nodes` from text: "2 dgx-h100", "2x h100-sxm-80gb"."""
    match = _SOME_NODES.match(part)
    if match is None:
        raise InputError(
            f"{where}: found '{part.strip()}', expected a number of nodes and the name of a GPU or "
            "a cluster, "
            "like '2 dgx-h100'"
        )
    name = match[2]
    if name.endswith(".toml") or name in topology_preset_names():
        return {"like": name, "count": int(match[1])}
    if name in gpu_preset_names():
        return {"gpu": name, "count": int(match[1])}
    names = (*gpu_preset_names(), *topology_preset_names())
    raise InputError(f"{where}: unknown GPU or cluster '{name}'{did_you_mean(name, names)}")
