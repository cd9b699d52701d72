"""A step that is asked of the engine: a job's plan on its places of a network."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.arrays import Floats
from zsim.plan.ops import Plan
from zsim.plan.passes.repeated_step import is_drained, repeat_step
from zsim.specs.experiment.job import Job, job_topology, slowdowns_of
from zsim.specs.topology.topology import Topology


@dataclass(frozen=True)
class StepRequest:
    """A step to simulate."""

    job: Job
    plan: Plan
    """The plan of one step."""
    topology: Topology
    """The positions of its ranks."""
    slowdowns: Floats
    """Per rank, the factor on kernels' seconds."""
    is_steady: bool = True
    """The step follows other steps. Otherwise it starts from an idle machine."""
    is_serial: bool = False
    """Kernels and collectives run one after the other."""
    is_for_network: bool = False
    """The step serves to compare fabrics: groups that do the same are as slow as the slowest, and torch's
    allocator has room.
    """

    @classmethod
    def of(cls, job: Job, plan: Plan) -> StepRequest:
        """A steady step of a job on its cluster."""
        topology = job_topology(job)
        return cls(job, plan, topology, slowdowns_of(job, topology))

    @property
    def repeated_plan(self) -> Plan:
        """The plan as often in a row as a step needs to be steady: once where it ends with all work done."""
        if not self.is_steady or self.plan.memoize(is_drained):
            return self.plan
        return self.plan.memoize(repeat_step)
