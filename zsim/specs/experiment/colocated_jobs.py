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
from zsim.specs.experiment.placement import Placement, resolve_placement
from zsim.specs.experiment.tables import Experiment

_KEYS = ("model", "nodes", "gpus", "placement", "training", "trainer", "strategy")
_FABRIC_KEYS = ("cluster", "faults", "jitter", "cost", "jobs")


def expand_colocated_jobs(experiment: Experiment) -> dict[str, Experiment]:
    """The co-located jobs of `[jobs.NAME]` by name, each as a complete experiment.

    Raises InputError for keys that belong to the shared fabric, and for anything that an experiment refuses.
    """
    return {name: _expand_colocated_job(experiment, name, table) for name, table in experiment.jobs.items()}


def _expand_colocated_job(experiment: Experiment, name: str, table: Mapping[str, Any]) -> Experiment:
    where = f"jobs.{name}"
    for key in table:
        if key in _FABRIC_KEYS:
            raise InputError(f"{where}: '{key}' belongs to the fabric that all jobs share; set it outside")
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key '{key}'{did_you_mean(key, _KEYS)}")
    data: dict[str, Any] = {
        "model": experiment.model,
        "cluster": experiment.cluster,
        "strategy": experiment.strategy.model_dump(),
        **table,
        "training": {**experiment.training.model_dump(), **_table(table, "training", where)},
        "trainer": {**experiment.trainer.model_dump(), **_table(table, "trainer", where)},
    }
    if not {"nodes", "gpus", "placement"} & set(table):
        data |= {"nodes": experiment.nodes, "gpus": experiment.gpus}
    return Experiment.of_data(data, origin=where)


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{where}.{key}: found {value!r}, expected a table")
    return value


def place_jobs(
    experiment: Experiment, colocated_experiments: Mapping[str, Experiment], cluster: Cluster
) -> tuple[Placement, dict[str, Placement]]:
    """The placements of the experiment's main job and of its co-located jobs, on one fabric without shared
    nodes.

    Jobs that name no nodes take free ones, in the order of the tables.
    """
    for name, colocated_experiment in colocated_experiments.items():
        if colocated_experiment.placement.fabric_nodes is not None:
            raise InputError(f"jobs.{name}.placement.fabric_nodes: is the fabric's; set it outside")
    all_experiments = [
        ("", experiment),
        *(
            (f"jobs.{name}: ", colocated_experiment)
            for name, colocated_experiment in colocated_experiments.items()
        ),
    ]
    fabric = experiment.placement.fabric_nodes or _min_fabric_nodes(all_experiments, cluster)
    node_owners: dict[int, str] = {}
    placements = []
    for where, job_experiment in all_experiments:
        table = job_experiment.placement.model_copy(update={"fabric_nodes": fabric})
        placement = resolve_placement(
            table, cluster, job_experiment.nodes, job_experiment.gpus, where, node_owners
        )
        placements.append(placement)
        node_owners |= dict.fromkeys(placement.nodes, where.removesuffix(": ") or "the job itself")
    return placements[0], dict(zip(colocated_experiments, placements[1:], strict=True))


def _min_fabric_nodes(all_experiments: Sequence[tuple[str, Experiment]], cluster: Cluster) -> int:
    """Nodes of the smallest fabric that holds all jobs, including the nodes that they name."""
    placements = [
        resolve_placement(job_experiment.placement, cluster, job_experiment.nodes, job_experiment.gpus, where)
        for where, job_experiment in all_experiments
    ]
    named_sizes = [
        max(placement.nodes) + 1
        for placement, (_, job_experiment) in zip(placements, all_experiments, strict=True)
        if job_experiment.placement.nodes
    ]
    return max(sum(len(placement.nodes) for placement in placements), *named_sizes, 1)
