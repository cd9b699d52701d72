"""Simulate a step. For a job that does not fit, also say on how many GPUs or with which switch it would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim import api
from zsim.engine.simulator import Simulator
from zsim.report.memory import Remedy
from zsim.report.report import Report
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment


def simulate(
    experiment: Experiment, *, unfold: bool = False, on_job: Callable[[Job], None] | None = None
) -> api.Result:
    """Simulate one steady step. With `unfold` every rank is simulated instead of one representative per
    class. `on_job` is called with the job before it is simulated.

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same: `report.fits` is False, and
    `report.out_of_memory` says what would make it fit.
    """
    simulator = Simulator()
    result = api.simulate(experiment, unfold=unfold, simulator=simulator, on_job=on_job)
    return replace(result, report=add_advice(result.report, experiment, simulator))


def add_advice(report: Report, experiment: Experiment, simulator: Simulator | None = None) -> Report:
    """The report. If the job does not fit, the least number of GPUs and the remedy (fewest switches) that
    make it fit are added. `simulator` is the one that simulated the report's step.
    """
    shortage = report.out_of_memory
    if shortage is None:
        return report
    from zsim.study.tune.remedy import tried_changes

    num_gpus, remedy = advice(experiment, simulator)
    tried = tried_changes(experiment)
    return replace(report, out_of_memory=replace(shortage, least_gpus=num_gpus, remedy=remedy, tried=tried))


def advice(experiment: Experiment, simulator: Simulator | None = None) -> tuple[int | None, Remedy | None]:
    """The least number of GPUs on which an experiment fits that does not fit as it is, and the fewest
    switches with which it fits. `simulator` is the one that planned the step that does not fit, so that its
    plan is not made again.
    """
    from zsim.study.search import least_gpus
    from zsim.study.tune.remedy import remedy_of

    simulator = simulator or Simulator()
    return least_gpus(experiment, simulator), remedy_of(experiment, simulator)
