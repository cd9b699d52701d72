"""The fewest GPUs that a job fits on, from plans alone."""

from __future__ import annotations

from zsim.errors import ZsimError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_MOST_GPUS = 65536


def least_gpus(experiment: Experiment) -> int | None:
    """The fewest GPUs of the same cluster on which the job fits; None when none up to 65,536 do.

    Only counts that the experiment allows are tried (replicas and batch sizes must divide them): doubling
    until one fits, then halving what lies between it and the last that is too small.
    """
    per_node: int = resolve(experiment).cluster.gpus_per_node
    inside = [count for count in range(1, per_node) if per_node % count == 0]
    counts: list[int] = [*inside, *range(per_node, _MOST_GPUS + 1, per_node)]
    low, high = -1, _first_allowed(experiment, counts, 0, len(counts))
    while high is not None and not _fits(experiment, counts[high]):
        low, high = high, _first_allowed(experiment, counts, max(2 * high, high + 1), len(counts))
    if high is None:
        return None
    while True:
        middle = _first_allowed(experiment, counts, (low + high + 1) // 2, high)
        if middle is None:
            middle = _first_allowed(experiment, counts, low + 1, high)
        if middle is None:
            return counts[high]
        low, high = (low, middle) if _fits(experiment, counts[middle]) else (middle, high)


def _first_allowed(experiment: Experiment, counts: list[int], start: int, end: int) -> int | None:
    """The first place in [start, end) whose count the experiment allows; a hundred in a row are tried."""
    for place in range(start, min(start + 100, end)):
        try:
            resolve(_on(experiment, counts[place]))
        except ZsimError:
            continue
        return place
    return None


def _fits(experiment: Experiment, gpus: int) -> bool:
    """Whether the job fits on every tier of so many GPUs and their nodes; one that has no plan does not."""
    job = resolve(_on(experiment, gpus))
    try:
        plan = make_plan(job)
    except ZsimError:
        return False
    return fits(job, plan)


def _on(experiment: Experiment, gpus: int) -> Experiment:
    whole = {"placement": PlacementTable(), "faults": FaultsTable()}
    return experiment.model_copy(update={"gpus": gpus, "nodes": None, **whole})
