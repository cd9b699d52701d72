"""`nodes` of a cluster file: the types of its nodes, and the number of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
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
                "nodes, or `like`, "
                "the cluster whose nodes these are"
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
            f"{where}: found '{text.strip()}', expected a number of nodes and the name of a GPU or "
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
