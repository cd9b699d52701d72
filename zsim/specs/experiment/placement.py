"""The placement of a job in its fabric: which nodes, and how many GPUs on each.

[placement]
fabric_nodes = 128                 # the whole fabric. Left out: as many nodes as the job needs
nodes = "0-7,32-39"                # these nodes, in this order, or let a policy choose:
policy = "spread"                  # packed (the first nodes), spread over the pods (or leaves), random
gpus_per_node = [8, 8, 4]          # uneven nodes: GPUs used on each of them
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from zsim.arrays import Ints
from zsim.errors import InputError
from zsim.specs.cluster.cluster import Cluster, NodeLink
from zsim.specs.lazy_model import StrictTable
from zsim.specs.topology.node_links import listed_nodes

Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[int, Field(ge=0, strict=True)]
_RANGE = re.compile(r"^\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?$")
MAX_NODES = 2**20
MAX_GPUS = 2**20


class PlacementTable(StrictTable):
    """`[placement]`: which nodes of its fabric a job runs on.

    All three policies number ranks by node. "spread" takes nodes at even intervals where the fabric has
    neither pods nor leaves.
    """

    fabric_nodes: Count | None = Field(
        default=None,
        description="nodes of the whole fabric; left out: those of the job",
    )
    nodes: tuple[Number, ...] | None = Field(
        default=None,
        description='nodes in the order of ranks, as a list or "0-7,32-39"; left out: by `policy`',
    )
    policy: Literal["packed", "spread", "random"] = Field(
        default="packed",
        description="the first nodes, equally many of every pod or leaf, or drawn by `seed`",
    )
    seed: Number | None = Field(
        default=None,
        description='seed of policy "random"; left out: not used',
    )
    gpus_per_node: tuple[Count, ...] | None = Field(
        default=None,
        description="GPUs used on each node; left out: equally many",
    )

    @field_validator("nodes", mode="before")
    @classmethod
    def _node_numbers(cls, value: Any) -> Any:
        return parse_node_numbers(str(value)) if isinstance(value, str | int) else value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.nodes is not None and "policy" in self.model_fields_set:
            raise ValueError("nodes and policy both say which nodes; expected one of them")
        if self.policy == "random" and self.seed is None:
            raise ValueError("policy 'random' needs a seed")
        if self.policy != "random" and self.seed is not None:
            raise ValueError("seed has no effect without policy = 'random'")
        if self.nodes is not None and len(set(self.nodes)) < len(self.nodes):
            duplicate = next(node for node in self.nodes if self.nodes.count(node) > 1)
            raise ValueError(f"nodes: node {duplicate} is named twice")
        return self


def parse_node_numbers(text: str) -> tuple[int, ...]:
    """`"0-2,7"` -> (0, 1, 2, 7). Raises ValueError for anything but a list of numbers and ranges."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.match(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= MAX_NODES:
            raise ValueError(f"found {text!r}, expected node numbers like '0-7,32-39'")
        numbers += range(first, last + 1)
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a job in its fabric, and the GPUs that it uses on each."""

    fabric_nodes: int
    """Number of nodes of the whole fabric."""
    nodes: tuple[int, ...]
    """`nodes[i]` is the number in the fabric of the job's i-th node."""
    gpus: tuple[int, ...]
    """`gpus[i]` is the number of GPUs that the job uses on its i-th node."""

    @property
    def world_size(self) -> int:
        return sum(self.gpus)

    @property
    def gpus_per_node(self) -> int:
        """Maximum number of GPUs used on a node."""
        return max(self.gpus)

    @property
    def is_plain(self) -> bool:
        """Whether the job fills the first nodes of its fabric evenly, so that rank r is on slot r."""
        return self.nodes == tuple(range(self.fabric_nodes)) and len(set(self.gpus)) == 1

    def nodes_per_domain(self, link: NodeLink) -> int:
        """The nodes that the job has in each NVLink domain it fills: a domain's, or those of a segment."""
        return link.segment(self.fabric_nodes) if self.is_plain else link.nodes_per_domain

    def slots(self, gpus_per_node: int) -> Ints:
        """The slot of every rank in a fabric that uses `gpus_per_node` GPUs of every node."""
        counts = np.array(self.gpus, dtype=np.int64)
        nodes = np.repeat(np.array(self.nodes, dtype=np.int64), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        return nodes * gpus_per_node + np.arange(len(nodes)) - firsts


def resolve_placement(
    table: PlacementTable,
    cluster: Cluster,
    nodes: int | None,
    gpus: int | None,
    where: str = "",
    node_owners: Mapping[int, str] | None = None,
) -> Placement:
    """The placement that an experiment's `nodes`, `gpus` and `[placement]` describe.

    `node_owners` maps the nodes of co-located jobs to the job's name. Raises InputError, beginning with
    `where`, if they contradict each other, the cluster or `node_owners`, and for more GPUs than zsim
    simulates.
    """
    node_owners = node_owners or {}
    if cluster.nodes:
        table, nodes = _apply_listed_nodes(table, cluster, nodes, gpus, where)
    if table.gpus_per_node is not None:
        counts = _uneven_counts(table, table.gpus_per_node, cluster, nodes, gpus, where)
    else:
        num_listed = None if table.nodes is None else len(table.nodes)
        if nodes is None and gpus is None:
            nodes = num_listed
        num_nodes, per_node = _even_shape(cluster, nodes, gpus, where)
        check_gpu_count(num_nodes * per_node, where)
        counts = (per_node,) * num_nodes
    if table.nodes is not None and len(table.nodes) != len(counts):
        raise InputError(
            f"{where}placement.nodes: found {len(table.nodes)} nodes, but the job has {len(counts)}"
        )
    min_fabric_nodes = max(table.nodes) + 1 if table.nodes else len(counts)
    fabric = table.fabric_nodes or min_fabric_nodes
    if fabric > MAX_NODES:
        key, value = (
            ("fabric_nodes", fabric) if table.fabric_nodes else ("nodes", f"node {min_fabric_nodes - 1}")
        )
        raise InputError(f"{where}placement.{key}: found {value}, expected at most {MAX_NODES:,} nodes")
    for node in table.nodes or ():
        if node in node_owners:
            raise InputError(f"{where}placement.nodes: node {node} is taken by {node_owners[node]}")
    free_nodes = [node for node in range(fabric) if node not in node_owners]
    if fabric < min_fabric_nodes or (table.nodes is None and len(free_nodes) < len(counts)):
        requirement = f"node {min_fabric_nodes - 1}" if table.nodes else f"a job of {len(counts)} nodes"
        owners_phrase = f" besides {', '.join(dict.fromkeys(node_owners.values()))}" if node_owners else ""
        raise InputError(
            f"{where}placement.fabric_nodes: found {fabric}, too few for {requirement}{owners_phrase}"
        )
    return Placement(fabric, table.nodes or _choose_nodes(table, cluster, free_nodes, len(counts)), counts)


def _apply_listed_nodes(
    table: PlacementTable, cluster: Cluster, nodes: int | None, gpus: int | None, where: str
) -> tuple[PlacementTable, int | None]:
    """The table and the number of nodes on a cluster that lists its nodes.

    Its nodes are the fabric's. The job uses all of them, unless the table says which it uses.
    """
    total = len(cluster.node_type_indices)
    if table.fabric_nodes not in (None, total):
        raise InputError(
            f"{where}placement.fabric_nodes: found {table.fabric_nodes}, but {listed_nodes(cluster)}; leave "
            "it out, or change the counts of the cluster's nodes"
        )
    chooses = table.nodes is not None or "policy" in table.model_fields_set
    requested = (
        nodes if nodes is not None else None if table.gpus_per_node is None else len(table.gpus_per_node)
    )
    if requested is None and gpus is not None:
        requested = -(-gpus // cluster.gpus_per_node)
    if not chooses and requested not in (None, total):
        numbers_hint = (
            f', or the numbers of those that it uses: placement.nodes = "{_first_numbers(requested)}"'
        )
        raise InputError(
            f"{where}nodes: found {requested:,}, but {listed_nodes(cluster)}; expected {total:,}, or other "
            f"counts in the cluster{numbers_hint if requested < total else ''}"
        )
    if nodes is None and gpus is None and not chooses and table.gpus_per_node is None:
        nodes = total
    return table.model_copy(update={"fabric_nodes": total}), nodes


def _first_numbers(count: int) -> str:
    return "0" if count == 1 else f"0-{count - 1}"


def check_gpu_count(count: int, where: str = "") -> None:
    """Raises InputError, beginning with `where`, for more GPUs than zsim simulates."""
    if count > MAX_GPUS:
        raise InputError(f"{where}gpus: found {count:,}, expected at most {MAX_GPUS:,}")


def _even_shape(cluster: Cluster, nodes: int | None, gpus: int | None, where: str) -> tuple[int, int]:
    """(nodes, GPUs used per node)."""
    per_node = cluster.gpus_per_node
    if gpus is None:
        return nodes or 1, per_node
    if nodes is not None:
        if gpus % nodes or gpus // nodes > per_node:
            raise InputError(
                f"{where}gpus: found {gpus} on {nodes} nodes of '{cluster.name}' with {per_node} GPUs each; "
                f"expected {nodes * per_node}, or fewer that divide evenly (or placement.gpus_per_node)"
            )
        return nodes, gpus // nodes
    if gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        floor = gpus // per_node
        raise InputError(
            f"{where}gpus: found {gpus}, expected a multiple of the {per_node} GPUs of a '{cluster.name}' "
            f"node ({floor * per_node} or {(floor + 1) * per_node}); for uneven nodes, list the GPUs of each "
            "in placement.gpus_per_node"
        )
    return gpus // per_node, per_node


def _uneven_counts(
    table: PlacementTable,
    counts: Sequence[int],
    cluster: Cluster,
    nodes: int | None,
    gpus: int | None,
    where: str,
) -> tuple[int, ...]:
    key = f"{where}placement.gpus_per_node"
    too_many = [count for count in counts if count > cluster.gpus_per_node]
    if too_many:
        raise InputError(
            f"{key}: found {too_many[0]}, but a '{cluster.name}' node has {cluster.gpus_per_node} GPUs"
        )
    expected = nodes if nodes is not None else len(table.nodes) if table.nodes is not None else len(counts)
    if len(counts) != expected:
        raise InputError(f"{key}: found {len(counts)} nodes, but the job has {expected}")
    check_gpu_count(sum(counts), where)
    if gpus is not None and gpus != sum(counts):
        raise InputError(f"{key}: found {sum(counts)} GPUs in all, but gpus is {gpus}")
    return tuple(counts)


def _choose_nodes(
    table: PlacementTable, cluster: Cluster, free_nodes: Sequence[int], count: int
) -> tuple[int, ...]:
    """The free nodes that the policy chooses, in the order of their numbers, as schedulers list them."""
    if table.policy == "random":
        generator = np.random.default_rng(table.seed)
        return tuple(sorted(generator.choice(np.array(free_nodes), count, replace=False).tolist()))
    if table.policy == "packed":
        return tuple(free_nodes[:count])
    network = cluster.network
    size = network.nodes_per_leaf * (network.leaves_per_pod if network.levels == 3 else 1)
    size = size if network.kind in ("fat-tree", "rail-optimized") else 1
    if size == 1:  # no pods: at even intervals
        return tuple(free_nodes[number * len(free_nodes) // count] for number in range(count))
    pods: dict[int, list[int]] = {}
    for node in free_nodes:
        pods.setdefault(node // size, []).append(node)
    order = [pod[turn] for turn in range(size) for pod in pods.values() if turn < len(pod)]
    return tuple(sorted(order[:count]))
