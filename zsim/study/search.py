"""Searches for the least or greatest sufficient number: doubling, then bisection.

`simulate` uses them: for a job that does not fit, it also says on how many GPUs or with which switch it
would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite

from zsim import api
from zsim.engine.micro_batches import shorten_micro_batches
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.plan.memory.capacity import fill_ratio
from zsim.report.memory import Remedy
from zsim.report.report import Report
from zsim.specs.cluster.files import cluster_tables
from zsim.specs.cluster.node_request import read_node_entries
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.tables import Experiment

_MAX_GPUS = 65_536
_MAX_NUMBER = 2**16
_MAX_REFUSED = 100  # consecutive numbers that the experiment does not allow, before the search gives up


def least_number(is_enough: Callable[[int], bool], first: int, end: int) -> int | None:
    """The least number in [first, end) that is enough, or None if there is none.

    `is_enough` must be monotonic: true for all larger numbers too.
    """
    low, high = first - 1, first
    while high < end and not is_enough(high):
        low, high = high, min(max(2 * high, high + 1), end - 1 if high < end - 1 else end)
    while high < end and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high if high < end else None


def least_factor(is_enough: Callable[[float], bool], num_units: float | None = None) -> float:
    """The least factor above 1 that is enough, to 1 %, or in steps of 1 / `num_units` where that is given.
    Some factor must be enough.
    """
    low, high = 1.0, 2.0
    while not is_enough(high):
        low, high = high, 2 * high
    step = 1.0 / num_units if num_units else 0.0
    while high - low > max(step * 1.5, 0.01 * high if not num_units else 0.0):
        middle = (low + high) / 2
        if num_units:
            middle = round(middle * num_units) / num_units
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def largest_fitting(experiment_with: Callable[[int], Experiment], upper_bound: int = _MAX_NUMBER) -> int:
    """The largest number from 1 to `upper_bound` with which the experiment fits, from plans alone, or 0 if 1
    does not fit. A number with which the experiment is invalid counts as not fitting.
    """

    def is_too_much(number: int) -> bool:
        try:
            return _load(experiment_with(number), Simulator()) > 1
        except ZsimError:
            return True

    first_failing = least_number(is_too_much, 1, upper_bound + 1)
    return upper_bound if first_failing is None else first_failing - 1


def least_gpus(experiment: Experiment, simulator: Simulator | None = None) -> int | None:
    """The fewest GPUs of the same cluster on which an experiment fits that does not fit on its configured
    number. The answer comes from plans alone, and is None if no number up to 65,536 is enough.

    Only counts that the experiment allows are tried, since replicas and batch sizes must divide them. With
    nodes of several types, only multiples of each type are tried.
    """
    simulator = simulator or Simulator()
    job = simulator.job(experiment)
    world, per_node, is_mixed = job.world_size, job.cluster.gpus_per_node, bool(job.cluster.nodes)
    if is_mixed:
        candidates: Sequence[int] = range(2 * world, _MAX_GPUS + 1, world)
    elif world < per_node:
        divisors = [count for count in range(world + 1, per_node) if per_node % count == 0]
        candidates = [*divisors, *range(per_node, _MAX_GPUS + 1, per_node)]
    else:
        candidates = range((world // per_node + 1) * per_node, _MAX_GPUS + 1, per_node)

    def resize(count: int) -> Experiment:
        return _multiply_nodes(experiment, count // world) if is_mixed else _set_gpus(experiment, count)

    def is_allowed(count: int) -> bool:
        try:
            simulator.job(resize(count))
        except ZsimError:
            return False
        return True

    return least_count(lambda count: _load(resize(count), simulator), [world, *candidates], is_allowed)


def least_count(
    load_of: Callable[[int], float], counts: Sequence[int], is_allowed: Callable[[int], bool]
) -> int | None:
    """The least of the ascending `counts` whose load is at most 1, or None if there is none. The first count
    is the one that does not fit: it only starts the search.

    Loads fall about as a + b / count, and the next count to be tried is the one where this law reaches 1.
    Counts that are not allowed are skipped, up to 100 in a row.
    """

    def allowed_between(low: int, end: int, *guesses: int) -> int | None:
        """The first allowed index at or after a guess, above `low` and below `end`. The guesses are tried in
        turn.
        """
        for guess in guesses:
            start = max(min(guess, end - 1), low + 1)
            candidates = range(start, min(start + _MAX_REFUSED, end))
            allowed_index = next((index for index in candidates if is_allowed(counts[index])), None)
            if allowed_index is not None:
                return allowed_index
        return None

    def estimate_index(first: tuple[int, float], second: tuple[int, float]) -> int:
        """The first index at which the law through two (index, load) says at most 1, or the last index if it
        never does.
        """
        (x, load), (x_second, load_second) = ((1 / counts[index], load) for index, load in (first, second))
        slope = (load - load_second) / (x - x_second)
        constant = load - slope * x
        is_ever = isfinite(slope) and slope > 0 and constant < 1
        return bisect_left(counts, slope / (1 - constant)) if is_ever else len(counts) - 1

    def measure(index: int) -> tuple[int, float]:
        return index, load_of(counts[index])

    end = len(counts)
    previous, low, high = None, measure(0), None
    while high is None:
        twice = bisect_left(counts, 2 * counts[low[0]])
        guess = twice if previous is None else estimate_index(previous, low)
        next_index = allowed_between(low[0], end, guess, twice)
        if next_index is None:
            return None
        point = measure(next_index)
        if point[1] <= 1:
            high = point
        else:
            previous, low = low, point
    halves = False
    while True:
        guess = (low[0] + high[0]) // 2 if halves else estimate_index(low, high)
        middle = allowed_between(low[0], high[0], guess, low[0] + 1)
        if middle is None:
            return counts[high[0]]
        point = measure(middle)
        low, high = (low, point) if point[1] <= 1 else (point, high)
        halves = not halves


def _load(experiment: Experiment, simulator: Simulator) -> float:
    """The `load` of the experiment's plan. A job without a plan has an infinite load."""
    job = shorten_micro_batches(simulator.job(experiment))
    try:
        plan = simulator.plan(job)
    except ZsimError:
        return inf
    return fill_ratio(job, plan)


