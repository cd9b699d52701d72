"""The Python face: experiments in, plans, traces and reports out."""

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
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace


@dataclass(frozen=True)
class Result:
    """One simulated step: what was asked, what the ranks did, what happened, what it means."""

    job: Job
    plan: Plan
    trace: Trace
    report: Report


def make_plan(experiment: Experiment) -> Plan:
    """What every rank will do in one steady step: ops, bytes, streams; no simulation."""
    return make.make_plan(resolve(experiment))


@garbage_collection.paused()
def simulate(experiment: Experiment, *, unfold: bool = False) -> Result:
    """Simulate one steady step; `unfold` simulates every rank instead of one per class.

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same: `report.fits` is False; what would do
    is zsim.study.advice's to say.
    """
    began = time.perf_counter()
    job = resolve(experiment)
    step = simulate_step(job, unfold=unfold)
    wall_seconds = time.perf_counter() - began
    report = report_of_step(step, wall_seconds, step_variants(step.outcome))
    return Result(job, step.outcome.plan, step.outcome.trace, report)
