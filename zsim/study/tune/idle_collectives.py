"""Seconds of a collective in one group of its kind, on links that nothing else uses."""

from __future__ import annotations

import numpy as np

from zsim.fabric.algorithms.methods import CallKind, call_kind
from zsim.fabric.fabric import Fabric
from zsim.fabric.idle import idle_fabric
from zsim.plan.ops import Collective, Group
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.strategy.mesh import CONTEXT, DATA, TENSOR
from zsim.specs.topology.topology import Topology

_AXES = {TENSOR: (TENSOR,), CONTEXT: (CONTEXT,), DATA: (DATA, CONTEXT)}


class IdleCollectives:
    """Lower bounds on collectives: no step runs one faster than alone in the first group of its kind. Each is
    evaluated once for jobs of one cluster."""

    def __init__(self) -> None:
        self._topologies: dict[tuple[str, int, int], Topology] = {}
        self._fabrics: dict[tuple[tuple[str, int, int], bytes, str, CallKind], Fabric] = {}

    def seconds(self, job: Job, work: Collective) -> float:
        """Seconds of the collective, which is in the group "tensor", "context" or "data"; 0 in others."""
        axes = _AXES.get(work.group)
        if axes is None or job.mesh.size(*axes) == 1:
            return 0.0
        return self._fabric(job, job.mesh.groups(*axes)[:1], work).transfer(work, 0).seconds_alone

    def _fabric(self, job: Job, members: np.ndarray, work: Collective) -> Fabric:
        """The fabric for collectives like `work`."""
        place = job.cluster.name, job.num_nodes, job.gpus_per_node
        key = place, members.tobytes(), work.group, call_kind(work)
        if key not in self._fabrics:
            if place not in self._topologies:
                self._topologies[place] = job_topology(job)
            group = Group(work.group, members)
            self._fabrics[key] = idle_fabric(self._topologies[place], group, [work])
        return self._fabrics[key]
