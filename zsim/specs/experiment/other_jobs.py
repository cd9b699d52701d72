"""Co-located jobs on the same fabric: `[jobs.NAME]` of an experiment.

[jobs.other]                       # keys that are left out are as in this experiment
nodes = 16                         # the next 16 nodes, unless its placement says which
model = "llama-3-8b"
strategy = { stage = 3 }
[jobs.other.training]
micro_batch_size = 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.placement import Placement, place
from zsim.specs.experiment.tables import Experiment

_KEYS = ("model", "nodes", "gpus", "placement", "training", "trainer", "strategy")
_SHARED = ("cluster", "faults", "jitter", "cost", "jobs")


def neighbours(experiment: Experiment) -> dict[str, Experiment]:
    """The co-located jobs of `[jobs.NAME]` by name, each as a complete experiment.

    Raises InputError for keys that belong to the shared fabric, and for anything that an experiment refuses.
    """
    return {name: _neighbour(experiment, name, table) for name, table in experiment.jobs.items()}


def _neighbour(experiment: Experiment, name: str, table: Mapping[str, Any]) -> Experiment:
    where = f"jobs.{name}"
    for key in table:
        if key in _SHARED:
            raise InputError(f"{where}: '{key}' belongs to the fabric that all jobs share; set it outside")
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key '{key}'{did_you_mean(key, _KEYS)}")
    own: dict[str, Any] = {
        "model": experiment.model,
        "cluster": experiment.cluster,
        "strategy": experiment.strategy.model_dump(),
        **table,
        "training": {**experiment.training.model_dump(), **_table(table, "training", where)},
        "trainer": {**experiment.trainer.model_dump(), **_table(table, "trainer", where)},
    }
    if not {"nodes", "gpus", "placement"} & set(table):
        own |= {"nodes": experiment.nodes, "gpus": experiment.gpus}
    return Experiment.of_data(own, origin=where)


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{where}.{key}: found {value!r}, expected a table")
    return value


def place_together(
    experiment: Experiment, others: Mapping[str, Experiment], cluster: Cluster
) -> tuple[Placement, dict[str, Placement]]:
    """The placements of the experiment's main job and of its co-located jobs, on one fabric without shared
    nodes.

    Jobs that name no nodes take free ones, in the order of the tables.
    """
    for name, other in others.items():
        if other.placement.fabric_nodes is not None:
            raise InputError(f"jobs.{name}.placement.fabric_nodes: is the fabric's; set it outside")
    everyone = [("", experiment), *((f"jobs.{name}: ", other) for name, other in others.items())]
    fabric = experiment.placement.fabric_nodes or _least_fabric(everyone, cluster)
    taken: dict[int, str] = {}
    places = []
    for where, one in everyone:
        table = one.placement.model_copy(update={"fabric_nodes": fabric})
        placement = place(table, cluster, one.nodes, one.gpus, where, taken)
        places.append(placement)
        taken |= dict.fromkeys(placement.nodes, where.removesuffix(": ") or "the job itself")
    return places[0], dict(zip(others, places[1:], strict=True))


def _least_fabric(everyone: Sequence[tuple[str, Experiment]], cluster: Cluster) -> int:
    """Nodes of the smallest fabric that holds all jobs, including the nodes that they name."""
    placements = [place(one.placement, cluster, one.nodes, one.gpus, where) for where, one in everyone]
    named = [
        max(p.nodes) + 1 for p, (_, one) in zip(placements, everyone, strict=True) if one.placement.nodes
    ]
    return max(sum(len(placement.nodes) for placement in placements), *named, 1)
