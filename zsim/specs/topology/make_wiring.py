"""The fabric of a cluster's `[network]`."""

from __future__ import annotations

from collections.abc import Callable

from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.network import Network
from zsim.specs.topology.direct import Dragonfly, Torus
from zsim.specs.topology.link_list import LinkList
from zsim.specs.topology.trees import SingleSwitch, Tree
from zsim.specs.topology.wiring import Cards, Wiring


def make_wiring(cluster: Cluster, num_nodes: int) -> Wiring:
    """The fabric of `num_nodes` nodes that a cluster's `[network]` describes.

    Raises InputError if the numbers of the description do not fit together.
    """
    kinds: dict[str, Callable[[Network, Cards, str], Wiring]] = {
        "single-switch": SingleSwitch,
        "fat-tree": Tree,
        "rail-optimized": Tree,
        "dragonfly": Dragonfly,
        "torus": Torus,
        "links": LinkList,
    }
    cards = Cards(num_nodes, cluster.nic.per_node, cluster.nic.bandwidth)
    return kinds[cluster.network.kind](cluster.network, cards, f"{cluster.name}: network")
