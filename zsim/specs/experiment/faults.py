"""`[faults]` of an experiment: degraded links, dead network cards and slow GPUs, by name.

[faults]
dead_nics = ["node3.nic2"]                   # its GPUs use the node's other cards

[faults.links."node5.nic0"]                  # or a switch's cable, an NVLink, a whole tier
bandwidth_fraction = 0.25
added_latency = "5 us"

[faults.slow_gpus]
17 = 1.2                                     # rank 17: kernels take 1.2 times as long
node4 = 1.05                                 # all GPUs of a node, or node4.gpu2 for one of them
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from zsim.arrays import Floats, Ints
from zsim.errors import InputError
from zsim.reading import parse_whole_number
from zsim.specs.cluster.link_names import NODE, find_card, find_links, find_node
from zsim.specs.experiment.placement import Placement
from zsim.specs.lazy_model import FiniteTable, Fraction, StrictTable
from zsim.specs.topology.node_links import Condition, combine_conditions
from zsim.specs.topology.topology import Topology
from zsim.units import Seconds

Slowdown = Annotated[float, Field(ge=1, allow_inf_nan=False)]
_GPU = re.compile(r"^gpu([0-9]{1,9})$")
_MAX_SHOWN = 3  # faults named in a note at most


class LinkFault(FiniteTable):
    """A degraded link."""

    bandwidth_fraction: Fraction = Field(default=1.0, description="what is left of the link's bandwidth")
    added_latency: Seconds = Field(default=0.0, description="added to every message over the link")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.bandwidth_fraction == 1.0 and self.added_latency == 0.0:
            raise ValueError("changes nothing; expected bandwidth_fraction below 1, added_latency, or both")
        return self


class FaultsTable(StrictTable):
    """`[faults]`. `zsim.specs.cluster.link_names` describes the names of links."""

    links: dict[str, LinkFault] = Field(
        default_factory=dict,
        description="degraded links by name, as `zsim topology show` has them; left out: none",
    )
    dead_nics: tuple[str, ...] = Field(
        default=(), description='network cards that do not work, as in "node3.nic2"'
    )
    slow_gpus: dict[str, Slowdown] = Field(
        default_factory=dict,
        description='factor on the duration of kernels, by rank, "node4" or "node4.gpu2"; factors '
        "multiply; left out: none",
    )

    @field_validator("links", mode="before")
    @classmethod
    def _dotted_names(cls, value: Any) -> Any:
        """`node3.nic2` without quotes is parsed as a table in a table."""
        return _flatten(value) if isinstance(value, Mapping) else value

    @field_validator("slow_gpus", mode="before")
    @classmethod
    def _dotted_gpus(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        nested_tables = {k: v for k, v in value.items() if isinstance(v, Mapping)}
        inner = {
            f"{node}.{gpu}": factor
            for node, factors in nested_tables.items()
            for gpu, factor in factors.items()
        }
        return {k: v for k, v in value.items() if k not in nested_tables} | inner


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables into one with dotted keys. A table with a plain value in it is an entry."""
    entries: dict[str, Any] = {}
    for key, value in table.items():
        is_nested = isinstance(value, Mapping) and bool(value)
        if is_nested and all(isinstance(inner, Mapping) for inner in value.values()):
            entries |= _flatten(value, f"{prefix}{key}.")
        else:
            entries[f"{prefix}{key}"] = value
    return entries


def apply_faults(topology: Topology, table: FaultsTable) -> Topology:
    """The topology with the faults of `[faults]`. It is unchanged if they name no link and no card.

    Raises InputError for names that the fabric does not have, and for a node whose cards are all dead.
    """
    if not (table.links or table.dead_nics):
        return topology
    fractions, delays = np.ones(topology.num_links), np.zeros(topology.num_links)
    for name, fault in table.links.items():
        indices = find_links(topology, name, f"faults.links.{name}")
        fractions[indices] *= fault.bandwidth_fraction
        delays[indices] += fault.added_latency
    key = "faults.dead_nics"
    dead = np.array([find_card(topology, name, key) for name in table.dead_nics], dtype=np.int64)
    links = combine_conditions(topology.condition, fractions, delays)
    return topology.apply_condition(Condition(*links, _carriers(topology, dead, key)))


