"""Orders of the mesh on a cluster: which groups stay within a node under each, and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from zsim.api import simulate
from zsim.errors import ZsimError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.mesh import CONTEXT, DATA, PIPELINE, TENSOR, Mesh

_AXES: Mapping[str, str] = {"tp": TENSOR, "cp": CONTEXT, "dp": DATA, "pp": PIPELINE}
_MOST_FREE = 3  # axes of several ranks; with more of them tensor ranks stay neighbours


@dataclass(frozen=True, slots=True)
class MeshOrder:
    """An order of the mesh, the fastest axis first, and its step."""

    order: str
    nodes: Mapping[str, int]
    """The most nodes that one group of an axis spans, by axis of several ranks."""
    step_seconds: float
    is_given: bool
    """Whether it is the order of the experiment."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "nodes": dict(self.nodes),
            "step_seconds": self.step_seconds,
            "is_given": self.is_given,
        }


def compare_orders(experiment: Experiment, job: Job, step_seconds: float) -> tuple[MeshOrder, ...]:
    """The order of the job's mesh, then others of its axes that have several ranks. The remaining axes stay
    the slowest.

    Of orders that put all groups on as many nodes, the first represents all. Where there is nothing to order
    the result is one order, and without model parallelism it is empty.
    """
    names = [name for name, axis in _AXES.items() if job.mesh.size(axis) > 1]
    if job.parallelism.is_trivial or not names:
        return ()
    configured_order = tuple(
        name for axis in reversed(job.mesh.axes) for name in names if _AXES[name] == axis[0]
    )
    orders = [
        MeshOrder("-".join(configured_order), _nodes(job, job.mesh, names), step_seconds, is_given=True)
    ]
    for order in permutations(names):
        if order == configured_order or (len(names) > _MOST_FREE and order[0] != "tp"):
            continue
        full_order = (*order, *(name for name in _AXES if name not in order))
        axes = tuple(_AXES[name] for name in reversed(full_order))
        nodes = _nodes(job, replace(job.parallelism, order=axes).mesh(job.world_size), names)
        if any(nodes == existing.nodes for existing in orders):
            continue
        try:
            seconds = simulate(_set_order(experiment, full_order)).report.step_seconds
        except ZsimError:
            continue  # experts' ranks, which such an order would tear apart
        orders.append(MeshOrder("-".join(order), nodes, seconds, is_given=False))
    return tuple(orders)


def _set_order(experiment: Experiment, order: tuple[str, ...]) -> Experiment:
    table = experiment.parallelism.model_copy(update={"order": "-".join(order)})
    return experiment.model_copy(update={"parallelism": table})


def _nodes(job: Job, mesh: Mesh, names: list[str]) -> dict[str, int]:
    """The most nodes of a group, by axis. Nodes are filled in the order of ranks."""
    most_nodes = {}
    for name in names:
        groups = mesh.groups(_AXES[name]) // job.gpus_per_node
        most_nodes[_AXES[name]] = int(max(len(np.unique(row)) for row in groups))
    return most_nodes