def _multiply_nodes(experiment: Experiment, factor: int) -> Experiment:
    """The experiment on `factor` times as many nodes of each type."""
    requested = experiment.cluster
    tables = cluster_tables(requested) if isinstance(requested, str) else requested
    nodes = [
        {**node, "count": node["count"] * factor} for node in read_node_entries(tables["nodes"], "cluster")
    ]
    cluster = {**tables, "nodes": nodes}
    cleared = {"placement": PlacementTable(), "faults": FaultsTable()}
    return experiment.model_copy(update={"cluster": cluster, "gpus": None, "nodes": None, **cleared})


def _set_gpus(experiment: Experiment, gpus: int) -> Experiment:
    cleared = {"placement": PlacementTable(), "faults": FaultsTable()}
    return experiment.model_copy(update={"gpus": gpus, "nodes": None, **cleared})


def simulate(
    experiment: ExperimentSource, *, unfold: bool = False, on_job: Callable[[Job], None] | None = None
) -> api.Result:
    """Simulate one steady step of an experiment, which may be the object, a dict as its TOML is read, or the
    path of a file. With `unfold` every rank is simulated instead of one representative per class. `on_job`
    is called with the job before it is simulated.

    Raises InputError for an experiment that contradicts itself, NotSimulatedError for one that zsim cannot
    simulate yet. A job that does not fit is simulated all the same: `report.fits` is False, and
    `report.out_of_memory` says what would make it fit.
    """
    experiment, simulator = experiment_of(experiment), Simulator()
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
    from zsim.study.tune.remedy import remedy_of

    simulator = simulator or Simulator()
    return least_gpus(experiment, simulator), remedy_of(experiment, simulator)
