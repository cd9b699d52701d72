"""Searches for the least or greatest sufficient number: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable

from zsim.errors import ZsimError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits
from zsim.specs.cluster.asked_nodes import asked_nodes
from zsim.specs.cluster.files import cluster_tables
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_MAX_GPUS = 65_536
_MAX_NUMBER = 2**16
_MAX_REFUSED = 100  # consecutive numbers that the experiment does not allow, before the search gives up


def least_number(
    is_enough: Callable[[int], bool],
    first: int,
    end: int,
    allowed: Callable[[int, int], int | None] = lambda start, end: start if start < end else None,
) -> int | None:
    """The least number in [first, end) that is enough; None where none is found. `is_enough` must be
    monotonic: true for all larger numbers too. `allowed` gives the first number in [start, end) that may be
    tried."""
    low, high = first - 1, allowed(first, end)
    while high is not None and not is_enough(high):
        last = end - 1 if high < end - 1 else end
        low, high = high, allowed(min(max(2 * high, high + 1), last), end)
    while high is not None:
        middle = allowed((low + high + 1) // 2, high)
        if middle is None:
            middle = allowed(low + 1, high)
        if middle is None:
            return high
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return None


def least_factor(is_enough: Callable[[float], bool], whole: float | None = None) -> float:
    """The least factor above 1 that is enough, in steps of 1/whole, or to 1 %. Some factor must be enough."""
    low, high = 1.0, 2.0
    while not is_enough(high):
        low, high = high, 2 * high
    step = 1.0 / whole if whole else 0.0
    while high - low > max(step * 1.5, 0.01 * high if not whole else 0.0):
        middle = (low + high) / 2
        if whole:
            middle = round(middle * whole) / whole
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def most_that_fits(experiment_with: Callable[[int], Experiment], most: int = _MAX_NUMBER) -> int:
    """The largest number from 1 to `most` with which the experiment fits, from plans alone; 0 if 1 does not
    fit. A number with which the experiment is invalid counts as not fitting."""

    def is_too_much(number: int) -> bool:
        try:
            return not _fits(experiment_with(number))
        except ZsimError:
            return True

    least = least_number(is_too_much, 1, most + 1)
    return most if least is None else least - 1


def least_gpus(experiment: Experiment) -> int | None:
    """The fewest GPUs of the same cluster on which the job fits, from plans alone; None if it fits on none up
    to 65,536. Only counts that the experiment allows are tried (replicas and batch sizes must divide
    them); of nodes of several types, only multiples of each."""
    job = resolve(experiment)
    if job.cluster.nodes:
        most = max(_MAX_GPUS // job.world_size, 1)
        factor = least_number(lambda times: _fits(_times_as_many(experiment, times)), 1, most + 1)
        return None if factor is None else factor * job.world_size
    per_node: int = job.cluster.gpus_per_node
    inside = [count for count in range(1, per_node) if per_node % count == 0]
    counts: list[int] = [*inside, *range(per_node, _MAX_GPUS + 1, per_node)]

    def allowed(start: int, end: int) -> int | None:
        for place in range(start, min(start + _MAX_REFUSED, end)):
            try:
                resolve(_on(experiment, counts[place]))
            except ZsimError:
                continue
            return place
        return None

    least = least_number(lambda place: _fits(_on(experiment, counts[place])), 0, len(counts), allowed)
    return None if least is None else counts[least]


def _fits(experiment: Experiment) -> bool:
    """Whether the job fits every memory tier of its GPUs and nodes; a job without a plan does not fit."""
    job = resolve(experiment)
    try:
        plan = make_plan(job)
    except ZsimError:
        return False
    return fits(job, plan)


def _times_as_many(experiment: Experiment, times: int) -> Experiment:
    """The experiment on `times` as many nodes of each type."""
    asked = experiment.cluster
    tables = cluster_tables(asked) if isinstance(asked, str) else asked
    nodes = [{**one, "count": one["count"] * times} for one in asked_nodes(tables["nodes"], "cluster")]
    cluster = {**tables, "nodes": nodes}
    whole = {"placement": PlacementTable(), "faults": FaultsTable()}
    return experiment.model_copy(update={"cluster": cluster, "gpus": None, "nodes": None, **whole})


def _on(experiment: Experiment, gpus: int) -> Experiment:
    whole = {"placement": PlacementTable(), "faults": FaultsTable()}
    return experiment.model_copy(update={"gpus": gpus, "nodes": None, **whole})
