"""The fabric of a topology file in two words: `fabric` and `oversubscription` next to `extends`.

They take the place of a `[network]` table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.network import KEYS, SHARED_KEYS, Network

NETWORK_ALIASES: Mapping[str, str] = {
    "fabric": "the shape of the network alone, in place of a [network] table; its other keys are as in the "
    "file that is extended, where they belong to the shape; left out: that of the extended file "
    "if it is a tree, else a fat tree",
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
