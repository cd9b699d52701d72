"""The Python interface: experiments in, plans, traces and reports out."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zsim import garbage_collection
from zsim.engine.micro_batches import simulate_step
from zsim.explain.report_of import report_of_step
from zsim.explain.variants import step_variants
from zsim.plan import make
from zsim.plan.ops import Plan
from zsim.report.report import Report
from zsim.report.trust.trust import Trust, trust_of
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace


@dataclass(frozen=True)
class Result:
    """One simulated step: the resolved job, the plan of the ranks, the trace, and the report on it."""

    job: Job
    plan: Plan
    trace: Trace
    report: Report

    @property
    def trust(self) -> Trust:
        """Should I believe this? The nearest validated runs, and what the step rests on."""
        return trust_of(self.report)


def make_plan(experiment: Experiment) -> Plan:
    """The plan of one steady step for every rank: ops, bytes, streams; nothing is simulated."""
    return make.make_plan(resolve(experiment))


@garbage_collection.paused()
def simulate(experiment: Experiment, *, unfold: bool = False) -> Result:
    """Simulate one steady step; `unfold` simulates every rank instead of one representative per class.

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same, with `report.fits` False;
    zsim.study.advice finds changes that would make it fit.
    """
    began = time.perf_counter()
    job = resolve(experiment)
    step = simulate_step(job, unfold=unfold)
    wall_seconds = time.perf_counter() - began
    report = report_of_step(step, wall_seconds, step_variants(step.outcome))
    return Result(job, step.outcome.plan, step.outcome.trace, report)
