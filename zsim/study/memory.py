"""Who holds a GPU's memory: the profile of an experiment, without simulating it."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.engine.capacity import usable_bytes
from zsim.engine.record import framework_memory
from zsim.plan.make import make_plan
from zsim.report.memory_profile import MemoryProfile, memory_profile
from zsim.specs.experiment import Experiment
from zsim.specs.job import Job, resolve


@dataclass(frozen=True)
class Profiled:
    """A job and the memory of its fullest GPU over a step; `capacity_bytes` is what tensors may have."""

    job: Job
    profile: MemoryProfile
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.profile.peak.total <= self.capacity_bytes


def profile_memory(experiment: Experiment) -> Profiled:
    """Add up what the plan allocates and frees; exactly what a simulation's peak is.

    Raises InputError and NotSimulatedError as `simulate` does.
    """
    job = resolve(experiment)
    plan = make_plan(job)
    return Profiled(job, memory_profile(plan, [framework_memory(job, plan)]), usable_bytes(job.cluster))