def _carriers(topology: Topology, dead: Ints, where: str) -> Ints:
    """Per network card, the card that carries its traffic.

    A working card carries its own. For a dead card it is the next working card of its node (NCCL 2.21
    src/graph/topo.cc, ncclTopoGetLocalNet: of the equally near cards, the one of the GPU's number).
    """
    nics = topology.cluster.nic.per_node
    carriers = np.arange(topology.num_nodes * nics)
    is_dead = np.zeros(len(carriers), dtype=bool)
    is_dead[dead] = True
    for card in dead.tolist():
        first = card // nics * nics
        other_cards = [first + (card - first + step) % nics for step in range(1, nics)]
        working_cards = [candidate for candidate in other_cards if not is_dead[candidate]]
        if not working_cards and topology.num_nodes == 1:
            continue  # nobody uses it
        if not working_cards:
            node_name = f"node{card // nics}"
            subject = (
                f"all {nics} network cards of {node_name} are"
                if nics > 1
                else f"{node_name}'s only network card is"
            )
            raise InputError(f"{where}: {subject} dead, and nothing can reach the node")
        carriers[card] = working_cards[0]
    return carriers


def idle_faults_note(table: FaultsTable, placements: Mapping[str, Placement]) -> str:
    """A note that names the links and cards of `[faults]` on nodes that no job uses. Empty if there are none.

    `placements` are by job, the experiment's main job first. Node numbers in `[faults]` are the fabric's, not
    a job's. An entry of `slow_gpus` without a rank is an error, see `kernel_slowdowns`.
    """
    used_nodes = {node for placement in placements.values() for node in placement.nodes}
    fault_names = [
        *(f"links.{name}" for name in table.links),
        *(f"dead_nics '{name}'" for name in table.dead_nics),
    ]
    matches = [NODE.match(name) for name in (*table.links, *table.dead_nics)]
    idle_names = [
        f"faults.{name}"
        for name, match in zip(fault_names, matches, strict=True)
        if match is not None and int(match[1]) not in used_nodes
    ]
    if not idle_names:
        return ""
    listing = ", ".join(idle_names[:_MAX_SHOWN]) + (
        f" and {len(idle_names) - _MAX_SHOWN} more" if len(idle_names) > _MAX_SHOWN else ""
    )
    job_nodes = "; ".join(
        f"{name} has {_abridge_nodes(placement.nodes)}" for name, placement in placements.items()
    )
    fabric = next(iter(placements.values())).fabric_nodes
    return f"{listing}: no job is on these nodes of the fabric, so nothing changes; {job_nodes} of {fabric}"


def _abridge_nodes(nodes: Sequence[int]) -> str:
    """Node numbers as text: `node0`, `nodes 0 to 15`, `nodes 0, 8, 16, ..., 120`."""
    if len(nodes) == 1:
        return f"node{nodes[0]}"
    if len(nodes) > 2 and list(nodes) == list(range(nodes[0], nodes[-1] + 1)):
        return f"nodes {nodes[0]} to {nodes[-1]}"
    numbers = [str(node) for node in nodes]
    return "nodes " + ", ".join(numbers if len(nodes) <= 6 else [*numbers[:3], "...", numbers[-1]])


def kernel_slowdowns(
    topology: Topology,
    table: FaultsTable,
    *,
    colocated_topologies: Sequence[Topology] = (),
    is_colocated: bool = False,
) -> Floats:
    """Per rank, the factor by which its kernels take longer.

    `colocated_topologies` are the same fabric with the ranks of each co-located job. With `is_colocated`,
    `topology` is that of a co-located job. Entries by rank count the main job's ranks, so they are skipped
    then, and nodes without a rank of the job are no error.

    Raises InputError for a rank that the main job does not have, and for a node or GPU without a rank of any
    job.
    """
    factors = np.ones(topology.world_size)
    for name, factor in table.slow_gpus.items():
        if is_colocated and name.isdecimal():
            continue
        where = f"faults.slow_gpus.{name}"
        ranks = _select_ranks(topology, name, where)
        if (
            not len(ranks)
            and not is_colocated
            and not any(len(_select_ranks(fabric, name, where)) for fabric in colocated_topologies)
        ):
            raise InputError(f"{where}: no rank of the job is on {name}")
        factors[ranks] *= factor
    return factors


def _select_ranks(topology: Topology, name: str, where: str) -> Ints:
    if name.isdecimal():
        rank = parse_whole_number(name)
        if rank is None or rank >= topology.world_size:
            raise InputError(f"{where}: the job has ranks 0 to {topology.world_size - 1}")
        return np.array([rank])
    match = NODE.match(name)
    gpu = _GPU.match(match[2]) if match is not None and match[2] else None
    if match is None or (match[2] and gpu is None):
        raise InputError(f"{where}: expected a rank's number, or a node or GPU like 'node4', 'node4.gpu2'")
    node = find_node(topology, int(match[1]), where)
    is_named = topology.node_of(topology.slots) == node
    if gpu is not None:
        is_named &= topology.slots % topology.gpus_per_node == int(gpu[1])
    return np.flatnonzero(is_named)
