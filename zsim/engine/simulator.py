"""The simulations of one study: files, plans and outcomes that its jobs have in common are made once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.ops import Plan
from zsim.plan.plans import Plans
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.library import Library

_MAX_SPANS = 400_000  # of all traces that are kept, in sum


# Fields of a job that no simulation reads where the plan is known: the request, and what is only reported.
_NOT_SIMULATED = {"experiment", "strategy", "notes", "cost"}


class Simulator:
    """Resolves, plans and simulates the jobs of one study. Each result is the same as if the job were
    simulated in isolation.
    """

    def __init__(self) -> None:
        self._library = Library()
        self._plans = Plans()
        self._outcomes: list[Outcome] = []  # that used last at the end

    def cluster(self, source: str | dict[str, Any]) -> Cluster:
        """A cluster by name, path or tables. Raises InputError for an unknown one."""
        return self._library.cluster(source)

    def job(self, experiment: Experiment) -> Job:
        """The experiment resolved. Each file is read once. Raises what `resolve` raises."""
        return resolve(experiment, self._library)

    def plan(self, job: Job) -> Plan:
        """The job's plan. Raises what `make_plan` raises."""
        return self._plans.of(job)

    def step(self, job: Job) -> SimulatedStep:
        """One steady step. Raises what `simulate_step` raises."""
        return simulate_step(job, simulate=self.outcome)

    def outcome(self, job: Job, *, unfold: bool = False) -> Outcome:
        """The outcome of one steady step. Jobs that differ only in settings without effect share it, unless
        every rank is simulated (`unfold`). Raises what `simulate_job` raises.
        """
        if unfold:
            return simulate_job(job, unfold=True, plans=self._plans)
        plan = self.plan(job)
        for index, cached in enumerate(self._outcomes):
            if cached.plan is plan and _differ_only_in_strategy(cached.job, job):
                self._outcomes.append(self._outcomes.pop(index))
                return replace(cached, job=job)
        outcome = simulate_job(job, plans=self._plans)
        self._outcomes.append(outcome)
        total = sum(len(cached.trace) for cached in self._outcomes)
        while total > _MAX_SPANS:
            total -= len(self._outcomes.pop(0).trace)
        return outcome


def _differ_only_in_strategy(job: Job, cached_job: Job) -> bool:
    """Whether two jobs that have one plan simulate the same: neither shares its fabric, and they are equal in
    everything that a simulation may read of a job besides its plan.
    """
    if job.colocated_jobs or cached_job.colocated_jobs:
        return False
    read = [field.name for field in fields(Job) if field.name not in _NOT_SIMULATED]
    return all(getattr(job, name) == getattr(cached_job, name) for name in read)
